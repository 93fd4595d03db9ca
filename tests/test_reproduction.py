"""Experiments of the papers by name: what is trained and kept, statistics, verdicts, pages, settings."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import bayesify as by
from bayesify.cli import main
from bayesify.lab.comparison.columns import Column
from bayesify.lab.data import Data
from bayesify.lab.models import build
from bayesify.lab.recipes import Recipe
from bayesify.lab.reproduction import EXPERIMENTS, ReproductionError, records, reproduce
from bayesify.lab.reproduction.experiment import BASE, Exhibit, Expectation, Experiment, Measured, Scale
from bayesify.lab.reproduction.experiments import emp_uci
from bayesify.lab.reproduction.page import markdown
from bayesify.lab.reproduction.records import Record, digest
from bayesify.lab.reproduction.run import TOGETHER, jobs_of, known_results
from bayesify.lab.reproduction.verdict import Results
from bayesify.lab.runs import Run, prepared_for_method
from bayesify.lab.trained import Trained
from bayesify.lab.training import BayesianModule
from bayesify.layers import bayesian_layers
from docs.reproduction_tables import accounted_for, papers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "reproduction" / "results"


def recipe_of(setting: str, row: str, seed: int) -> Recipe:
    return Recipe.of(
        {
            "data": {"name": "cubic", "options": {"points": int(setting)}, "validation": 0},
            "model": {"name": "mlp", "options": {"hidden": 4}},
            "method": row,
            "training": {"epochs": 1, "optimizer": "adam"},
            "seed": seed,
        }
    )


def measure(trained: Trained, data: Data) -> Measured:
    p = trained.predict(data.test, 2)
    return {"": {"mean": float(p.mean.mean())}, " + 1": {"mean": float(p.mean.mean()) + 1}}


def tiny(**changes: Any) -> Experiment:
    """Two networks, two curves, three seeds; a claim that the second row is above the first of either."""
    scale = Scale({"8": 3, "9": 2}, recipe_of, "tiny", 1, together=changes.pop("together", True))
    given = Experiment(
        name="tiny",
        exhibits=(Exhibit("Paper", "table 1", "More is more", (Expectation("mean", "IBNN + 1", "IBNN"),)),),
        rows=("IBNN", "none"),
        columns=(Column("mean", "mean", ("mean",), max),),
        measure=measure,
        small=scale,
        paper=scale,
    )
    return replace(given, **changes)


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Experiment], Path]:
    """Make an experiment known, and return a folder for its results."""

    def known(experiment: Experiment) -> Path:
        monkeypatch.setitem(EXPERIMENTS, experiment.name, experiment)
        return tmp_path / "results"

    return known


def run(out: Path, **options: Any) -> Results:
    return reproduce("tiny", out=out, runs=out.parent / "runs", progress=False, **options)


def without_times(file: Path) -> list[dict[str, Any]]:
    return [{**json.loads(line), "seconds": 0} for line in file.read_text().splitlines()]


# What is trained, and what is kept.


@pytest.mark.parametrize("together", [True, False])
def test_an_interrupted_experiment_goes_on_and_ends_as_one_that_was_not(
    together: bool, add: Callable[[Experiment], Path], tmp_path: Path
) -> None:
    calls = 0

    def stops(trained: Trained, data: Data) -> Measured:
        nonlocal calls
        calls += 1
        if calls == count - 1:
            raise KeyboardInterrupt
        return measure(trained, data)

    fewer = replace(tiny().small, seeds={"8": 3, "9": 2} if together else {"8": 2}, together=together)
    count = 2 * sum(fewer.seeds.values())
    out = add(tiny(measure=stops, small=fewer))
    with pytest.raises(KeyboardInterrupt):
        run(out)
    kept = len(without_times(out / "tiny.jsonl"))
    assert kept and (out / "tiny.md").exists(), "what was measured must be kept, with its page"
    run(out)
    assert calls == count + count - 1 - kept, "only what was missing is measured again"
    whole = add(tiny(small=fewer)).parent / "whole"
    reproduce("tiny", out=whole, runs=tmp_path / "other", progress=False)
    by_place = sorted(without_times(out / "tiny.jsonl"), key=str)
    assert by_place == sorted(without_times(whole / "tiny.jsonl"), key=str), "the same seeds give the same numbers"


def test_more_seeds_later_are_the_same_as_all_at_once(add: Callable[[Experiment], Path], tmp_path: Path) -> None:
    out = add(tiny())
    run(out, seeds=1, only=["8", "IBNN"])
    first = without_times(out / "tiny.jsonl")
    assert [record["seed"] for record in first] == [0, 1, 2], "seeds that are trained side by side are so in any case"
    run(out)
    assert without_times(out / "tiny.jsonl")[:3] == first


def test_a_changed_recipe_is_trained_again_and_old_results_are_not_shown(add: Callable[[Experiment], Path]) -> None:
    def other(setting: str, row: str, seed: int) -> Recipe:
        return Recipe.of(recipe_of(setting, row, seed).plain(), ["training.lr=0.5"] if row == "IBNN" else [])

    out = add(tiny())
    before = run(out)
    changed = tiny()
    add(replace(changed, small=replace(changed.small, recipe=other)))
    after = run(out, only=["none"])
    assert {record.row for record in after.records} == {"none"}
    assert before.cell("8", "none", "mean") == after.cell("8", "none", "mean")
    assert run(out).cell("8", "IBNN", "mean") != before.cell("8", "IBNN", "mean")


def test_rows_start_from_the_base_of_their_seed(add: Callable[[Experiment], Path], tmp_path: Path) -> None:
    def fine_tuned(setting: str, row: str, seed: int) -> Recipe:
        plain = recipe_of(setting, row, seed).plain()
        changes = {"training": {"epochs": 1, "lr": 1e-9, "posterior_lr": 1e-9}}
        return Recipe.of({**plain, **changes, "model": {**plain["model"], "weights": BASE}, "method": {"name": row}})

    def base(setting: str, seed: int) -> Recipe:
        return Recipe.of(recipe_of(setting, "none", seed).plain(), ["training.epochs=5", "training.lr=0.1"])

    def first_weight(trained: Trained, data: Data) -> Measured:
        return {"": {"mean": float(trained.model.state_dict()["layers.linear1.weight"].flatten()[0])}}

    scale = replace(tiny().small, seeds={"8": 2}, recipe=fine_tuned, base=base, together=False)
    results = run(add(tiny(small=scale, measure=first_weight)))
    assert len(list((tmp_path / "runs").iterdir())) == 2 * 3, "for each seed a base, and two networks"
    weights = results.cell("8", "none", "mean")
    assert weights == pytest.approx(results.cell("8", "IBNN", "mean"), abs=1e-5) and weights[0] != weights[1]
    (found,) = (tmp_path / "runs").glob("cubic-mlp-none-0-" + digest(base("8", 0)))
    assert weights[0] == pytest.approx(
        float(Run(found).load().model.state_dict()["layers.linear1.weight"].flatten()[0]), abs=1e-5
    )
    other = replace(scale, base=lambda setting, seed: Recipe.of(base(setting, seed).plain(), ["training.epochs=6"]))
    add(tiny(small=other, measure=first_weight))
    assert run(tmp_path / "results", seeds=1).cell("8", "none", "mean").keys() == {0}, "another base, other networks"


def test_jobs_are_the_first_seeds_of_every_setting_before_the_next() -> None:
    experiment = tiny(together=False)
    places = [(job.setting, job.row, job.seeds) for job in jobs_of(experiment, "small")]
    assert places[:4] == [("8", "IBNN", (0,)), ("8", "none", (0,)), ("9", "IBNN", (0,)), ("9", "none", (0,))]
    assert len(places) == 10 and places[-1] == ("8", "none", (2,))
    many = tiny()
    many = replace(many, small=replace(many.small, seeds={"8": 2 * TOGETHER + 1}))
    assert [len(job.seeds) for job in jobs_of(many, "small", only=["none"])] == [TOGETHER, TOGETHER, 1]


def test_a_network_that_diverges_is_a_result(add: Callable[[Experiment], Path]) -> None:
    def diverging(setting: str, row: str, seed: int) -> Recipe:
        wild = ["training.lr=1e30", "training.optimizer=sgd", "training.epochs=20", "training.clip=1e9"]
        return Recipe.of(recipe_of(setting, row, seed).plain(), wild if row == "none" else [])

    out = add(replace(tiny(), small=replace(tiny().small, recipe=diverging)))
    results = run(out, only=["8"])
    assert all(record.failed for record in results.records if record.row == "none")
    assert "came to nothing" in (out / "tiny.md").read_text()


# Bad input.


def test_unknown_names_are_answered_by_known_ones(add: Callable[[Experiment], Path]) -> None:
    out = add(tiny())
    with pytest.raises(ReproductionError, match=r"no experiment is called 'emp-uic': did you mean 'emp-uci'"):
        reproduce("emp-uic", out=out)
    with pytest.raises(ReproductionError, match=r"no setting and no row 'IBN': did you mean 'IBNN'"):
        run(out, only=["IBN"])
    with pytest.raises(ReproductionError, match="seeds=0"):
        run(out, seeds=0)


def test_missing_data_are_named_and_what_was_trained_is_kept(
    add: Callable[[Experiment], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_there(setting: str, row: str, seed: int) -> Recipe:
        missing = {"data": {"name": "npz", "path": str(tmp_path / "missing.npz")}}
        return Recipe.of({**recipe_of(setting, row, seed).plain(), **(missing if row == "none" else {})})

    out = add(replace(tiny(), small=replace(tiny().small, recipe=half_there)))
    with pytest.raises(ReproductionError, match=r"missing\.npz.*needs these data; then run the same command again"):
        run(out, only=["8"])
    assert len(without_times(out / "tiny.jsonl")) == 3
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    with pytest.raises(ReproductionError, match=r"no folder uci in .*emp-uci needs these data"):
        reproduce("emp-uci", out=out, only=["yacht"], progress=False)


def test_a_full_disk_keeps_what_was_trained(add: Callable[[Experiment], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out, write, written = add(tiny()), records.write_file, 0

    def full(path: Path, content: Any) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(records, "write_file", full)
    with pytest.raises(ReproductionError, match=r"No space left on device\. What was trained is kept"):
        run(out)
    assert len(without_times(out / "tiny.jsonl")) == 3
    assert len(run(out).records) == 10


def test_a_damaged_line_is_named(add: Callable[[Experiment], Path]) -> None:
    out = add(tiny())
    run(out, only=["9"])
    with (out / "tiny.jsonl").open("a") as file:
        file.write('{"setting": "8"\n')
    with pytest.raises(ReproductionError, match=r"tiny\.jsonl, line 5: not a result .*delete the line"):
        run(out)


def test_the_command_lists_runs_and_explains(
    add: Callable[[Experiment], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    add(tiny())
    assert main(["reproduce", "tiny", "--only", "8", "-q"]) == 0
    assert capsys.readouterr().out.strip() == "reproduction/results/tiny.md"
    assert main(["reproduce", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in EXPERIMENTS) and "More is more" in shown and "partly" in shown
    assert main(["reproduce", "tine"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err


# Statistics and verdicts.


def results_of(ours: list[float], theirs: list[float], **changes: Any) -> Results:
    experiment = tiny(exhibits=(Exhibit("P", "t", "c", (Expectation("mean", "IBNN", "none", "8"),)),), **changes)
    found = [
        Record("8", row, seed, "", 0.0, {"": {"mean": value}})
        for row, values in (("IBNN", ours), ("none", theirs))
        for seed, value in enumerate(values)
    ]
    return Results(experiment, "small", found)


@pytest.mark.parametrize("overlap", [0.0, 1 / 9])
def test_margins_are_those_of_a_paired_t_test_corrected_for_resampled_splits(overlap: float) -> None:
    generator = np.random.default_rng(0)
    ours, theirs = generator.normal(size=(2, 20))
    (test,) = results_of(list(ours), list(theirs), overlap=overlap).tests(
        Exhibit("P", "t", "c", (Expectation("mean", "IBNN", "none", "8"),))
    )
    difference = ours - theirs  # Nadeau and Bengio (2003): the variance of the mean is (1/n + test/training rows) s²
    error = math.sqrt((1 / 20 + overlap) * difference.var(ddof=1))
    assert test.difference == pytest.approx(difference.mean())
    assert test.margin == pytest.approx(stats.t.ppf(0.975, 19) * error)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([2.0, 2.1, 2.2], [1.0, 1.15, 1.2], "reproduced"),
        ([1.0, 1.15, 1.2], [2.0, 2.1, 2.2], "not"),
        ([1.0, 2.0, 3.0], [2.0, 1.0, 3.1], "undecided"),
        ([2.0, 2.1], [1.0, 1.1], "undecided"),  # two seeds are too few, however clear they are
        ([], [], "undecided"),
    ],
)
def test_a_verdict_needs_three_seeds_and_a_significant_difference(
    ours: list[float], theirs: list[float], expected: str
) -> None:
    results = results_of(ours, theirs)
    assert results.verdict(results.experiment.exhibits[0]) == expected == results.overall


def test_less_is_better_where_the_column_says_so() -> None:
    column = Column("mean", "mean", ("mean",), min)
    results = results_of([2.0, 2.1, 2.2], [1.0, 1.15, 1.2], columns=(column,))
    assert results.overall == "not"


def test_the_page_has_means_standard_deviations_and_tests(add: Callable[[Experiment], Path]) -> None:
    published = {"8": {"IBNN": {"mean": "1.50 ± 0.25"}}}
    exhibit = replace(tiny().exhibits[0], published=published)
    out = add(tiny(exhibits=(exhibit,)))
    results = run(out, only=["8"])
    values = list(results.cell("8", "IBNN", "mean").values())
    page = (out / "tiny.md").read_text()
    assert f"| IBNN | {np.mean(values):.3f} ± {np.std(values, ddof=1):.3f} | 1.50 ± 0.25 |" in page
    assert "| 8 | IBNN + 1 better than IBNN | mean | 1.000 ± 0.000 | 3 | holds |" in page
    assert "**partly**" in page and "Not run yet: 9." in page, "a claim about both curves needs both"
    assert (out / "tiny.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "tiny.json").read_text())["exhibits"][0]["verdict"] == "partly"
    add(tiny(exhibits=(exhibit,), least=2))
    assert run(out).overall == "reproduced"


# The experiments.


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data root with UCI sets of thirty random rows."""
    for name in emp_uci.SETS:
        folder = tmp_path / "uci" / name / "data"
        folder.mkdir(parents=True)
        np.savetxt(folder / "data.txt", np.random.default_rng(0).normal(size=(30, 4)))
        np.savetxt(folder / "index_features.txt", [0, 1, 2], fmt="%d")
        np.savetxt(folder / "index_target.txt", [3], fmt="%d")
        for split in range(20):
            np.savetxt(folder / f"index_train_{split}.txt", range(27), fmt="%d")
            np.savetxt(folder / f"index_test_{split}.txt", range(27, 30), fmt="%d")
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))


SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "uci": ((3,), 1),
    "cubic": ((1,), 1),
    "fashion-mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "folder": ((3, 224, 224), 1000),
    "physionet2012": ((48, 84), 2),
}
"""The shape of an input, and the number of outputs, of the data sets of the experiments."""


def step_without_data(recipe: Recipe) -> None:
    """One step of training on tensors without values: all shapes fit, and the parameters get gradients."""
    shape, outputs = SHAPES[recipe.data.name]
    is_real = outputs == 1
    with torch.device("meta"):
        network = build(recipe.model.name, shape=shape, outputs=outputs, **recipe.model.options)
        network = recipe.method.convert(prepared_for_method(recipe, network), 0.1).train()  # type: ignore[union-attr]
        x, y = torch.zeros(2, *shape), torch.zeros(2, outputs) if is_real else torch.zeros(2, dtype=torch.long)
        loss = -(by.Gaussian() if is_real else by.Categorical()).log_prob(network(x), y).mean()
        (loss + by.kl(network) if bayesian_layers(network) else loss).backward()
    assert any(p.grad is not None for p in network.parameters())


STARTED: set[str] = set()
"""The networks and methods that have done a step: each does one, in small networks first, as large ones are slow."""


@pytest.mark.parametrize("name", sorted(EXPERIMENTS, key=lambda name: name not in ("emp-uci", "rank1-records")))
@pytest.mark.usefixtures("stand_ins")
def test_the_papers_settings_are_valid_and_start(name: str) -> None:
    experiment = EXPERIMENTS[name]
    for setting, seeds in experiment.paper.seeds.items():
        assert seeds >= experiment.least, "a verdict needs these"
        for row in experiment.rows:
            recipe = experiment.paper.recipe(setting, row, 0)
            both = {recipe.model.name, recipe.plain()["method"]["name"]}
            if not both <= STARTED and not recipe.model.name.startswith("torchvision:"):  # not a part of the lab
                step_without_data(recipe)
                STARTED.update(both)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_expectations_are_about_rows_and_measures_that_there_are(name: str) -> None:
    experiment = EXPERIMENTS[name]
    measures = {column.key: column for column in experiment.columns}
    for exhibit in experiment.exhibits:
        assert exhibit.expectations, "a claim stands on something"
        for expectation in exhibit.expectations:
            assert measures[expectation.measure].best is not None
            assert expectation.setting in ("", *experiment.small.seeds)
            for row in (expectation.better, expectation.worse):
                assert isinstance(row, (int, float)) or any(row.startswith(own) for own in experiment.rows)


def test_the_expectations_of_emps_regressions_are_the_order_in_its_table() -> None:
    """Spot checks against the printed table: yacht is the clearest, power the other way round, kin8nm a tie."""
    found = {(e.better, e.worse, e.setting) for e in emp_uci.EMP_UCI.exhibits[0].expectations}
    assert {("ECMP", "dropout", "yacht"), ("EMP", "explicit ensemble", "yacht")} <= found
    assert ("explicit ensemble", "ECMP", "power-plant") in found
    assert not any(setting == "kin8nm" for _, _, setting in found)


def test_every_exhibit_has_a_row_in_the_documentation() -> None:
    for experiment in EXPERIMENTS.values():
        assert accounted_for(experiment) == list(experiment.exhibits), experiment.name
    places = [row.place for rows in papers().values() for row in rows]
    assert len(places) >= 60
    for title, tables in {"Rank-1": 8, "iBNN": 7, "EMP": 13, "BayesAdapter": 8}.items():
        rows = next(rows for name, rows in papers().items() if name.startswith(title))
        numbers = {int(n) for row in rows if row.place.startswith("table") for n in numbers_of(row.place)}
        assert numbers == set(range(1, tables + 1)), f"{title} has tables 1 to {tables}"


def numbers_of(place: str) -> list[int]:
    """The numbers in a place, such as 3, 4 and 5 of "tables 3, 4, 5" or of "tables 3 to 5 (v1)"."""
    words = place.split(" (")[0].replace(",", " ").split()
    found = [int(word) for word in words if word.isdecimal()]
    return list(range(found[0], found[1] + 1)) if "to" in words else found


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_committed_verdicts_rest_on_enough_seeds_and_on_what_was_measured(file: Path) -> None:
    written = json.loads(file.read_text())
    experiment = EXPERIMENTS[written["experiment"]]
    results = known_results(experiment, written["scale"], RESULTS)
    for exhibit, kept in zip(experiment.exhibits, written["exhibits"], strict=True):
        tests = list(results.tests(exhibit))
        assert results.verdict(exhibit) == kept["verdict"]
        if kept["verdict"] == "reproduced":
            assert all(test.seeds >= max(experiment.least, 3) and test.outcome == "holds" for test in tests)
    page, expected = (text.splitlines() for text in (file.with_suffix(".md").read_text(), markdown(results, file.stem)))
    assert [line for line in page if "torch " not in line] == [line for line in expected if "torch " not in line]


@pytest.mark.usefixtures("stand_ins")
def test_emps_copies_start_where_the_weight_does_and_decay_as_it_does() -> None:
    recipe = emp_uci.EMP_UCI.paper.recipe("yacht", "EMP", 0)
    network = recipe.method.convert(build("mlp", shape=(3,), outputs=1, **recipe.model.options))  # type: ignore[union-attr]
    for norm in (network.layers.norm0, network.layers.norm1):
        assert torch.allclose(norm.weight, torch.full_like(norm.weight, 0.2))
        assert 0.1 < float(norm.posterior.weight.detach().mean()) < 0.3
    groups = BayesianModule(network, n=27, training=recipe.training).parameter_groups()
    assert {group["weight_decay"] for group in groups} == {0.01}
    assert sum(len(group["params"]) for group in groups) == len(list(network.parameters()))


def test_results_outlive_a_new_option_and_not_a_changed_one() -> None:
    given: dict[str, Any] = {"method": {"name": "IBNN"}, "training": {"epochs": 3, "lr": 0.1}}
    same = Recipe.of({**given, "training": {**given["training"], "validation_samples": 4}})  # its usual value
    assert digest(Recipe.of(given)) == digest(same)
    changes = ["training.lr=0.2", "method.components=8", "method=Rank1", "seed=1", "data.name=cubic", "model.name=mlp"]
    assert len({digest(Recipe.of(given, [change])) for change in changes} | {digest(same)}) == len(changes) + 1
    assert digest(same, (0, 1)) != digest(same, (0,)) != digest(same)
