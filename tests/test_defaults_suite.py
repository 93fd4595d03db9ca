"""The suite that defaults are chosen with: its measures, method strings, bootstrap and stored trials."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bayesify as by
from bayesify.lab import metrics
from benchmarks.defaults import __main__ as command
from benchmarks.defaults import goals, measures, page, report, store, tasks, trial
from benchmarks.defaults.candidates import CANDIDATES
from benchmarks.defaults.differences import Difference, Records, Results, Setting
from benchmarks.defaults.trial import LONGER, PLAIN, Recipe, Trial
from benchmarks.store import Store


def some_rows(seed: int = 0, rows: int = 200, classes: int = 4) -> measures.Rows:
    generator = torch.Generator().manual_seed(seed)
    found: measures.Rows = {}
    for part in ("validation", "test"):
        logits = 3 * torch.randn(rows, classes, generator=generator)
        found[f"{part}/log_probs"] = logits.log_softmax(-1).numpy()
        found[f"{part}/y"] = torch.where(
            torch.rand(rows, generator=generator) < 0.6, logits.argmax(-1), torch.randint(classes, (rows,))
        ).numpy()
        found[f"{part}/epistemic"] = torch.rand(rows, generator=generator).numpy()
        found[f"{part}/other/log_probs"] = torch.randn(90, classes, generator=generator).log_softmax(-1).numpy()
        found[f"{part}/other/epistemic"] = torch.rand(90, generator=generator).numpy()
    return found


def test_measures_are_those_of_the_lab() -> None:
    rows = some_rows()
    found = measures.measures_of(measures.each_row(rows, "test"))
    log_probs, y = torch.from_numpy(rows["test/log_probs"]), torch.from_numpy(rows["test/y"])
    other = torch.from_numpy(rows["test/other/log_probs"])
    entropies = [torch.distributions.Categorical(logits=each).entropy() for each in (log_probs, other)]
    assert found["nll"] == pytest.approx(float(metrics.nll(log_probs, y)), abs=1e-6)
    assert found["ece"] == pytest.approx(float(metrics.ece(log_probs.exp(), y)), abs=1e-6)
    assert found["accuracy"] == pytest.approx(float(metrics.accuracy(log_probs.exp(), y)))
    assert found["auroc_entropy"] == pytest.approx(float(metrics.auroc(*entropies)), abs=1e-6)


def test_temperature_is_fitted_on_validation_rows_alone() -> None:
    rows = some_rows()
    scaled = measures.with_temperature(rows)
    temperatures = torch.linspace(0.5, 6, 500)
    log_probs, y = torch.from_numpy(rows["validation/log_probs"]), torch.from_numpy(rows["validation/y"])
    losses = torch.stack([nn.functional.cross_entropy(log_probs / t, y) for t in temperatures])
    best = float(temperatures[losses.argmin()])
    assert measures.temperature_of(rows) == pytest.approx(best, abs=0.02)
    expected = torch.from_numpy(rows["test/log_probs"] / best).log_softmax(-1)
    np.testing.assert_allclose(scaled["test/log_probs"], expected, atol=0.02)
    np.testing.assert_array_equal(scaled["test/epistemic"], rows["test/epistemic"])


def test_intervals_of_a_regression_become_as_wide_as_validation_errors() -> None:
    generator = np.random.default_rng(0)
    rows: measures.Rows = {}
    for part in ("validation", "test"):
        y = 2 * generator.normal(size=4000)  # of which the network says that its deviation is 1
        rows |= {f"{part}/y": y, f"{part}/mean": np.zeros(4000), f"{part}/std": np.ones(4000)}
        rows |= {f"{part}/nll": 0.5 * y**2 + 0.5 * math.log(2 * math.pi), f"{part}/inside": np.abs(y) < 1.6449}
        rows[f"{part}/epistemic"] = np.zeros(4000)
        rows |= {f"{part}/other/std": generator.choice([0.9, 1.2], 500), f"{part}/other/epistemic": np.zeros(500)}
    before, after = (
        measures.measures_of(measures.each_row(each, "test")) for each in (rows, measures.with_temperature(rows))
    )
    assert before["coverage"] == pytest.approx(0.589, abs=0.03) and after["coverage"] == pytest.approx(0.9, abs=0.02)
    assert after["nll"] == pytest.approx(0.5 + math.log(2) + 0.5 * math.log(2 * math.pi), abs=0.05)
    assert after["auroc_entropy"] == before["auroc_entropy"] == pytest.approx(0.5, abs=0.1), "the order is the same"


def test_paired_intervals_hold_the_difference_and_shrink_where_rows_agree() -> None:
    """Two networks whose NLL differs by 0.1 in every row: the interval has no width, whatever the rows are."""
    ours = [{"nll": np.arange(50.0), "epistemic": np.zeros(50), "squares": np.ones(50), "inside": np.ones(50)}] * 3
    theirs = [each | {"nll": each["nll"] - 0.1} for each in ours]
    for value in measures.paired(ours, theirs)["nll"]:
        assert value == pytest.approx(0.1)
    generator = np.random.default_rng(0)
    noisy = [each | {"nll": each["nll"] - generator.normal(0.1, 1, size=50)} for each in ours]
    mean, low, high = measures.paired(ours, noisy)["nll"]
    assert low < mean < high and high - low == pytest.approx(2 * 1.96 / math.sqrt(150), rel=0.5)


def test_mutual_information_is_compared_with_the_entropy_of_a_single_network() -> None:
    ours = measures.each_row(some_rows(0), "test")
    theirs = measures.each_row(some_rows(1), "test")
    single = theirs | {"epistemic": np.zeros(200), "other_epistemic": np.zeros(90)}
    expected = measures.measures_of(ours)["auroc_mi"] - measures.measures_of(theirs)["auroc_entropy"]
    assert measures.paired([ours], [single])["auroc_mi"][0] == pytest.approx(expected)


def test_a_method_string_knows_the_number_of_layers() -> None:
    network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    method, layers = Recipe.read("Rank1(mean_std=0.3 / sqrt(L), dropout_rate=rate(0.3 / sqrt(L))) + anneal").method(
        network
    )
    assert layers == 9 and isinstance(method, by.Rank1) and method.mean_std == pytest.approx(0.1)
    scale = nn.functional.softplus(by.convert(network, method)[0].posterior.in_rho)
    torch.testing.assert_close(scale, torch.full((4, 4), 0.1), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="'aneal' is none of anneal"):
        Recipe.read("Rank1() + aneal")


def test_every_candidate_can_be_made() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    strings = [each for some in CANDIDATES.values() for each in some if each not in (PLAIN, LONGER)]
    for string in strings:
        method, _ = Recipe.read(string).method(network)
        assert type(method).__name__ == string.partition("(")[0]


def tiny(seed: int) -> tasks.Split:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed))
    y = (x.sum(1) > 0).long()
    return tasks.Split((x, y), (x, y), (x, y), {"validation": 3 * x, "test": 3 * x})


def test_trials_are_stored_ranked_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tasks.Task("tiny", tiny, lambda split: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), 2, 1)
    monkeypatch.setitem(tasks.TASKS, "tiny", task)
    monkeypatch.setattr(store, "STORE", Store(Trial, tmp_path / "lines.jsonl", tmp_path))
    monkeypatch.setattr(measures, "RESAMPLES", 5)
    arguments = ["defaults", "run", "--tasks", "tiny", "--seeds", "2", "--methods", "Rank1()", "MCDropout(0.5)"]
    monkeypatch.setattr("sys.argv", arguments)
    command.main()
    lines = (tmp_path / "lines.jsonl").read_text()
    assert len(lines.splitlines()) == 8
    command.main()
    assert (tmp_path / "lines.jsonl").read_text() == lines
    capsys.readouterr()
    record = store.STORE.records()[Trial("tiny", "trained", "adam", "Rank1()", 1)]
    assert record["layers"] == 2 and record["noise_before"]["scale"] == pytest.approx(0.35, rel=1e-3)
    assert "| Rank1() with temperature | 2 |" in report.page(["tiny"])
    assert "| minus plain longer | seeds | nll |" in report.page(["tiny"])
    ranked = report.ranking("Rank1")
    rows = [store.STORE.records()[Trial("tiny", "trained", "adam", m, s)] for m in ("Rank1()", PLAIN) for s in (0, 1)]
    nlls = [row["validation"]["nll"] for row in rows]
    expected = (math.log(nlls[0] / nlls[2]) + math.log(nlls[1] / nlls[3])) / 2
    assert f"| Rank1() | {expected:+.3f} | {expected:+.3f} | {expected:+.3f} |" in ranked


def test_a_training_that_diverges_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverge(network: nn.Module, *args: object, **options: object) -> None:
        if any(hasattr(layer, "posterior") for layer in network.modules()):
            raise by.BayesifyError("layer '0' gets NaN")

    task = tasks.Task("tiny", tiny, lambda split: nn.Linear(3, 2), 1, 1)
    monkeypatch.setitem(tasks.TASKS, "tiny", task)
    monkeypatch.setattr(store, "STORE", Store(Trial, tmp_path / "lines.jsonl", tmp_path))
    monkeypatch.setattr(trial, "fit", diverge)
    monkeypatch.setattr("sys.argv", ["defaults", "run", "--tasks", "tiny", "--seeds", "1", "--methods", "Rank1()"])
    command.main()
    assert store.STORE.records()[Trial("tiny", "trained", "adam", "Rank1()", 0)] == {"failed": "layer '0' gets NaN"}
    assert "Rank1()" not in report.page(["tiny"]) and "layer '0' gets NaN" in capsys.readouterr().out


# The page.


def finished(nlls: dict[str, list[float]], task: str = "fashion", loop: str = "adam") -> Records:
    """Trials with these test NLLs by method and seed; with temperature 0.1 less, all else alike."""
    records: Records = {}
    for method, values in nlls.items():
        for seed, nll in enumerate(values):
            found = {"nll": nll, "ece": 0.02, "accuracy": 0.9, "auroc_entropy": 0.8, "auroc_mi": 0.7}
            parts = {"validation": found | {"nll": 2 * nll}, "test": found, "test_t": found | {"nll": nll - 0.1}}
            noise = {"noise_before": {"scale": 0.1}, "noise_after": {"scale": 0.12}}
            records[Trial(task, "trained", loop, method, seed)] = parts | noise
    return records


def test_intervals_over_seeds_hold_the_true_mean_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    found = [Difference.of(list(generator.normal(0.3, 1, size=3))) for _ in range(2000)]
    assert np.mean([each.low <= 0.3 <= each.high for each in found]) == pytest.approx(0.95, abs=0.015)


def test_a_method_is_compared_by_seed_with_what_people_would_do_instead() -> None:
    plain = [0.5, 0.7, 0.9]
    records = finished({PLAIN: plain, LONGER: [0.7, 0.9, 1.1], "Rank1()": [0.41, 0.6, 0.79], "IBNN()": [0.1, 0.1]})
    results, setting = Results(records), Setting("fashion", "trained", "adam")
    assert results.settings() == [setting] and results.methods(setting) == ["Rank1"], "IBNN has two seeds only"
    found = {each: results.difference(setting, "Rank1()", each, "nll") for each in setting.references}
    assert [each and pytest.approx(each.mean) for each in found.values()] == [-0.1, -0.3, 0.0]
    difference = found[PLAIN]
    assert difference is not None
    half = 4.3027 * np.std([-0.09, -0.1, -0.11], ddof=1) / math.sqrt(3)
    assert (difference.low, difference.high) == pytest.approx((-0.1 - half, -0.1 + half), abs=1e-5)
    assert difference.shown("nll") == "**-0.100 (-0.125 to -0.075)**"
    lines = page.page(records, {"mlp": 4.0}).splitlines()
    assert "| NLL minus that of | plain | plain longer | temperature scaling |" in lines
    assert "| fashion, from trained weights, adam | plain | NLL |" not in "\n".join(lines)
    assert "| fashion, from trained weights, adam | temperature scaling | NLL | – | `Rank1` |" in lines


def test_goals_that_are_missed_are_called_so() -> None:
    def judged(rank1: list[float], step: float = 4.0) -> dict[str, goals.Goal]:
        records = finished({PLAIN: [0.5, 0.7, 0.9], LONGER: [0.9] * 3, "Rank1()": rank1, "IBNN()": [0.4, 0.5, 0.7]})
        return {each.wanted: each for each in goals.goals(Results(records), {"mlp": step})}

    nll = "clothing, Rank1: NLL at most 1.05 times temperature scaling's"
    better = "NLL better than the plain network's before"
    step = "a step of MeanField at most 4 plain steps on every network of the bench"
    good, bad = judged([0.41, 0.61, 0.81]), judged([0.51, 0.71, 0.91], step=4.02)
    assert good[nll].is_met and not bad[nll].is_met and good[step].is_met and not bad[step].is_met
    assert bad[nll].found.startswith(f"{(0.51 / 0.4 + 0.71 / 0.6 + 0.91 / 0.8) / 3:.3f} (")
    assert good[better].is_met and good[better].found.startswith("2 of 2 settings and methods")
    assert not bad[better].is_met and bad[better].found.startswith(
        "1 of 2 settings and methods, 1 of them beyond chance"
    )
    assert "**not met**" in str(bad[nll]) and "| met |" in str(good[nll])
    assert not good["clothing, Rank1: AUROC on MNIST by entropy at least 0.03 above temperature scaling's"].is_met


def test_a_method_that_does_not_learn_is_named() -> None:
    records = finished({PLAIN: [0.5, 0.5, 0.5], LONGER: [0.5] * 3, "EMP()": [0.5, 0.5, 0.5]}, loop="sgd")
    assert goals.learning(Results(records)).is_met
    one = Trial("fashion", "trained", "sgd", "EMP()", 1)
    records[one] = records[one] | {"test": records[one]["test"] | {"accuracy": 0.1}}
    found = goals.learning(Results(records))
    assert not found.is_met and "EMP() in fashion, from trained weights, sgd (seed 1: 80.0)" in found.found
    records[Trial("fashion", "trained", "sgd", "EMP()", 2)] = {"failed": "layer '0' gets NaN"}
    assert "EMP() in fashion, from trained weights, sgd (seed 2: diverged)" in goals.learning(Results(records)).found
    assert goals.lost_by({"rmse": math.nan}, {"rmse": 0.3}) == 1.0


def test_rates_are_compared_on_validation_rows() -> None:
    nlls = {PLAIN: [0.5] * 3, LONGER: [0.5] * 3, "Rank1()": [0.4] * 3, "Rank1() + posterior_lr=10": [0.35] * 3}
    text = page.rates(Results(finished(nlls)))
    assert "| fashion, from trained weights, adam | `Rank1` | – | **-0.100 (-0.100 to -0.100)** | – |" in text
    records = finished(nlls)
    records[Trial("fashion", "trained", "adam", "Rank1() + posterior_lr=10", 2)] = {"failed": "layer '0' gets NaN"}
    assert "| `Rank1` | – | diverged with 1 of 3 seeds | – |" in page.rates(Results(records))


def test_the_page_is_that_of_the_committed_trials() -> None:
    assert store.STORE.lines.with_suffix(".md").read_text() == page.committed()


def test_the_page_on_choosing_says_what_a_larger_rate_of_the_posterior_does() -> None:
    results = Results(store.STORE.records())
    text = " ".join((store.STORE.lines.parents[2] / "docs" / "choose.md").read_text(encoding="utf-8").split())

    def change(task: str, name: str, words: str, start: str = "trained") -> None:
        rows = f"{name}() + posterior_lr=10", f"{name}()"
        found = results.difference(Setting(task, start, "adam"), *rows, "nll", "validation")
        assert found is not None
        assert words.format(name=name, value=abs(found.mean)) in text
        assert found.is_shown == ("no difference" not in words)
        assert (found.mean < 0) == ("falls" in words or "on noisy" in words)

    change("concrete", "Rank1", "the NLL of `{name}` falls by {value:.3f} on the concrete data")
    change("digits", "Rank1", "and by {value:.3f} on noisy digits")
    change("patients", "Rank1", "no difference was shown for `{name}` (+{value:.3f})")
    change("patients", "EMP", "that of `{name}` rises by {value:.3f}")
    change("patients", "Rank1", "from scratch that of `{name}` rises there by {value:.3f}", start="scratch")
    diverged = [each for each in results.failed if each.task == "concrete" and each.loop == "sgd"]
    assert {each.method for each in diverged} == {"Rank1() + posterior_lr=10"}
    assert f"diverges with all {len(diverged)} seeds" in text
