"""Bootstrap intervals: how much metrics would vary with other rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bayesify.lab.data import Classes, Targets
from bayesify.lab.metrics.by_task import measures_of
from bayesify.lab.metrics.classification import class_measures
from bayesify.lab.metrics.ood_detection import area_under_roc
from bayesify.lab.metrics.selective_prediction import selective_measures
from bayesify.lab.metrics.weighted import Measure, MetricError, evaluate_measures
from bayesify.prediction.results import Classification, Prediction

RESAMPLES = 500
CONFIDENCE = 0.95
AT_ONCE = 2_000_000
"""The most row counts in memory at a time."""
MOST_CLASSWISE = 2_000_000
"""With more probabilities than this, the class-wise error is too slow to resample."""
BIASED_UPWARD = ("ece", "ece20", "mce", "mce20", "adaptive_ece", "classwise_ece", "quantile_error")
"""Absolute errors, which are too large with few rows, and again larger when rows are resampled."""
Interval = tuple[float, float]


def intervals(
    p: Prediction, y: Tensor, targets: Targets | None = None, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Interval]:
    """The 95% bootstrap interval of each metric, over the rows; the model is fixed.

    Args:
        p: A prediction.
        y: The targets.
        targets: What they are; not needed for classes.
        resamples: The number of resamples.
        seed: The seed of the resampling.

    Returns:
        The lower and upper bound of each metric.

    Raises:
        MetricError: If the targets don't fit the prediction.

    >>> from bayesify import Categorical
    >>> p = Categorical().predictive(torch.tensor([[[3.0, 0.0], [0.0, 3.0]] * 50]))
    >>> low, high = intervals(p, torch.zeros(100).long())["accuracy"]
    >>> 0.3 < low < 0.5 < high < 0.7
    True

    Metrics that are None have no interval, nor has the class-wise error of very many probabilities. Calibration errors
    are too high if rows are few, so their intervals reach further down than up.
    """
    if isinstance(p, Classification) and (targets is None or isinstance(targets, Classes)):
        measures = class_measures(p, y)
        if p.log_probs.numel() > MOST_CLASSWISE:
            del measures["classwise_ece"]
        return bootstrap(measures, y.numel(), p.log_probs.device, resamples, seed)
    if targets is None:
        raise MetricError(f"{type(p).__name__} with targets=None: expected what they are, unless they are classes")
    return bootstrap(measures_of(p, y, targets), len(y), p.draws_used.device, resamples, seed)


def selective_intervals(
    p: Classification, y: Tensor, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, dict[str, Interval]]:
    """The intervals of what `selective_metrics` returns.

    Args:
        p: A prediction of classes.
        y: The true labels (N,).
        resamples: The number of resamples.
        seed: The seed of the resampling.

    Returns:
        The bounds, under the same names.
    """
    measures = selective_measures(p, y).items()
    return {name: bootstrap(some, y.numel(), p.log_probs.device, resamples, seed) for name, some in measures}


def detection_intervals(
    in_dist: Mapping[str, Tensor], ood: Mapping[str, Tensor], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Interval]:
    """The interval of each score's AUROC, over in-distribution and out-of-distribution inputs.

    Args:
        in_dist: Scores of in-distribution inputs, by name.
        ood: Scores of out-of-distribution inputs, by name.
        resamples: The number of resamples.
        seed: The seed of the resampling.

    Returns:
        The bounds of each score's AUROC.
    """
    measures: dict[str, Measure] = {}
    for name, values in in_dist.items():
        score = torch.cat([values, ood[name]])
        truth = torch.arange(len(score), device=score.device) >= len(values)
        measures[name] = area_under_roc(score, truth)
    return bootstrap(measures, len(score), score.device, resamples, seed)


def bootstrap(
    measures: Mapping[str, Measure], rows: int, device: torch.device, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Interval]:
    """The interval of each measure that has a value."""
    values = {name: value for name, value in evaluate_measures(measures, rows, device).items() if value is not None}
    found = resample({name: measures[name] for name in values}, rows, device, resamples, seed)
    return {name: _interval(name, values[name], each) for name, each in found.items()}


def resample(
    measures: Mapping[str, Measure], rows: int, device: torch.device, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Tensor]:
    """The value of each measure in every resample of the rows.

    The same seed draws the same rows, so that the values of two models on the same rows are pairs, and their
    differences vary as the difference of the models does (the paired bootstrap).
    """
    found: dict[str, list[Tensor]] = {name: [] for name in measures}
    for counts in _resample_counts(rows, resamples, seed):
        there = counts.to(device)
        for name, each in found.items():
            each.append(measures[name](there).cpu())
    return {name: torch.cat(each) for name, each in found.items()}


def percentiles(resampled: Tensor) -> Interval:
    """The bounds between which 95% of the resampled values are.

    >>> percentiles(torch.arange(1001.0))
    (25.0, 975.0)
    """
    tails = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=resampled.dtype)
    low, high = resampled.nanquantile(tails).tolist()
    return low, high


def _resample_counts(rows: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """How often each row is drawn in a resample with replacement, for some resamples at a time."""
    generator = torch.Generator().manual_seed(seed)
    step = max(1, AT_ONCE // rows)
    for start in range(0, resamples, step):
        drawn = torch.randint(rows, (min(step, resamples - start), rows), generator=generator)
        yield torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn).double())


def _interval(name: str, value: float, resampled: Tensor) -> Interval:
    """The quantiles of the resampled values; for metrics biased upward, as far below the value as the upper is above.

    (The percentile interval of Davison & Hinkley 1997, chapter 5, for biased metrics with the lower bound of the basic
    interval: together they cover the truth more often than 95%, either alone less often.)
    """
    low, high = percentiles(resampled)
    if name in BIASED_UPWARD:  # all of them are between 0 and 1
        low, high = max(0.0, 2 * value - high), min(max(value, high), 1.0)
    return low, high
