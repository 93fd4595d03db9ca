"""Metrics against scikit-learn, scipy, torchmetrics and brute force, and against other libraries' values in a file."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

import bayesify as by
from bayesify.lab import metrics
from bayesify.lab.data import Reals
from bayesify.lab.metrics import MetricError
from bayesify.lab.metrics.bootstrap import bootstrap
from bayesify.lab.metrics.classification import class_measures
from bayesify.lab.metrics.regression import PAIRS, real_measures
from bayesify.prediction.results import Classification, Regression

CPU = torch.device("cpu")
PLAIN = Reals(("y",), mean=(0.0,), std=(1.0,))
OTHERS: dict[str, Any] = json.loads((Path(__file__).parent / "references" / "metrics.json").read_text())


def classes(rows: int = 400, count: int = 5, draws: int = 7) -> tuple[Classification, Tensor]:
    outputs = 2 * torch.randn(draws, rows, count) + 2 * torch.randn(rows, count)
    p = by.Categorical().predictive(outputs, keep=True)
    assert isinstance(p, Classification)
    return p, torch.randint(count, (rows,))


def certain(log_probs: Tensor) -> Classification:
    p = by.Categorical().predictive(log_probs[None])
    assert isinstance(p, Classification)
    return p


def reals(targets: int = 1, rows: int = 300, keep: bool = True) -> tuple[Regression, Tensor]:
    p = by.Gaussian(2.0).predictive(torch.randn(6, rows, targets), keep=keep)
    assert isinstance(p, Regression)
    return p, torch.randn(rows, targets)


# Classes.


def test_class_metrics_are_those_of_scikit_learn() -> None:
    p, y = classes(count=8)
    found = metrics.classification_metrics(p, y)
    probs, truth = p.probs.double().numpy(), y.numpy()
    probs /= probs.sum(1, keepdims=True)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(truth, probs.argmax(1)))
    assert found["top5"] == pytest.approx(sk.top_k_accuracy_score(truth, probs, k=5, labels=range(8)))
    assert found["nll"] == pytest.approx(sk.log_loss(truth, probs, labels=range(8)), abs=1e-6)
    each = [sk.brier_score_loss(truth == k, probs[:, k]) for k in range(8)]
    assert found["brier"] == pytest.approx(sum(each), abs=1e-6)
    assert found["entropy"] == pytest.approx(-(probs * np.log(probs)).sum(1).mean(), abs=1e-6)
    assert found["entropy"] == pytest.approx(found["aleatoric"] + found["epistemic"], abs=1e-6)
    assert float(metrics.accuracy(p.probs, y)) == pytest.approx(found["accuracy"])
    assert float(metrics.nll(p.log_probs, y)) == found["nll"] and float(metrics.brier(p.probs, y)) == pytest.approx(
        found["brier"]
    )


def test_the_three_losses_of_rank1s_appendix_d_are_their_formulas() -> None:
    """v1, eq. 11 (marginalised logits), 13 (Gibbs) and 14 (mixture), which by Jensen is at most that of Gibbs."""
    p, y = classes(draws=6)
    assert p.draws is not None
    logits, index = p.draws.double(), y[:, None]
    each = logits.log_softmax(-1)
    found = metrics.classification_metrics(p, y)
    assert found["gibbs_nll"] == pytest.approx(-float(each.mean(0).gather(1, index).mean()), rel=1e-5)
    of_mean = torch.nn.functional.cross_entropy(logits.mean(0), y)
    assert found["mean_logits_nll"] == pytest.approx(float(of_mean), rel=1e-5)
    mixture = -(each.logsumexp(0) - math.log(6)).gather(1, index).mean()
    assert found["nll"] == pytest.approx(float(mixture), rel=1e-5) and found["nll"] <= found["gibbs_nll"]


@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_top_k_of_any_number_of_classes(k: int) -> None:
    p, y = classes(count=4)
    expected = sk.top_k_accuracy_score(y, p.probs, k=k, labels=range(4)) if k < 4 else 1.0
    assert float(metrics.top_k(p.probs, y, k)) == pytest.approx(expected)
    assert "top5" not in metrics.classification_metrics(p, y)


def test_two_classes_have_the_areas_of_scikit_learn_ties_and_all() -> None:
    p = certain(torch.stack([torch.zeros(300), torch.randn(300).round(decimals=1)], 1))
    y = (torch.rand(300) < 0.3 + 0.4 * p.probs[:, 1]).long()
    found, odds = metrics.classification_metrics(p, y), (p.log_probs[:, 1] - p.log_probs[:, 0]).numpy()
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(y, odds), abs=1e-6)
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(y, odds), abs=1e-6)
    assert not {"auroc", "average_precision"} & set(metrics.classification_metrics(*classes()))


def test_draws_disagree_per_error_as_pairs_of_members_do() -> None:
    p, y = classes(rows=60, draws=5)
    assert p.draws is not None
    labels = p.draws.argmax(-1)
    differing = [(labels[i] != labels[j]).double().mean() for i, j in itertools.combinations(range(5), 2)]
    mean_accuracy = np.mean([sk.accuracy_score(y, each) for each in labels])
    found = metrics.classification_metrics(p, y)
    assert found["disagreement"] == pytest.approx(np.mean(differing), abs=1e-6)
    assert found["normalised_disagreement"] == pytest.approx(np.mean(differing) / (1 - mean_accuracy), abs=1e-6)
    assert float(metrics.normalised_disagreement(p, y)) == pytest.approx(found["normalised_disagreement"])


def test_maps_of_classes_are_measured_by_pixel() -> None:
    outputs, y = torch.randn(3, 4, 5, 6, 7), torch.randint(7, (4, 5, 6))
    maps, flat = (by.Categorical().predictive(each) for each in (outputs, outputs.reshape(3, -1, 7)))
    assert isinstance(maps, Classification) and isinstance(flat, Classification)
    assert metrics.classification_metrics(maps, y) == metrics.classification_metrics(flat, y.flatten())
    assert metrics.buckets(maps, y) == metrics.buckets(flat, y.flatten())


# Calibration.


def test_calibration_errors_are_those_of_netcal() -> None:
    given = OTHERS["classes"]
    probs, y = torch.tensor(given["probs"], dtype=torch.float64), torch.tensor(given["y"])
    found = {
        "ece": metrics.ece(probs, y),
        "mce": metrics.mce(probs, y),
        "ece20": metrics.ece(probs, y, bins=20, few=5),
        "mce20": metrics.mce(probs, y, bins=20, few=5),
        "adaptive_ece": metrics.adaptive_ece(probs, y),
        "classwise_ece": metrics.classwise_ece(probs, y),
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: given[name] for name in found}, abs=1e-9
    )
    all_of_them = metrics.classification_metrics(certain(probs.log()), y)
    assert {name: all_of_them[name] for name in found} == pytest.approx({name: given[name] for name in found}, abs=1e-6)


@pytest.mark.parametrize(("strategy", "measure"), [("uniform", metrics.ece), ("quantile", metrics.adaptive_ece)])
def test_bins_are_those_of_scikit_learn(strategy: str, measure: Any) -> None:
    p, y = classes(rows=700)
    confidence, correct = p.confidence.double().clamp_max(1).numpy(), (p.label == y).numpy()
    share, mean = calibration_curve(correct, confidence, n_bins=15, strategy=strategy)
    inner = np.linspace(0, 1, 16)[1:-1]
    edges = inner if strategy == "uniform" else np.quantile(confidence, inner)
    sizes = np.bincount(np.searchsorted(edges, confidence), minlength=15)
    expected = (sizes[sizes > 0] * np.abs(share - mean)).sum() / 700
    assert float(measure(p.probs, y)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bins", [15, 7])
def test_ece_and_mce_are_those_of_torchmetrics(bins: int) -> None:
    p, y = classes()
    for norm_, measure in (("l1", metrics.ece), ("max", metrics.mce)):
        expected = float(multiclass_calibration_error(p.probs.clamp_max(1 - 1e-6), y, 5, n_bins=bins, norm=norm_))
        assert float(measure(p.probs, y, bins)) == pytest.approx(expected, abs=2e-6)


def test_a_confidence_of_one_belongs_to_the_last_bin() -> None:
    probs, y = torch.tensor([[1.0, 0.0], [0.98, 0.02]]), torch.tensor([1, 0])
    assert float(metrics.ece(probs, y)) == pytest.approx(0.49) == pytest.approx(float(metrics.mce(probs, y)))


def test_a_probability_above_one_by_rounding_is_no_logit() -> None:
    probs, y = torch.tensor([[0.0, 1.0000001], [0.2, 0.8]]), torch.tensor([1, 0])
    assert float(metrics.ece(probs, y)) == pytest.approx(0.4)


def test_equal_confidences_share_a_bin_of_equal_mass_whatever_their_order() -> None:
    """A thousand rows of confidence 0.9 of which 60% are right are wrong by 0.3, however sorted."""
    probs = torch.tensor([[0.9, 0.1]]).double().expand(1000, 2)
    y = (torch.arange(1000) >= 600).long()
    for order in (torch.arange(1000), torch.randperm(1000)):
        assert float(metrics.adaptive_ece(probs, y[order])) == pytest.approx(0.3)


def test_bins_of_few_rows_are_dropped_but_their_rows_count() -> None:
    confident, unsure = torch.tensor([[0.98, 0.02]]).expand(95, 2), torch.tensor([[0.52, 0.48]]).expand(5, 2)
    probs, y = torch.cat([confident, unsure]).double(), torch.ones(100).long()
    assert float(metrics.ece(probs, y, bins=20, few=5)) == pytest.approx(0.95 * 0.98)
    assert float(metrics.mce(probs, y, bins=20, few=5)) == pytest.approx(0.98)
    assert float(metrics.ece(probs, y, bins=20)) == pytest.approx(0.95 * 0.98 + 0.05 * 0.52)


def test_calibration_bins_hold_every_row() -> None:
    confidence = np.array([0.05, 1 / 15, 0.5, 0.95, 1.0])
    bins = metrics.calibration_bins(confidence, np.array([False, True, True, True, False]))
    assert bins["rows"].tolist() == [2, 1, 2] and bins["accuracy"].tolist() == [0.5, 1.0, 0.5]
    assert float((bins["rows"] * bins["confidence"]).sum()) == pytest.approx(float(confidence.sum()))


def test_calibration_bins_add_up_to_the_error() -> None:
    p, y = classes()
    bins = metrics.calibration_bins(p.confidence.numpy(), (p.label == y).numpy())
    error = (bins["rows"] * np.abs(bins["accuracy"] - bins["confidence"])).sum() / 400
    assert float(metrics.ece(p.probs, y)) == pytest.approx(error, abs=1e-6)


# Detection.


@pytest.mark.parametrize("scale", [0.1, 1.0, 1000.0])
def test_detection_is_that_of_scikit_learn_whatever_the_scale(scale: float) -> None:
    in_dist, ood = scale * torch.rand(200).round(decimals=2), scale * (0.2 + torch.rand(100)).round(decimals=2)
    truth, values = np.r_[np.zeros(200), np.ones(100)], torch.cat([in_dist, ood]).numpy()
    found = metrics.detection({"entropy": in_dist}, {"entropy": ood})["entropy"]
    assert found is not None
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(truth, values), abs=1e-6)
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(truth, values), abs=1e-6)
    passed, accepted, _ = sk.roc_curve(1 - truth, -values, drop_intermediate=False)
    assert found["fpr95"] == pytest.approx(passed[accepted >= 0.95].min(), abs=1e-6)


def test_a_score_that_never_varies_detects_nothing() -> None:
    one, other = (certain(torch.randn(20, 3)) for _ in range(2))
    found = metrics.detection(metrics.scores(one), metrics.scores(other))
    assert list(found) == ["entropy", "epistemic", "max_probability", "variance"]
    assert found["epistemic"] is None and found["variance"] is None and found["entropy"] is not None
    half = metrics.detection({"a": torch.zeros(5)}, {"a": torch.tensor([0.0, 1.0])})["a"]
    assert half is not None and half["auroc"] == 0.75 and half["fpr95"] == 0.5


def test_scores_are_those_of_the_draws() -> None:
    p, _ = classes()
    assert p.draws is not None
    found, each = metrics.scores(p), p.draws.double().softmax(-1)
    assert torch.allclose(found["max_probability"].double(), 1 - each.mean(0).max(-1).values, atol=1e-6)
    assert torch.allclose(found["variance"].double(), each.var(0, correction=0).mean(-1), atol=1e-7)
    sure = metrics.scores(certain(torch.tensor([[20.0, 0.0], [25.0, 0.0]])))["max_probability"]
    assert torch.allclose(sure.double().log(), torch.tensor([-20.0, -25.0]).double(), atol=1e-5)


# Selective prediction.


def test_risk_at_full_coverage_is_the_mean_loss() -> None:
    uncertainty, loss = np.random.default_rng(0).random((2, 50))
    coverage, risk = metrics.risk_coverage(uncertainty, loss)
    assert coverage[-1] == 1 and risk[-1] == pytest.approx(loss.mean())
    sure = uncertainty <= np.sort(uncertainty)[9]
    assert risk[9] == pytest.approx(loss[sure].mean())


def test_the_area_under_risk_is_the_mean_over_orders_of_equally_certain_rows() -> None:
    uncertainty, loss = np.array([0.3, 0.1, 0.3, 0.2, 0.3, 0.1]), np.array([1.0, 0.0, 0.5, 1.0, 0.0, 2.0])
    many, areas, curves = np.arange(1, 7), [], []
    for order in itertools.permutations(range(6)):
        if (np.diff(uncertainty[list(order)]) >= 0).all():
            curves.append(np.cumsum(loss[list(order)]) / many)
            areas.append(curves[-1].mean())
    assert len(areas) == 12
    assert metrics.risk_coverage(uncertainty, loss)[1] == pytest.approx(np.mean(curves, axis=0))
    assert float(metrics.aurc(torch.tensor(uncertainty), torch.tensor(loss))) == pytest.approx(np.mean(areas))


def test_uncertainty_of_no_use_has_the_mean_loss_for_an_area() -> None:
    loss = torch.rand(100)
    assert float(metrics.aurc(torch.zeros(100), loss)) == pytest.approx(float(loss.mean()))
    p, y = classes()
    risk = metrics.risk_coverage(p.entropy.numpy(), (p.label != y).numpy())[1]
    assert metrics.classification_metrics(p, y)["aurc"] == pytest.approx(risk.mean())


@pytest.mark.parametrize(("score", "suffix"), [("entropy", ""), ("epistemic", "_epistemic")])
def test_buckets_and_coverages_are_sorted_by_uncertainty(score: Any, suffix: str) -> None:
    """Mutual information as BayesAdapter has it: the entropy of the mean less the mean entropy of the draws."""
    p, y = classes(rows=105)
    assert p.draws is not None
    probs = p.draws.double().softmax(-1)
    each, mean = -(probs * probs.log()).sum(-1).mean(0), probs.mean(0)
    total = -(mean * mean.log()).sum(-1)
    order = np.argsort((total if score == "entropy" else total - each).numpy())
    correct = (p.label == y).numpy()[order]
    assert metrics.buckets(p, y, score=score) == pytest.approx([part.mean() for part in np.array_split(correct, 10)])
    expected = {"0.95": correct[:100].mean(), "0.9": correct[:95].mean(), "0.8": correct[:84].mean()}
    found = metrics.selective_metrics(p, y)
    assert metrics.accuracy_at(p, y, score) == pytest.approx(expected) == found[f"accuracy_at{suffix}"]
    risk = np.cumsum(~correct) / np.arange(1, 106)
    assert metrics.classification_metrics(p, y)[f"aurc{suffix}"] == pytest.approx(risk.mean())


def test_a_single_network_rejects_at_random_by_mutual_information() -> None:
    p, y = certain(torch.randn(50, 3)), torch.randint(3, (50,))
    found = metrics.selective_metrics(p, y)["accuracy_at_epistemic"]
    assert isinstance(found, dict)
    accuracy = metrics.classification_metrics(p, y)["accuracy"]
    assert list(found.values()) == pytest.approx([accuracy] * 3)


def test_equally_certain_rows_are_equally_right_in_every_bucket() -> None:
    p, y = certain(torch.tensor([[2.0, 0.0]]).expand(40, 2)), (torch.arange(40) < 10).long()
    assert metrics.buckets(p, y) == [0.75] * 10 and set(metrics.accuracy_at(p, y).values()) == {0.75}


# Real numbers.


@pytest.mark.parametrize("targets", [1, 3])
def test_real_metrics_are_in_the_targets_units(targets: int) -> None:
    p, y = reals(targets)
    units = Reals(tuple("abc"[:targets]), mean=(5.0, -1.0, 0.0)[:targets], std=(10.0, 0.5, 2.0)[:targets])
    found = metrics.regression_metrics(p, y, units)
    scale, shift = np.array(units.std), np.array(units.mean)
    truth, guess = y.double().numpy() * scale + shift, p.mean.double().numpy() * scale + shift
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(truth, guess), rel=1e-6)
    assert p.draws is not None and p.draw_stds is not None
    means, widths = p.draws.double().numpy() * scale + shift, p.draw_stds.double().numpy() * scale
    density = norm.pdf(truth, means, widths).prod(-1).mean(0)
    assert found["log_density"] == pytest.approx(np.log(density).mean(), rel=1e-5)
    below = norm.cdf(truth, means, widths).mean(0)
    assert found["coverage"] == pytest.approx(((below > 0.05) & (below < 0.95)).mean())
    assert np.allclose(metrics.quantile_of(p, y), below, atol=1e-6)
    assert found["quantile_error"] == pytest.approx(_quantile_error(below), abs=1e-6)
    low, high = (bound.double().numpy() for bound in p.interval(0.9))
    assert found["width"] == pytest.approx(((high - low) * scale).mean(), rel=1e-6)
    assert found["crps"] == pytest.approx((metrics.crps(p, y).numpy() * scale).mean())
    curves = [metrics.risk_coverage(p.std[:, k].numpy(), (truth - guess)[:, k] ** 2)[1] for k in range(targets)]
    assert found["aurc"] == pytest.approx(np.mean([np.sqrt(risk.mean()) for risk in curves]), rel=1e-6)
    assert [key for key in found if key.startswith("rmse_")] == ([] if targets == 1 else ["rmse_a", "rmse_b", "rmse_c"])


def _quantile_error(below: np.ndarray) -> float:
    return float(np.mean([abs((below <= q).mean() - q) for q in np.linspace(0, 1, 100)]))


def _mixture(means: Tensor, stds: Tensor) -> Regression:
    used = torch.full(means.shape[1:2], len(means))
    moments = means.mean(0), means.std(0, correction=0), stds.square().mean(0).sqrt()
    errors = {"standard_error": means.std(0) / len(means) ** 0.5, "freedom": torch.ones_like(used)}
    return Regression(len(means), means, *moments, stds, draws_used=used, **errors)


def _gaussian(mean: Tensor, std: Tensor) -> Regression:
    used = torch.ones(len(mean))
    errors = {"standard_error": torch.zeros_like(mean), "freedom": used}
    return Regression(1, None, mean, torch.zeros_like(mean), std, None, draws_used=used, **errors)


def test_crps_and_quantiles_are_those_of_other_libraries() -> None:
    given = OTHERS["reals"]
    means, stds, y = (torch.tensor(given[name], dtype=torch.float64).unsqueeze(-1) for name in ("means", "stds", "y"))
    mixture = _mixture(means, stds)
    assert metrics.crps(mixture, y).squeeze(1).tolist() == pytest.approx(given["crps_mixture"], abs=1e-9)
    one = _gaussian(means[0], stds[0])
    assert metrics.crps(one, y).squeeze(1).tolist() == pytest.approx(given["crps_normal"], abs=1e-9)
    assert float(metrics.quantile_error(one, y)) == pytest.approx(given["quantile_error_normal"], abs=1e-9)


@pytest.mark.parametrize("draws", [2, 3, 8])
def test_crps_is_its_integral(draws: int) -> None:
    means, stds, y = torch.randn(draws, 1, 1).double(), 0.3 + torch.rand(draws, 1, 1).double(), torch.randn(1, 1)
    p = _mixture(means, stds)

    def distance(x: float) -> float:
        return float((norm.cdf(x, means.flatten(), stds.flatten()).mean() - (x >= float(y))) ** 2)

    expected = quad(distance, -30, float(y), limit=200)[0] + quad(distance, float(y), 30, limit=200)[0]
    assert metrics.crps(p, y).item() == pytest.approx(expected, abs=1e-6)


def test_crps_of_very_many_draws_looks_at_some_of_their_pairs() -> None:
    means = torch.randn(1000, 5, 1)
    assert PAIRS < 1000 * 500
    p = by.Gaussian(4.0).predictive(means, keep=True)
    assert isinstance(p, Regression)
    y = torch.zeros(5, 1)
    one = _gaussian(torch.zeros(5, 1), torch.full((5, 1), math.sqrt(1.25)))
    assert torch.allclose(metrics.crps(p, y), metrics.crps(one, y), rtol=0.15)
    each = means.double()
    pairs = (each.unsqueeze(0) - each.unsqueeze(1)) / math.sqrt(0.5)
    apart = math.sqrt(0.5) * torch.tensor(2 * norm.pdf(pairs) + pairs.numpy() * (2 * norm.cdf(pairs) - 1)).mean((0, 1))
    near = 0.5 * torch.tensor(2 * norm.pdf(each / 0.5) + each.numpy() / 0.5 * (2 * norm.cdf(each / 0.5) - 1)).mean(0)
    assert torch.allclose(metrics.crps(p, y), near - apart / 2, rtol=0.02)
    assert torch.equal(metrics.crps(p, y), metrics.crps(p, y))


def test_without_kept_draws_one_gaussian_stands_for_them() -> None:
    p, y = reals(keep=False)
    expected = norm.cdf(y, p.mean, p.std)
    assert np.allclose(metrics.quantile_of(p, y), expected, atol=1e-6)


def test_a_calibrated_model_has_the_coverage_it_claims() -> None:
    p = by.Gaussian(4.0).predictive(torch.zeros(1, 20000, 1), keep=True)
    assert isinstance(p, Regression)
    y = 0.5 * torch.randn(20000, 1)
    assert float(metrics.coverage(p, y)) == pytest.approx(0.9, abs=0.01)
    assert float(metrics.quantile_error(p, y)) < 0.01 < 0.1 < float(metrics.quantile_error(p, 3 * y))


# Uncertainty of metrics.


def test_counting_a_row_twice_is_having_it_twice() -> None:
    rows = torch.randint(40, (40,))
    times = torch.bincount(rows, minlength=40).double()[None]
    for count in (2, 7):
        p, y = classes(rows=40, count=count)
        expected = metrics.classification_metrics(p.rows(rows), y[rows])
        found = {name: float(measure(times)) for name, measure in class_measures(p, y).items()}
        del found["adaptive_ece"], expected["adaptive_ece"]  # whose bins stay those of the original rows
        assert found == pytest.approx(expected, abs=1e-9)
    q, target = reals(targets=2, rows=40)
    units = Reals(("a", "b"), mean=(0.0, 0.0), std=(1.0, 3.0))
    expected = metrics.regression_metrics(q.rows(rows), target[rows], units)
    assert {name: float(measure(times)) for name, measure in real_measures(q, target, units).items()} == pytest.approx(
        expected, abs=1e-6
    )


def test_intervals_repeat_and_hold_the_values_that_vary_by_chance() -> None:
    p, y = classes()
    found, values = metrics.intervals(p, y, resamples=200), metrics.classification_metrics(p, y)
    assert list(found) == list(values) and found == metrics.intervals(p, y, resamples=200)
    for name in ("accuracy", "nll", "brier", "entropy", "aurc", "normalised_disagreement"):
        low, high = found[name]
        value = values[name]
        assert value is not None and low < value < high
    q, target = reals()
    assert list(metrics.intervals(q, target, PLAIN)) == list(metrics.regression_metrics(q, target, PLAIN))


def test_the_interval_of_an_accuracy_is_as_wide_as_the_binomial_makes_it() -> None:
    p = certain(torch.tensor([[3.0, 0.0]]).expand(1000, 2))
    low, high = metrics.intervals(p, (torch.arange(1000) < 200).long())["accuracy"]
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.8 * 0.2 / 1000), rel=0.1)


def overconfident(rows: int) -> tuple[Classification, Tensor]:
    logits = 2 * torch.randn(rows, 3)
    y = torch.distributions.Categorical(logits=logits).sample()
    return certain(2 * logits), y


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 200 intervals of 95%, 178 to 198 hold the truth with a probability of 99.8%; those of calibration err more."""
    names = ("accuracy", "nll", "brier", "aurc", "ece", "ece20", "classwise_ece")
    truth = metrics.classification_metrics(*overconfident(200_000))
    held = dict.fromkeys(names, 0)
    for seed in range(200):
        measures = class_measures(*overconfident(500))
        found = bootstrap({name: measures[name] for name in names}, 500, CPU, 200, seed)
        for name, (low, high) in found.items():
            held[name] += low <= truth[name] <= high
    assert all((160 if "ece" in name else 178) <= held[name] <= 199 for name in names), held


def test_what_has_no_value_has_no_interval() -> None:
    p = certain(torch.tensor([[0.0, -torch.inf], [0.0, 1.0]]))
    assert "nll" not in metrics.intervals(p, torch.tensor([1, 1]), resamples=10)
    with pytest.raises(MetricError, match="with targets"):
        metrics.intervals(*reals())


# The edges.


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("case", ["one row", "all right", "all wrong", "constant", "impossible", "absent class"])
def test_every_metric_of_every_edge_is_json(case: str, count: int) -> None:
    rows = 1 if case == "one row" else 30
    outputs, y = 3 * torch.randn(4, rows, count), torch.arange(rows) % (count - 1)
    if case == "constant":
        outputs = torch.zeros(4, rows, count)
    if case in ("all right", "all wrong"):
        outputs[:] = 9.0 * torch.nn.functional.one_hot((y + (case == "all wrong")) % count, count)
    if case == "impossible":
        outputs[..., 0] = -torch.inf
    p = by.Categorical().predictive(outputs)
    assert isinstance(p, Classification)
    found = metrics.classification_metrics(p, y)
    bounds = metrics.intervals(p, y, resamples=20)
    more = {"accuracy_at": metrics.accuracy_at(p, y), "buckets": metrics.buckets(p, y), "interval": bounds}
    json.dumps(found | more, allow_nan=False)
    assert set(bounds) == {name for name, value in found.items() if value is not None}
    assert (found["nll"] is None) == (case == "impossible" and bool((y == 0).any()))
    assert (found["normalised_disagreement"] is None) == (found["accuracy"] == 1 and not p.disagreement.any())
    assert (found["ece20"] is None) == (case == "one row")
    if count == 2:
        assert found["auroc"] is None  # as all rows have class 0
    if case == "all wrong":
        assert found["accuracy"] == 0 == found["normalised_disagreement"] and found["aurc"] == 1
    assert len(more["buckets"]) == min(10, rows)


def test_one_row_of_reals_is_json() -> None:
    for keep in (True, False):
        p, y = reals(rows=1, keep=keep)
        found, bounds = metrics.regression_metrics(p, y, PLAIN), metrics.intervals(p, y, PLAIN, resamples=5)
        json.dumps({**found, "interval": bounds}, allow_nan=False)
        assert None not in found.values() and found["aurc"] == pytest.approx(found["rmse"])


def test_what_does_not_fit_is_refused() -> None:
    p, y = classes(rows=4)
    with pytest.raises(MetricError, match=r"labels must have shape \(4,\) and not be empty; got \(3,\)"):
        metrics.classification_metrics(p, y[:3])
    with pytest.raises(MetricError, match=r"labels from -1 to .*: expected 0 to 4"):
        metrics.classification_metrics(p, torch.tensor([-1, 0, 1, 2]))
    real, _ = reals()
    with pytest.raises(MetricError, match="they must be equal"):
        metrics.regression_metrics(real, torch.zeros(300), PLAIN)
    for measure in (metrics.auroc, metrics.average_precision, metrics.fpr95):
        with pytest.raises(MetricError, match="expected some of both"):
            measure(torch.zeros(3), torch.zeros(0))
    with pytest.raises(MetricError, match="SimpleNamespace"):
        metrics.scores(SimpleNamespace())  # type: ignore[arg-type]
