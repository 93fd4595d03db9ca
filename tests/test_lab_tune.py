"""Tuning: what is tried, what is chosen and why, what is kept, and that test rows have no say."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupted import at_batch
from scipy import stats
from torch import Tensor, nn

import bayesify as by
from bayesify import lab
from bayesify.cli import main
from bayesify.lab.data import Data, TensorExamples
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.defaults import default_noise
from bayesify.lab.recipes.methods import METHOD_PARTS
from bayesify.lab.runs import Run, load_data
from bayesify.lab.training import BayesianModule, Interrupted, train, train_recipe
from bayesify.lab.tuning import tune_recipe
from bayesify.lab.tuning.choice import Choice, Trial, TuneError, row_nll, row_shares
from bayesify.lab.tuning.grid import FACTORS, NOISES, TRIALS, candidates_of
from bayesify.lab.tuning.tune_recipe import Tuned, tune
from benchmarks.tune import RESULTS, TASKS, page

RATES = {"training.lr": [1e-4, 0.2, 1e-2]}
"""Of these, the largest learns most in a few batches."""


def small(*overrides: str) -> Recipe:
    values = {
        "data": {"limit": 120, "batch_size": 20},
        "model": {"name": "mlp", "options": {"hidden": [16]}},
        "method": "MCDropout",
        "training": {"epochs": 2, "lr": 0.05, "accelerator": "cpu", "schedule": "constant"},
        "evaluation": {"samples": 3, "rows": 20},
    }
    return Recipe.of(values, overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Tuned:
    return tune(small(), folder, grid=RATES, progress=False)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: BayesianModule, *args: Any) -> Tensor:
        raise AssertionError("trains")

    monkeypatch.setattr(BayesianModule, "training_step", refuse)


# What is chosen.


def trials(**rows: list[float]) -> tuple[Trial, ...]:
    return tuple(Trial(name, torch.tensor(nll, dtype=torch.float64), 0.5) for name, nll in rows.items())


def test_the_standard_error_is_that_of_the_paired_t_test() -> None:
    draw = np.random.default_rng(0)
    one, other = draw.gamma(1.0, size=50), draw.gamma(1.5, size=50)
    above, error = trials(one=list(one))[0].above(trials(other=list(other))[0])
    assert above == pytest.approx((one - other).mean())
    assert above / error == pytest.approx(stats.ttest_rel(one, other).statistic)


def test_the_lowest_is_chosen_only_beyond_one_standard_error() -> None:
    # Two differences 1 ± d have the standard deviation √2 d, so that their mean has the standard error d.
    within, beyond = trials(default=[2.0, 2.0], other=[2.2, -0.2]), trials(default=[2.0, 2.0], other=[1.8, 0.2])
    assert Choice(within).lowest.name == "other" and Choice(within).chosen.name == "default"  # 1.0 ± 1.2
    assert Choice(beyond).chosen.name == "other"  # 1.0 ± 0.8
    assert "default: validation NLL 2.0000; other is 1.0000 ± 1.2000 lower, which is within" in Choice(within).why
    assert Choice((*within, *trials(third=[9.0, 9.0]))).why.endswith("; the other one was not better.")
    assert "other: validation NLL 1.0000, 1.0000 ± 0.8000 lower than default" in Choice(beyond).why


def test_only_the_default_is_preferred_in_a_tie() -> None:
    three = trials(default=[5.0, 5.1], close=[1.0, 1.21], lowest=[1.0, 1.2])
    assert Choice(three).chosen.name == "lowest"
    assert Choice(three[:1] + three[:0:-1]).chosen.name == "lowest"


def test_what_failed_is_never_chosen() -> None:
    failed = Trial.failed("bad", "the loss is nan")
    infinite = trials(worse=[1.0, float("inf")])
    fine = trials(fine=[9.0, 9.0])
    choice = Choice((failed, *infinite, *fine))
    assert choice.chosen.name == "fine" and choice.why.endswith("bad failed; the other one was not better.")
    assert "failed: the loss is nan" in str(choice) and "failed: its NLL is not finite" in str(choice)
    with pytest.raises(TuneError, match="no candidate has a finite validation NLL: bad: the loss is nan; worse: its"):
        _ = Choice((failed, *infinite)).chosen


@pytest.mark.parametrize("shape", [(30,), (30, 4)])
def test_the_nll_of_rows_is_torchs(shape: tuple[int, ...]) -> None:
    outputs, labels = torch.randn(1, *shape, 5), torch.randint(5, shape)
    p = by.Categorical().predictive(outputs)
    expected = nn.functional.cross_entropy(outputs[0].movedim(-1, 1), labels, reduction="none")
    rows = expected.flatten(1).mean(1) if expected.dim() > 1 else expected
    torch.testing.assert_close(row_nll(p, labels), rows.double(), check_dtype=False)
    logits, yes = torch.randn(1, *shape), torch.randint(2, shape).float()
    p = by.Bernoulli().predictive(logits)
    expected = nn.functional.binary_cross_entropy_with_logits(logits[0], yes, reduction="none")
    rows = expected.flatten(1).mean(1) if expected.dim() > 1 else expected
    torch.testing.assert_close(row_nll(p, yes), rows.double(), check_dtype=False)
    right = ((logits[0] > 0) == (yes > 0)).double()
    torch.testing.assert_close(row_shares(p, yes), right.flatten(1).mean(1) if right.dim() > 1 else right)


def test_a_row_is_covered_within_164_standard_deviations() -> None:
    p = by.Gaussian(4.0).predictive(torch.zeros(1, 4, 1))  # a standard deviation of 1/2
    y = torch.tensor([[0.0], [0.81], [-0.83], [0.83]])
    assert row_shares(p, y).tolist() == [1, 1, 0, 0]
    torch.testing.assert_close(row_nll(p, y), -torch.distributions.Normal(0.0, 0.5).log_prob(y).double().flatten())


# What is tried.


def test_the_noise_as_given_is_that_of_training_and_near_ones_come_first() -> None:
    given = {"method": {"name": "Rank1", "mean_std": 0.2}}
    for weights, real in ((None, False), (None, True), ("trained.pt", False)):
        usual = default_noise(weights is not None, real)
        first, *others = candidates_of(Recipe.of({**given, "model": {"weights": weights}}), real=real)
        assert first.name == f"noise={usual:g} (as given)" and first.recipe.method.noise == usual
        tried = [each.recipe.method.noise for each in others]
        assert {usual, *tried} == set(NOISES) and tried == sorted(tried, key=lambda n: max(n / usual, usual / n))
        assert all(each.recipe.method.mean_std == 0.2 for each in others)
    assert candidates_of(small("method.noise=0.3"), {"method.noise": [0.1]})[0].name == "noise=0.3 (as given)"


def test_noise_is_not_tried_if_nothing_is_derived_from_it() -> None:
    assert not any("noise" in each.name for each in candidates_of(small("method.p=0.1")))


@pytest.mark.parametrize("name", [name for name in METHOD_PARTS if name != "mixed"])
@pytest.mark.parametrize("weights", [None, "trained.pt"])
def test_every_method_has_as_many_candidates(name: str, weights: str | None) -> None:
    if weights and name in ("temperature", "deep_ensemble"):
        return
    recipe = Recipe.of({"method": name, "model": {"weights": weights}})
    found = candidates_of(recipe)
    assert len(found) == TRIALS and found[0].name.endswith("(as given)")
    assert found[0].recipe.training == recipe.training
    assert len({each.name for each in found}) == len({str(each.recipe.plain()) for each in found}) == TRIALS
    assert candidates_of(recipe, trials=2)[1].recipe == found[1].recipe


def test_the_page_lists_the_values() -> None:
    text = (Path(__file__).parents[1] / "docs" / "tune.md").read_text(encoding="utf-8")
    assert f"`method.noise`: {', '.join(f'{noise:g}' for noise in NOISES)} |" in text
    assert list(FACTORS.items()) == [("training.lr", (0.3, 3.0, 0.1)), ("training.weight_decay", (0.1, 10.0))]
    assert "at 0.3, 3 and 0.1 times the recipe's, the weight decay at 0.1 and 10 times" in text


def test_the_page_has_the_measured_figures() -> None:
    results = json.loads(RESULTS.read_text())
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == page(results)
    text = " ".join((Path(__file__).parents[1] / "docs" / "tune.md").read_text(encoding="utf-8").split())
    gains = {task: [each["default"] - each["test"] for key, each in results.items() if task in key] for task in TASKS}
    assert gains["Fashion-MNIST"] == [0, 0, 0] and f"by {np.mean(gains['noisy digits']):.2f} and that" in text
    assert f"by {np.mean(gains['energy']):.2f} nats" in text
    late = [each["place"] for each in results.values() if each["place"] > 3]
    assert set(late) == {4, 5} and (len(late), len(results)) == (5, 9) and "five of these nine cases" in text


def test_one_key_is_changed_before_two() -> None:
    grid = {"method.p": [0.1, 0.2, 0.3], "training.lr": [0.05, 0.5]}
    found = candidates_of(small("method.p=0.1"), grid)
    names = ["p=0.1, lr=0.05 (as given)", "p=0.2", "p=0.3", "lr=0.5", "p=0.2, lr=0.5", "p=0.3, lr=0.5"]
    assert [each.name for each in found] == names
    assert (found[-1].recipe.method.p, found[-1].recipe.training.lr) == (0.3, 0.5)
    assert candidates_of(small("method.p=0.1"), grid, 3)[0].name == "p=0.1 (as given)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": {"method.q": [0.1]}}, r"method.q: no such key for MCDropout"),
        ({"grid": {"training.lr": [-1]}}, r"training.lr: must be greater than 0; got -1"),
        ({"grid": {"training.lr": 0.1}}, r"training.lr=0.1: expected a list of values to try, such as training.lr=\["),
        ({"grid": {"evaluation.samples": [9]}}, r"evaluation.samples decides what is predicted"),
        ({"grid": {"data.validation": [0.3]}}, r"data.validation decides what is predicted"),
        ({"grid": {"training.lr": [0.05]}}, r"there is nothing to tune for MCDropout, with this grid and this recipe"),
        ({"trials": 1}, r"trials=1: expected at least 2, the recipe as it is and another"),
        ({"trials": 1000}, r"trials=1000: there are only \d+ candidates for MCDropout; lower it, or give the values"),
    ],
)
def test_a_wrong_grid_or_budget_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TuneError, RecipeError), match=message):
        tune(small(), tmp_path / "new", progress=False, **options)
    assert not (tmp_path / "new").exists()


def test_temperature_of_trained_weights_has_nothing_to_tune() -> None:
    with pytest.raises(TuneError, match="nothing to tune for temperature"):
        candidates_of(Recipe.of({"method": "temperature", "model": {"weights": "x.pt"}}))


def test_validation_rows_and_one_device_are_needed(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match=r"digits has 0 validation rows: set data.validation, such as data.valid"):
        tune(small("data.validation=0"), tmp_path / "new", grid=RATES, progress=False)
    with pytest.raises(TuneError, match=r"training.devices=2, training.nodes=1: tune trains on one device"):
        tune(small("training.devices=2"), tmp_path / "new", grid=RATES, progress=False)
    assert not (tmp_path / "new").exists()


def test_equal_candidates_leave_the_recipe_as_it_is(tmp_path: Path) -> None:
    found = tune(small(), tmp_path, grid={"training.clip": [1e6]}, progress=False)
    one, other = found.choice.trials
    assert one.mean == other.mean and found.run.recipe == small()
    assert found.choice.why.startswith("clip=None (as given): ") and "no other was lower" in found.choice.why


# What is kept.


def test_the_best_run_is_finished_and_its_nll_is_the_tables(tuned: Tuned, folder: Path) -> None:
    assert tuned.run.folder == folder / "best" and tuned.run.facts["status"] == "finished"
    assert tuned.run.metrics["validation"]["nll"] == pytest.approx(tuned.choice.chosen.mean, rel=1e-6)
    assert tuned.run.metrics["validation"]["accuracy"] == pytest.approx(tuned.choice.chosen.share)
    assert "test" in tuned.run.metrics
    assert tuned.run.recipe.training.lr == float(tuned.choice.chosen.name.removeprefix("lr=").split()[0])
    again = train(Recipe.read(folder / "best" / "recipe.yaml"), folder / "again", progress=False)
    assert again.metrics["test"]["nll"] == tuned.run.metrics["test"]["nll"]


def test_the_file_has_what_the_table_shows(tuned: Tuned, folder: Path) -> None:
    kept = json.loads((folder / "tune.json").read_text())
    assert kept["why"] == tuned.choice.why and kept["trials"] == tuned.choice.rows()
    assert [row["name"] for row in kept["trials"] if row["chosen"]] == [tuned.choice.chosen.name]
    for row in kept["trials"]:
        assert f"{row['nll']:.4f}" in str(tuned.choice) and row["name"] in str(tuned.choice)


@pytest.mark.usefixtures("no_training")
def test_finished_trials_are_not_repeated(tuned: Tuned, folder: Path) -> None:
    again = tune(small(), folder, grid=RATES, progress=False)
    assert str(again.choice) == str(tuned.choice) and again.run.metrics == tuned.run.metrics


def test_an_interrupted_tuning_goes_on(tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_batch(7, lambda: signal.raise_signal(signal.SIGTERM), monkeypatch)  # of the first trial
    with pytest.raises(Interrupted, match=f"stopped; tune again with the folder {tmp_path} to continue"):
        tune(small(), tmp_path, grid=RATES, progress=False)
    assert not (tmp_path / "best").exists() and "why" not in json.loads((tmp_path / "tune.json").read_text())
    steps: list[int] = []
    step = BayesianModule.training_step

    def counted(self: BayesianModule, batch: Any, batch_idx: int) -> Tensor:
        steps.append(batch_idx)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(BayesianModule, "training_step", counted)
    found = tune(small(), tmp_path, grid=RATES, progress=False)
    assert str(found.choice) == str(tuned.choice) and len(steps) == 4 * 12 - 8


def test_the_folder_of_something_else_is_refused(tuned: Tuned, folder: Path, tmp_path: Path) -> None:
    for other, number in ((small("seed=1"), None), (small(), 3)):
        with pytest.raises(TuneError, match="holds the trials of another recipe, grid or number of trials"):
            tune(other, folder, grid=RATES, trials=number, progress=False)
    with pytest.raises(by.BayesifyError, match="already holds a run"):
        tune(small(), tuned.run.folder, grid=RATES, progress=False)
    (tmp_path / "best").mkdir()
    with pytest.raises(TuneError, match=r"has trials or best and no tune.json; delete them, or choose another"):
        tune(small(), tmp_path, grid=RATES, progress=False)


def test_a_trial_that_diverges_fails_alone_and_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    grid = {"training.lr": [1e30, 0.1]}
    row = tune(small(), tmp_path, grid=grid, progress=False).choice.rows()[-1]
    assert row["name"] == "lr=1e+30" and ("not finite" in row["failure"] or "nan" in row["failure"])
    request.getfixturevalue("no_training")
    assert tune(small(), tmp_path, grid=grid, progress=False).choice.rows()[-1] == row


def test_regression_is_chosen_by_density_and_shows_coverage(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(150, 3)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=x, y=(100 * x[:, :1] + 7).astype(np.float32))
    data = {"name": "npz", "path": str(tmp_path / "rows.npz"), "validation": 0.3, "batch_size": 20}
    recipe = Recipe.of({**small().without_defaults(), "data": data})
    found = tune(recipe, tmp_path / "tune", grid={"training.lr": [1e-4]}, progress=False)
    own = found.run.metrics["validation"]
    assert found.choice.chosen.mean == pytest.approx(-own["log_density"], rel=1e-6)
    assert found.choice.chosen.share == pytest.approx(own["coverage"]) and "coverage" in str(found.choice)


# Test rows.


class Untouchable(TensorExamples):
    """Examples that know their number only."""

    def raw(self, rows: Tensor) -> Tensor:
        raise AssertionError("a test row was read")

    def take(self, rows: Tensor) -> TensorExamples:
        raise AssertionError("a test row was taken")


def test_test_rows_are_not_read_before_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def guarded(recipe: Recipe) -> Data:
        data = load_data(recipe)
        targets = torch.full((len(data.test),), 10**6)  # as labels they would fail in every metric
        return replace(data, test=Untouchable(torch.empty(len(data.test), 0), targets))

    for module in (train_recipe, tune_recipe):
        monkeypatch.setattr(module, "load_data", guarded)
    monkeypatch.setattr(Run, "data", lambda self: guarded(self.recipe))
    seen: list[str] = []
    choose: Callable[..., Run] = tune_recipe._finish

    def noted(candidate: Any, folder: Path) -> Run:
        seen.append(candidate.name)
        return choose(candidate, folder)

    monkeypatch.setattr(tune_recipe, "_finish", noted)
    with pytest.raises(AssertionError, match="a test row was"):  # by the evaluation of what is chosen
        tune(small(), tmp_path, grid={"training.lr": [1e-3, 0.1]}, progress=False)
    assert len(seen) == 1


def test_other_test_rows_change_no_trial(tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shuffled(recipe: Recipe) -> Data:
        data = load_data(recipe)
        order = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(1))
        other = TensorExamples(data.test.raw(order).flip(-1), data.test.targets)
        return replace(data, test=other)

    for module in (train_recipe, tune_recipe):
        monkeypatch.setattr(module, "load_data", shuffled)
    monkeypatch.setattr(Run, "data", lambda self: shuffled(self.recipe))
    found = tune(small(), tmp_path, grid=RATES, progress=False)
    assert found.choice.rows() == tuned.choice.rows()
    assert found.run.metrics["test"]["accuracy"] < tuned.run.metrics["test"]["accuracy"]


# Training without evaluation, on which trials rely.


def test_a_run_is_evaluated_later_as_if_at_once(tmp_path: Path) -> None:
    run = train(small(), tmp_path / "later", progress=False, evaluated=False)
    assert run.facts["status"] == "trained" and not (run.folder / "metrics.json").exists()
    assert not run.familiarity_file.exists()
    trained = run.facts["seconds"]
    train(small(), tmp_path / "later", resume=True, progress=False)
    once = train(small(), tmp_path / "once", progress=False)
    assert run.metrics == once.metrics and run.facts["status"] == once.facts["status"] == "finished"
    assert run.facts["seconds"] == trained and run.familiarity_file.exists()


# In a loop of one's own.


def rows_of_a_line(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(count))
    return x, (x[:, 0] > 0).long()


def fit(method: by.methods.Method) -> nn.Module:
    x, y = rows_of_a_line(80)
    model = by.convert(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)), method)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        by.elbo(model, x, y, n=10**4).loss.backward()
        optimizer.step()
    return model.eval()


def test_choose_returns_the_model_of_the_lowest_nll() -> None:
    x, y = rows_of_a_line(101)
    methods = [by.MCDropout(0.8), by.MCDropout(0.02), by.MCDropout(0.5)]
    choice = lab.choose(fit, methods, (x, y), samples=10)
    assert choice.method is methods[1] and "MCDropout(0.02)" in choice.why
    p = by.predict(choice.model, x, 10)
    expected = nn.functional.nll_loss(p.log_probs, y)
    assert choice.chosen.mean == pytest.approx(float(expected), rel=1e-5)
    assert choice.chosen.share == pytest.approx(float((p.label == y).float().mean()))
    batches = [(x[i : i + 40], y[i : i + 40]) for i in range(0, 101, 40)]
    again = lab.choose(fit, methods, iter(batches), samples=10)
    assert [trial.mean for trial in again.trials] == pytest.approx([trial.mean for trial in choice.trials], rel=1e-5)


def test_choose_keeps_the_first_of_equals_and_skips_what_is_not_finite() -> None:
    x, y = rows_of_a_line(50)
    methods = [by.MCDropout(0.1, prior_std=2.0), by.MCDropout(0.1, prior_std=2.0)]
    assert lab.choose(fit, methods, (x, y)).method is methods[0]

    def broken(method: by.methods.Method) -> nn.Module:
        model = fit(method)
        if method.p > 0.5:
            nn.init.constant_(model[2].bias, float("nan"))
        return model

    choice = lab.choose(broken, [by.MCDropout(0.9), by.MCDropout(0.1)], (x, y))
    assert choice.method == by.MCDropout(0.1) and "not finite" in str(choice)


def test_choose_needs_two_methods_and_rows() -> None:
    x, y = rows_of_a_line(50)
    with pytest.raises(TuneError, match="1 methods and 50 validation rows: expected at least 2 of each"):
        lab.choose(fit, [by.MCDropout(0.1)], (x, y))
    with pytest.raises(TuneError, match="2 methods and 0 validation rows"):
        lab.choose(fit, [by.MCDropout(0.1), by.MCDropout(0.2)], [])


# On the command line.


def test_the_command_prints_the_table_the_reason_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small().write(tmp_path / "mine.yaml")
    words = ["tune", "mine.yaml", "training.epochs=1", "--grid", "training.lr=[1e-4]", "--seed", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "lr=0.05 (as given): validation NLL" in out and "lr=0.0001" in out and "accuracy" in out
    assert out.splitlines()[-1] == "runs/mine-MCDropout-tune/best"
    assert Run.open("runs/mine-MCDropout-tune/best").recipe == small("training.epochs=1", "seed=1")
    assert main([*words, "--quiet", "--out", "runs/mine-MCDropout-tune"]) == 0
    assert capsys.readouterr().out == "runs/mine-MCDropout-tune/best\n"
    assert main(["report", "runs/mine-MCDropout-tune/best", "--out", "page.html"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "method.p"], "--grid method.p: expected a key and a list of values"),
        (["--grid", "method.p=0.1"], "expected a list of values to try"),
        (["--grid", "method.noises=[1]"], "method.noises: no such key for"),
        (["--trials", "1"], "greater than or equal to 2"),
        (["data.validation=0"], "0 validation rows: set data.validation"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
