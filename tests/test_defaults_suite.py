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
from benchmarks.defaults import measures, report, store, tasks
from benchmarks.defaults.candidates import CANDIDATES
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
    before, after = (
        measures.measures_of(measures.each_row(each, "test")) for each in (rows, measures.with_temperature(rows))
    )
    assert before["coverage"] == pytest.approx(0.589, abs=0.03) and after["coverage"] == pytest.approx(0.9, abs=0.02)
    assert after["nll"] == pytest.approx(0.5 + math.log(2) + 0.5 * math.log(2 * math.pi), abs=0.05)


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
    assert record["layers"] == 2 and record["noise_before"]["scale"] == pytest.approx(math.sqrt(1 / 999), rel=1e-3)
    assert "| Rank1() with temperature | 2 |" in report.page(["tiny"])
    assert "| minus plain longer | seeds | nll |" in report.page(["tiny"])
    ranked = report.ranking("Rank1")
    rows = [store.STORE.records()[Trial("tiny", "trained", "adam", m, s)] for m in ("Rank1()", PLAIN) for s in (0, 1)]
    nlls = [row["validation"]["nll"] for row in rows]
    expected = (math.log(nlls[0] / nlls[2]) + math.log(nlls[1] / nlls[3])) / 2
    assert f"| Rank1() | {expected:+.3f} | {expected:+.3f} | {expected:+.3f} |" in ranked
