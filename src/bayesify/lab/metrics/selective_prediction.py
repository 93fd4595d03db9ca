"""Selective prediction: the error on the most certain rows, when the model abstains on the others."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.metrics.weighted import Measure, Ranked, previous_totals, unit_weights
from bayesify.prediction.results import Classification

BUCKETS = 10
COVERAGES = (0.95, 0.9, 0.8)
"""The coverages at which BayesAdapter, section 4.4, reports accuracy."""
Curve = tuple[np.ndarray, np.ndarray]
Score = Literal["entropy", "epistemic"]
"""What rows are ranked by: total uncertainty, or the mutual information, BayesAdapter's measure of uncertainty."""
SUFFIXES: dict[Score, str] = {"entropy": "", "epistemic": "_epistemic"}
"""What follows the name of a metric of selective prediction by each score."""


def risk_coverage(uncertainty: np.ndarray, loss: np.ndarray) -> Curve:
    """The risk-coverage curve: the mean loss of the most certain rows (risk) against their share (coverage).

    Args:
        uncertainty: The uncertainty of each row.
        loss: The loss of each row.

    Returns:
        Coverage and risk, with one point per row.

    >>> coverage, risk = risk_coverage(np.array([0.9, 0.1]), np.array([1.0, 0.0]))
    >>> coverage.tolist(), risk.tolist()
    ([0.5, 1.0], [0.0, 0.5])

    Rows that are equally certain share their mean loss, so that their order doesn't matter.
    """
    many = np.arange(1, len(loss) + 1)
    return many / len(loss), np.cumsum(
        _by_certainty(torch.as_tensor(uncertainty), torch.as_tensor(loss)).numpy()
    ) / many


def aurc(uncertainty: Tensor, loss: Tensor) -> Tensor:
    """The area under the risk-coverage curve: (1/n) Σ_k risk of the k most certain (Geifman et al. 2019).

    Args:
        uncertainty: The uncertainty of each row.
        loss: The loss of each row.

    Returns:
        The area.

    >>> aurc(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]))
    tensor(0.2500, dtype=torch.float64)
    """
    return area_under_risk(uncertainty, loss)(unit_weights(len(loss), loss.device)).squeeze(0)


def area_under_risk(uncertainty: Tensor, loss: Tensor) -> Measure:
    """AURC, in expectation over the orders of equally certain rows.

    With c rows and a loss of s before them, m such rows of mean loss l add Σ_j (s + jl)/(c + j), for j = 1 to m, which
    is ml + (s - cl)(H(c + m) - H(c)) with the harmonic numbers H.
    """
    ranked, ones = Ranked(uncertainty), torch.ones(len(loss), dtype=torch.float64, device=loss.device)
    harmonic = torch.nn.functional.pad((ones / ones.cumsum(0)).cumsum(0), (1, 0))

    def measure(counts: Tensor) -> Tensor:
        rows, losses = ranked.totals(counts, ones, loss)
        earlier, sums = previous_totals(rows), previous_totals(losses)
        each = (losses - sums) / (rows - earlier).clamp_min(1)
        steps = harmonic[rows.long()] - harmonic[earlier.long()]
        return (losses - sums + (sums - earlier * each) * steps).sum(-1) / rows[:, -1]

    return measure


def accuracy_at(p: Classification, y: Tensor, score: Score = "entropy") -> dict[str, float]:
    """The accuracy of the most certain 95%, 90% and 80% of the rows (BayesAdapter, section 4.4).

    Args:
        p: A prediction of classes.
        y: The true labels (N,).
        score: What rows are ranked by: total uncertainty, or "epistemic", the mutual information.

    Returns:
        The accuracy by coverage.
    """
    correct = _correct_by_certainty(p, y, score)
    answered = {share: math.ceil(share * len(correct) - 1e-9) for share in COVERAGES}
    return {f"{share:g}": float(correct[:rows].mean()) for share, rows in answered.items()}


def buckets(p: Classification, y: Tensor, count: int = BUCKETS, score: Score = "entropy") -> list[float]:
    """The accuracy in equally large buckets of increasing uncertainty (BayesAdapter, figure 5b), at most one per row.

    Args:
        p: A prediction of classes.
        y: The true labels (N,).
        count: The number of buckets.
        score: What rows are ranked by: total uncertainty, or "epistemic", the mutual information.

    Returns:
        The accuracy in each bucket, the most certain first.
    """
    correct = _correct_by_certainty(p, y, score)
    return [float(part.mean()) for part in correct.tensor_split(min(count, len(correct)))]


def accuracy_between(p: Classification, y: Tensor, low: float, high: float, score: Score = "entropy") -> Measure:
    """The accuracy of the rows between two coverages, the most certain first."""
    correct = (p.label == y.to(p.label.device)).flatten().double()
    ranked = Ranked(getattr(p, score).flatten())

    def measure(counts: Tensor) -> Tensor:
        rows, right = ranked.totals(counts, torch.ones_like(correct), correct)
        many = rows[:, -1]
        found = _interpolated(rows, right, high * many) - _interpolated(rows, right, low * many)
        return found / ((high - low) * many)

    return measure


def selective_measures(p: Classification, y: Tensor) -> dict[str, dict[str, Measure]]:
    """`accuracy_at` and `buckets` by each score, as functions of how often each row counts."""
    count, found = min(BUCKETS, p.entropy.numel()), {}
    for score, suffix in SUFFIXES.items():
        shares = {f"{share:g}": (0.0, share) for share in COVERAGES}
        parts = {str(i): (i / count, (i + 1) / count) for i in range(count)}
        for name, bounds in (("accuracy_at", shares), ("buckets", parts)):
            found[name + suffix] = {k: accuracy_between(p, y, low, high, score) for k, (low, high) in bounds.items()}
    return found


def selective_metrics(p: Classification, y: Tensor) -> dict[str, dict[str, float] | list[float]]:
    """`accuracy_at` and `buckets` by entropy, and with the ending `_epistemic` by mutual information.

    Args:
        p: A prediction of classes.
        y: The true labels (N,).

    Returns:
        The accuracies, under `accuracy_at`, `buckets`, `accuracy_at_epistemic` and `buckets_epistemic`.
    """
    found: dict[str, dict[str, float] | list[float]] = {}
    for score, suffix in SUFFIXES.items():
        found["accuracy_at" + suffix] = accuracy_at(p, y, score)
        found["buckets" + suffix] = buckets(p, y, score=score)
    return found


def _interpolated(rows: Tensor, right: Tensor, wanted: Tensor) -> Tensor:
    """The number of correct rows among the first `wanted`, if equally certain rows are equally often correct."""
    rows, right = (torch.nn.functional.pad(each, (1, 0)) for each in (rows, right))
    after = torch.searchsorted(rows, wanted.unsqueeze(-1)).clamp(1, rows.shape[-1] - 1)
    lower, upper = rows.gather(-1, after - 1), rows.gather(-1, after)
    share = (wanted.unsqueeze(-1) - lower) / (upper - lower).clamp_min(1)
    return (right.gather(-1, after - 1) + share * (right.gather(-1, after) - right.gather(-1, after - 1))).squeeze(-1)


def _correct_by_certainty(p: Classification, y: Tensor, score: Score) -> Tensor:
    return _by_certainty(getattr(p, score).flatten(), (p.label == y.to(p.label.device)).flatten())


def _by_certainty(uncertainty: Tensor, loss: Tensor) -> Tensor:
    """The losses of the rows, the most certain first; equally certain rows share their mean loss."""
    group, sizes = uncertainty.unique(return_inverse=True, return_counts=True)[1:]
    sums = torch.zeros(len(sizes), dtype=torch.float64, device=loss.device).index_add(0, group, loss.double())
    mean: Tensor = sums / sizes
    return mean.repeat_interleave(sizes)
