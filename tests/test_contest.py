"""The contest: how its contestants are trained, chosen and compared, on tiny sizes, and what it lets the README say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bayesify as by
from bayesify.lab import metrics
from benchmarks.contest import __main__ as command
from benchmarks.contest import contestants, measures, report, results, trial
from benchmarks.contest.contestants import CONTESTANTS, METHODS, TRIALS, Job, options_of
from benchmarks.contest.data import DATA, HELD, DataSet, Group, Rows, joined, other
from benchmarks.contest.results import LARGEST, SCALED, TEMPERATURE
from benchmarks.contest.trial import TUNING_SEED, Trial
from benchmarks.store import Store

ROOT = Path(__file__).parents[1]


def tiny(seed: int, folds: int = 1) -> Rows:
    """Two overlapping classes, a shifted group and other data far away."""

    def some(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(2, (rows,), generator=generator)
        return torch.randn(rows, 4, generator=generator) + y.unsqueeze(1), y

    held = joined(some(60, 1), some(60, 2))
    x, y = some(40, 3)
    groups = {HELD: held, "corrupted 1": Group(x + 0.1, y, torch.arange(40) % folds)}
    groups |= {"corrupted 5": Group(x + 2, y, torch.arange(40) % folds)}
    groups |= {"near reversed": other(-x, folds=folds), "far x10": other(10 * x, folds=folds)}
    return Rows(some(70, 10 + seed), groups)


def network(rows: Rows) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


TINY = {
    "tiny": DataSet("tiny, from scratch", tiny, network, 2, batch=16, seeds=2, networks="tiny"),
    "tiny-tuned": DataSet("tiny, fine-tuned", tiny, network, 2, further=1, batch=16, seeds=2, networks="tiny"),
    "tiny-halves": DataSet(
        "tiny, halves", lambda seed: tiny(seed, 2), network, 2, further=1, batch=16, folds=2, seeds=2, networks="tiny"
    ),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store[Trial]:
    for name, data in TINY.items():
        monkeypatch.setitem(DATA, name, data)
    found = Store(Trial, tmp_path / "contest.jsonl", tmp_path)
    monkeypatch.setattr(trial, "STORE", found)
    monkeypatch.setattr(measures, "RESAMPLES", 20)
    return found


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["contest", "run", *arguments])
    command.main()


# Contestants.


@pytest.mark.parametrize("data", [name for name in DATA if name != "cifar10"])
def test_every_contestant_has_as_many_trials(data: str) -> None:
    """A plain network that is given has nothing to tune; what comes after plain training also chooses the network."""
    for contestant in CONTESTANTS:
        options = options_of(contestant, data)
        assert len({json.dumps(each) for each in options}) == len(options), "an option twice"
        is_after = contestant == "SWAG" or contestant.startswith("Laplace")
        networks = 1 if DATA[data].further else TRIALS
        expected = networks * TRIALS if is_after else networks if contestant == contestants.PLAIN else TRIALS
        assert len(options) == expected, contestant


@pytest.mark.parametrize("data", ["tiny", "tiny-tuned"])
@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_every_contestant_trains_and_predicts(data: str, contestant: str, store: Store[Trial]) -> None:
    one = Trial.of(data, contestant, options_of(contestant, data)[-1], 0)
    facts, rows = one.run(store.runs)
    for group in tiny(0).groups:
        sums = np.exp(rows[f"{group}/log_probs"].astype(float)).sum(1)
        np.testing.assert_allclose(sums, 1, atol=1e-5)
        assert rows[f"{group}/unfamiliar"].shape == sums.shape
    single = contestant in (contestants.PLAIN, contestants.LONGER)
    assert (np.abs(rows[f"{HELD}/epistemic"]).max() < 1e-6) == single
    members = {"deep ensemble of 2": 2, "deep ensemble of 4": 4, "SWAG": contestants.SWAG_DRAWS}
    if contestant in members:
        assert facts["added"] == pytest.approx(members[contestant] - 1)


def test_a_deep_ensemble_is_the_average_of_networks_trained_alone(store: Store[Trial]) -> None:
    job = Job("tiny", tiny(0), 0, store.runs)
    options = {"lr": 0.01, "weight_decay": 0.01}
    pair = CONTESTANTS["deep ensemble of 2"](job, options)
    x = job.rows.groups[HELD].x
    alone = [contestants.plain(job, member, **options).networks[0](x).softmax(1) for member in range(2)]
    assert not torch.allclose(*alone)
    torch.testing.assert_close(trial.described(pair, x, None).probs, torch.stack(alone).mean(0))
    first = CONTESTANTS["plain"](job, options).networks[0](x).softmax(1)
    torch.testing.assert_close(first, alone[0])


def test_fine_tuning_starts_from_the_plain_network(store: Store[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "fit", lambda *args, **options: 0.0)
    torch.manual_seed(0)
    job = Job("tiny-tuned", tiny(0), 0, store.runs)
    given, converted = contestants.plain(job).networks[0], CONTESTANTS["MCDropout"](job, {"noise": 0.1}).networks[0]
    torch.testing.assert_close(given[0].weight, converted[0].weight)
    assert isinstance(converted[3].method, by.MCDropout)  # not the first layer: pixels are not dropped


# Choice.


def test_options_and_temperature_are_chosen_on_rows_that_are_not_shown(store: Store[Trial]) -> None:
    """Trials whose labels to show are changed choose the same."""
    one = Trial.of("tiny", "plain", {"lr": 0.01, "weight_decay": 0.01}, 0)
    _, rows = one.run(store.runs)
    changed = dict(rows)
    changed[f"{HELD}/y"] = np.where(rows[f"{HELD}/fold"] == 0, 1 - rows[f"{HELD}/y"], rows[f"{HELD}/y"])
    for is_scaled in (False, True):
        assert measures.loss_of(rows, 0, is_scaled) == measures.loss_of(changed, 0, is_scaled)
        assert measures.temperature_of(rows, 0, is_scaled) == measures.temperature_of(changed, 0, is_scaled)
    assert measures.loss_of(rows, 0, True) <= measures.loss_of(rows, 0, False) + 1e-9
    tuned = Trial.of("tiny", "plain", {"lr": 0.01, "weight_decay": 0.01}, TUNING_SEED)
    assert set(tuned.run(store.runs)[1]) == {f"{HELD}/{name}" for name in ("log_probs", "epistemic", "fold", "y")}


def test_each_half_is_shown_with_what_the_other_chose(store: Store[Trial]) -> None:
    """Option "a" is best on the second half, so it is chosen for the first, and the other way round."""
    losses = {"a": [1.0, 3.0], "b": [2.0, 2.0]}
    for option, each in zip(options_of("plain longer", "tiny-halves"), ("a", "b", "b", "b"), strict=True):
        store.add(Trial.of("tiny-halves", "plain longer", option, TUNING_SEED), {"losses": [losses[each]] * 2}, {})
    first, second = results.chosen_options("tiny-halves", "plain longer", False) or []
    assert [json.loads(first), json.loads(second)] == options_of("plain longer", "tiny-halves")[:2]
    rows = Trial("tiny-halves", "plain longer", first, 0).run(store.runs)[1]
    other_rows = Trial("tiny-halves", "plain longer", second, 0).run(store.runs)[1]
    found = measures.shown([rows, other_rows], False)[HELD]
    fold = rows[f"{HELD}/fold"]
    expected = np.concatenate([rows[f"{HELD}/log_probs"][fold == 0], other_rows[f"{HELD}/log_probs"][fold == 1]])
    np.testing.assert_allclose(found.log_probs, expected, atol=1e-5)


# Measures.


def some_groups(seed: int = 0) -> dict[str, measures.Shown]:
    generator = torch.Generator().manual_seed(seed)

    def group(rows: int, has_labels: bool) -> measures.Shown:
        log_probs = (2 * torch.randn(rows, 3, generator=generator)).log_softmax(1).double()
        scores = {name: torch.rand(rows, generator=generator).double() for name in measures.SCORES}
        y = torch.randint(3, (rows,), generator=generator) if has_labels else None
        return measures.Shown(log_probs, y, scores)

    groups = {HELD: group(200, True), "corrupted 1": group(90, True), "corrupted 5": group(90, True)}
    return groups | {"near a": group(70, False), "near b": group(50, False), "far c": group(60, False)}


def test_measures_are_those_of_the_lab() -> None:
    groups = some_groups()
    found = {name: float(value[0]) for name, value in measures.measures_of(groups, measures.once(groups)).items()}
    held, near = groups[HELD], [groups["near a"], groups["near b"]]
    probs = held.log_probs.exp()
    wrong = held.log_probs.argmax(1) != held.y
    assert found["nll"] == pytest.approx(float(nn.functional.nll_loss(held.log_probs, held.y)))
    assert found["ece"] == pytest.approx(float(metrics.ece(probs, held.y)))
    assert found["accuracy"] == pytest.approx(1 - float(wrong.double().mean()))
    assert found["aurc"] == pytest.approx(float(metrics.aurc(held.scores["entropy"], wrong)))
    losses = [nn.functional.nll_loss(groups[f"corrupted {k}"].log_probs, groups[f"corrupted {k}"].y) for k in (1, 5)]
    assert found["cnll"] == pytest.approx(float(sum(losses) / 2))
    for score in measures.SCORES:
        for name, function in (("auroc", metrics.auroc), ("fpr95", metrics.fpr95)):
            expected = [float(function(held.scores[score], each.scores[score])) for each in near]
            assert found[f"{name} near {score}"] == pytest.approx(sum(expected) / 2, abs=1e-6)


def test_a_resample_is_as_if_rows_were_repeated() -> None:
    groups = some_groups()
    counts = {name: each[:1] for name, each in measures.resampled(groups).items()}
    repeated = {}
    for name, each in groups.items():
        rows = torch.arange(len(each.log_probs)).repeat_interleave(counts[measures.kind_of(name)][0].long())
        scores = {score: values[rows] for score, values in each.scores.items()}
        repeated[name] = measures.Shown(each.log_probs[rows], None if each.y is None else each.y[rows], scores)
    expected = measures.measures_of(repeated, measures.once(repeated))
    for name, value in measures.measures_of(groups, counts).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg=name)


def test_intervals_hold_the_true_difference_as_often_as_they_say() -> None:
    """Losses of 100 rows for 4 seeds: effects of rows, which seeds share, and of seeds; the true difference is 0.5."""
    generator, held = np.random.default_rng(0), 0
    repeats, resamples = 200, 200
    for _ in range(repeats):
        row, seed = generator.normal(size=100), 0.1 * generator.normal(size=(4, 1))
        losses = 0.5 + row + seed + 0.5 * generator.normal(size=(4, 100))
        counts = generator.multinomial(100, np.full(100, 0.01), size=resamples) / 100
        ours = measures.Measured({"nll": losses.mean(1)}, {"nll": losses @ counts.T})
        zero = measures.Measured({"nll": np.zeros(4)}, {"nll": np.zeros((4, resamples))})
        mean, low, high = measures.difference(ours, zero, "nll")
        assert mean == pytest.approx(losses.mean())
        held += low <= 0.5 <= high
    assert 0.89 <= held / repeats <= 0.99


def test_mutual_information_is_compared_with_the_entropy_of_a_single_network() -> None:
    ours, theirs = some_groups(0), some_groups(1)
    for each in theirs.values():
        del each.scores["mi"]
    one, reference = measures.Measured.of([ours]), measures.Measured.of([theirs])
    found = results.differences(one, reference)["auroc near mi"][0]
    assert found == pytest.approx((one.values["auroc near mi"] - reference.values["auroc near entropy"]).item())


# The whole of it.


def test_the_contest_runs_resumes_and_reports(
    store: Store[Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["plain", "Rank1", "deep ensemble of 4"]
    run(monkeypatch, "--data", "tiny", "tiny-halves", "--contestants", *names)
    lines = store.lines.read_text()
    run(monkeypatch, "--data", "tiny", "tiny-halves", "--contestants", *names)
    assert store.lines.read_text() == lines
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[-2:]] == [
        f"0 of {count} trials left" for count in (17 + 4, len(lines.splitlines()) - 21)
    ]
    found = dict(command.measured(["tiny", "tiny-halves"]))
    assert list(found["tiny"]["rows"]) == [name + end for name in names for end in ("", SCALED)]
    row = found["tiny"]["rows"]["Rank1" + SCALED]
    assert set(row["against"]) == {TEMPERATURE, LARGEST} and row["added"] > 0 and row["train"] > 0
    ours, theirs = (found["tiny"]["rows"][name]["means"]["cnll"] for name in ("Rank1" + SCALED, TEMPERATURE))
    assert row["against"][TEMPERATURE]["cnll"][0] == pytest.approx(ours - theirs, abs=1e-5)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.START}\n{report.END}\nafter\n")
    (guide := tmp_path / "choose.md").write_text(readme.read_text())
    report.write(json.loads(json.dumps(found)), tmp_path / "contest.json", readme, guide)
    page = (tmp_path / "contest.md").read_text()
    assert "| minus temperature scaling |" in page and "## tiny, halves, 2 seeds" in page
    stored = report.stored(tmp_path / "contest.json")
    assert readme.read_text() == report.with_claims(readme.read_text(), stored)
    assert guide.read_text() == report.with_summary(guide.read_text(), stored)
    nll = [f"{found['tiny']['rows'][name]['means']['nll']:.4f}" for name in (TEMPERATURE, "Rank1" + SCALED, LARGEST)]
    table = [line.replace("*", "").split(" | ") for line in guide.read_text().splitlines() if line.startswith("| ")]
    assert [row[3] for row in table[1:4]] == nll and table[1][0] == "| tiny, from scratch, 2 seeds"


def test_what_a_contestant_can_not_do_is_a_record(store: Store[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: Job, options: contestants.Options) -> contestants.Trained:
        raise by.BayesifyError("no such curvature")

    monkeypatch.setitem(CONTESTANTS, "SWAG", refuse)
    run(monkeypatch, "--data", "tiny", "--contestants", "SWAG", "--seeds", "1")
    assert {record["refused"] for record in store.records().values()} == {"no such curvature"}
    assert results.chosen_options("tiny", "SWAG", False) is None


# Claims.


def of_one(differences: dict[str, tuple[float, float, float]], method: str = "Rank1") -> report.Results:
    """Results in which a method has these differences from temperature scaling."""
    means = dict.fromkeys(differences, 0.5)
    ours = {"means": means, "added": 0.05, "options": [{}], "tuning_loss": 0.3}
    ours |= {"train": 1.0, "predict": None, "train_seconds": 1.0, "predict_seconds": 2.0}
    return {
        "d": {"title": "data", "seeds": 3, "rows": {method + SCALED: ours | {"against": {TEMPERATURE: differences}}}}
    }


def test_a_difference_whose_interval_contains_zero_is_no_claim() -> None:
    found = report.claims(of_one({"nll": (-0.02, -0.03, -0.01), "ece": (-0.01, -0.03, 0.01), "cnll": (0.1, 0.02, 0.2)}))
    text = " ".join(found.split())
    assert "gains on temperature scaling: NLL 0.0200 lower (0.0100 to 0.0300)" in text
    assert "loses to temperature scaling: NLL under corruptions 0.1000 higher (0.0200 to 0.2000)" in text
    assert "ECE" not in text and "5.0% more parameters" in text
    assert report.claims(of_one({"ece": (-0.01, -0.03, 0.01)})) == ""
    assert "Temperature scaling is enough" in report.page(of_one({"ece": (-0.01, -0.03, 0.01)}))


def test_higher_is_better_for_accuracy_and_detection_only() -> None:
    found = of_one({name: (0.02, 0.01, 0.03) for name in report.WORDS})
    better = {
        each.measure for each in report.findings(found["d"]["rows"]["Rank1" + SCALED], TEMPERATURE) if each.is_better
    }
    assert better == {"accuracy", "auroc near mi", "auroc far mi"}


def test_claims_are_of_the_method_that_was_best_where_options_are_chosen() -> None:
    found = of_one({"nll": (-0.02, -0.03, -0.01)})["d"]
    rows = found["rows"]
    rows["IBNN" + SCALED] = rows["Rank1" + SCALED] | {"tuning_loss": 0.2}
    rows["IBNN"] = rows["Rank1" + SCALED] | {"tuning_loss": 0.1}  # has no temperature
    rows[LARGEST] = rows["Rank1" + SCALED] | {"tuning_loss": 0.1}  # is none of ours
    assert report.featured(found) == "IBNN" + SCALED and "IBNN" in METHODS


def test_the_readme_claims_what_the_committed_results_show() -> None:
    readme = report.README.read_text()
    assert readme.count(report.START) == readme.count(report.END) == 1
    assert readme == report.with_claims(readme, report.stored())


def test_familiarity_on_a_plain_network_is_said_beside_what_a_method_detects() -> None:
    found = of_one({"nll": (-0.02, -0.03, -0.01), "auroc near doubt": (0.001, -0.001, 0.003)})
    assert "familiarity" not in report.claims(found), "that of the plain network is not known"
    rows = found["d"]["rows"]
    rows[TEMPERATURE] = rows["Rank1" + SCALED] | {"means": {"auroc near doubt": 0.991}, "against": {}}
    text = "With familiarity the plain network has AUROC 0.9910 on near data (0.5000 with `Rank1` + temperature: no"
    assert text in " ".join(report.claims(found).split()) and text in report.page(found)


def test_the_page_on_choosing_has_the_table_of_the_committed_results() -> None:
    guide = report.GUIDE.read_text()
    assert guide.count(report.START) == guide.count(report.END) == 1
    assert guide == report.with_summary(guide, report.stored())


def test_the_page_is_that_of_the_committed_results() -> None:
    if not report.FILE.exists():
        pytest.skip("benchmarks/results/contest.json is not there: make contest writes it")
    assert report.FILE.with_suffix(".md").read_text() == report.page(report.stored())
