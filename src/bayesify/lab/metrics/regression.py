"""Metrics of regression: RMSE, log density, CRPS, coverage, calibration of quantiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.lab.data import Reals
from bayesify.lab.metrics.selective_prediction import area_under_risk
from bayesify.lab.metrics.weighted import (
    Measure,
    MetricError,
    Ranked,
    average,
    evaluate_measures,
    mean,
    root,
    unit_weights,
)
from bayesify.prediction.results import Regression

INTERVAL = 0.9
"""The probability of the interval whose coverage and width are measured."""
TAIL = (1 - INTERVAL) / 2
"""The probability below that interval, and above it."""
LEVELS = 100
"""The number of quantiles, evenly spread from 0 to 1, that are compared with the targets."""
PAIRS = 20_000
"""The number of pairs of draws, per target, that CRPS uses; up to 200 draws it uses all pairs."""


def regression_metrics(p: Regression, y: Tensor, targets: Reals) -> dict[str, float | None]:
    """Coverage, density and error in the targets' own units; `y` is standardised, as in the examples.

    With several targets, error, standard deviations, CRPS and AURC are means over them, and there is also
    `rmse_TARGET` for each. AURC is the root of the area under the risk-coverage curve of the squared error; it equals
    the RMSE if the uncertainty is uninformative.

    Args:
        p: A prediction of real numbers.
        y: The standardised targets (N, K).
        targets: The names and units of the targets.

    Returns:
        The metrics by name.

    Raises:
        MetricError: If the targets don't fit the prediction.
    """
    return evaluate_measures(real_measures(p, y, targets), len(y), p.mean.device)


def real_measures(p: Regression, y: Tensor, targets: Reals) -> dict[str, Measure]:
    """The metrics of regression, each as a function of how often each row counts."""
    if p.mean.shape != y.shape or not len(y):
        raise MetricError(
            f"predictions have shape {tuple(p.mean.shape)}, targets {tuple(y.shape)}; they must be equal and not empty"
        )
    y = y.to(p.mean.device)
    scale = torch.tensor(targets.std, dtype=torch.float64, device=y.device)
    squares = ((p.mean.double() - y.double()) * scale).square()
    low, high = p.interval(INTERVAL)
    errors = [root(mean(each)) for each in squares.unbind(1)]
    areas = [root(area_under_risk(std, each)) for std, each in zip(p.std.unbind(1), squares.unbind(1), strict=True)]
    per_target = {"crps": crps(p, y), "width": high - low}
    per_target |= {name: getattr(p, name) for name in ("std", "aleatoric_std", "epistemic_std")}
    return {
        "coverage": mean(((low <= y) & (y <= high)).double().mean(1)),
        "log_density": mean(p.log_prob(y).double() - scale.log().sum()),
        "rmse": average(errors),
        "quantile_error": _quantile_gap(quantile_of(p, y)),
        **{name: mean((value.double() * scale).mean(1)) for name, value in per_target.items()},
        "aurc": average(areas),
        **({f"rmse_{name}": each for name, each in zip(targets.names, errors, strict=True)} if len(errors) > 1 else {}),
    }


def coverage(p: Regression, y: Tensor, probability: float = INTERVAL) -> Tensor:
    """The share of targets inside the central predictive interval, equal to its probability if calibrated.

    Args:
        p: A prediction of real numbers.
        y: The standardised targets (N, K).
        probability: The probability of the interval.

    Returns:
        The share, from 0 to 1.
    """
    low, high = p.interval(probability)
    return ((low <= y) & (y <= high)).double().mean()


def quantile_of(p: Regression, y: Tensor) -> Tensor:
    """P(target ≤ y) under each row's predictive; uniform between 0 and 1 if it is calibrated (Dawid 1984).

    Args:
        p: A prediction of real numbers.
        y: The standardised targets (N, K).

    Returns:
        A probability for each target (N, K).
    """
    means, stds = _mixture(p)
    below: Tensor = torch.special.ndtr((y - means) / stds).mean(0)
    return below


def quantile_error(p: Regression, y: Tensor) -> Tensor:
    """The mean of |share of targets below the predicted q-quantile - q|, over 100 values of q from 0 to 1.

    (The calibration curve of Kuleshov et al. 2018, with the mean absolute error of Chung et al. 2021.)

    Args:
        p: A prediction of real numbers.
        y: The standardised targets (N, K).

    Returns:
        The mean difference.
    """
    return _quantile_gap(quantile_of(p, y))(unit_weights(len(y), p.mean.device)).squeeze(0)


def crps(p: Regression, y: Tensor) -> Tensor:
    """The continuous ranked probability score of each target, E|X - y| - E|X - X'|/2, in the units of `y`.

    Both means are exact for a mixture of Gaussians (Grimit et al. 2006, eq. 5); with more than 200 draws the
    second is that of 20,000 pairs of them.

    Args:
        p: A prediction of real numbers.
        y: The standardised targets (N, K).

    Returns:
        A score for each target (N, K).

    >>> ones = torch.ones(1, 1)
    >>> used = {"draws_used": torch.ones(1), "standard_error": 0 * ones, "freedom": ones}
    >>> p = Regression(1, None, 0 * ones, 0 * ones, ones, None, **used)
    >>> crps(p, torch.zeros(1, 1))
    tensor([[0.2337]], dtype=torch.float64)
    """
    means, stds = (each.double() for each in _mixture(p))
    return _distance(y.double() - means, stds).mean(0) - _spread(means, stds) / 2


def _mixture(p: Regression) -> tuple[Tensor, Tensor]:
    """The means and standard deviations of the Gaussians: one per draw, or a single one if draws were not kept."""
    if p.draws is None or p.draw_stds is None:
        return p.mean.unsqueeze(0), p.std.unsqueeze(0)
    return p.draws, p.draw_stds


def _distance(mean: Tensor, std: Tensor) -> Tensor:
    """E|X| of a Gaussian X: 2σφ(μ/σ) + μ(2Φ(μ/σ) - 1)."""
    z = mean / std
    below: Tensor = torch.special.ndtr(z)
    return 2 * std * (-z.square() / 2).exp() / math.sqrt(2 * math.pi) + mean * (2 * below - 1)


def _spread(means: Tensor, stds: Tensor) -> Tensor:
    """E|X - X'| of two values from the mixture; draw i is paired with draw i + shift, for all or some shifts."""
    count = len(means)
    same = _distance(torch.zeros_like(means), math.sqrt(2) * stds).mean(0)
    if count == 1:
        return same
    shifts = _shifts(count)
    weights = [1 if 2 * shift == count else 2 for shift in shifts]
    apart = torch.zeros_like(same)
    for shift, weight in zip(shifts, weights, strict=True):
        std = (stds.square() + stds.roll(shift, 0).square()).sqrt()
        apart += weight * _distance(means - means.roll(shift, 0), std).mean(0)
    return same / count + apart / sum(weights) * (1 - 1 / count)


def _shifts(count: int) -> list[int]:
    """The shifts between paired draws: all, or a random selection that keeps the number of pairs bounded."""
    every = 1 + torch.randperm(count // 2, generator=torch.Generator().manual_seed(0))
    return sorted(every[: max(1, PAIRS // count)].tolist())


def _quantile_gap(quantiles: Tensor) -> Measure:
    each, columns = quantiles.double().flatten(), quantiles[0].numel()
    ranked = Ranked(each)
    levels = torch.linspace(0, 1, LEVELS, dtype=torch.float64, device=each.device)
    place = torch.searchsorted(each[ranked.order][ranked.ends], levels, right=True)

    def measure(counts: Tensor) -> Tensor:
        (totals,) = ranked.totals(counts.repeat_interleave(columns, -1), torch.ones_like(each))
        below = torch.nn.functional.pad(totals, (1, 0))[:, place]
        return (below / totals[:, -1:] - levels).abs().mean(-1)

    return measure
