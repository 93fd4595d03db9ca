"""How much metrics would vary with other rows, by the bootstrap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bayesify.lab.data import Reals
from bayesify.lab.metrics.classes import class_measures
from bayesify.lab.metrics.detection import area_under_roc
from bayesify.lab.metrics.measure import Measure, MetricError, values_of
from bayesify.lab.metrics.reals import real_measures
from bayesify.lab.metrics.selective import selective_measures
from bayesify.prediction import Classification, Prediction, Regression

RESAMPLES = 500
CONFIDENCE = 0.95
AT_ONCE = 2_000_000
"""So many counts of rows are held at a time."""
MOST_CLASSWISE = 2_000_000
"""With more probabilities than that, the class-wise error is too slow to be measured a thousand times."""
UPWARD = ("ece", "ece20", "mce", "mce20", "adaptive_ece", "classwise_ece", "quantile_error")
"""Absolute values, which chance makes larger than they would be with endless rows, and resampling once more."""
Interval = tuple[float, float]


def intervals(
    p: Prediction, y: Tensor, targets: Reals | None = None, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Interval]:
    """Between which bounds each metric lies with 95% confidence, rows being what varies; the model stays.

    >>> from bayesify import Categorical
    >>> p = Categorical().predictive(torch.tensor([[[3.0, 0.0], [0.0, 3.0]] * 50]))
    >>> low, high = intervals(p, torch.zeros(100).long())["accuracy"]
    >>> 0.3 < low < 0.5 < high < 0.7
    True

    A metric that is None has none, nor has the class-wise error of very many probabilities. Calibration errors are too
    high where rows are few, so their intervals reach further down than up.
    """
    if isinstance(p, Classification):
        measures = class_measures(p, y)
        if p.log_probs.numel() > MOST_CLASSWISE:
            del measures["classwise_ece"]
        return bootstrap(measures, y.numel(), p.log_probs.device, resamples, seed)
    if isinstance(p, Regression) and targets is not None:
        return bootstrap(real_measures(p, y, targets), len(y), p.mean.device, resamples, seed)
    raise MetricError(f"{type(p).__name__} of {targets}: expected a prediction of classes, or of numbers with targets")


def selective_intervals(
    p: Classification, y: Tensor, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, dict[str, Interval]]:
    """The intervals of what `accuracy_at` and `buckets` say."""
    measures = selective_measures(p, y).items()
    return {name: bootstrap(some, y.numel(), p.log_probs.device, resamples, seed) for name, some in measures}


def detection_intervals(
    familiar: Mapping[str, Tensor], strange: Mapping[str, Tensor], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Interval]:
    """The interval of each score's AUROC, familiar and strange inputs being drawn again."""
    measures: dict[str, Measure] = {}
    for name, values in familiar.items():
        score = torch.cat([values, strange[name]])
        truth = torch.arange(len(score), device=score.device) >= len(values)
        measures[name] = area_under_roc(score, truth)
    return bootstrap(measures, len(score), score.device, resamples, seed)


def bootstrap(
    measures: Mapping[str, Measure], rows: int, device: torch.device, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Interval]:
    """The interval of each measure that has a value."""
    values = {name: value for name, value in values_of(measures, rows, device).items() if value is not None}
    found: dict[str, list[Tensor]] = {name: [] for name in values}
    for times in _resampled(rows, resamples, seed):
        there = times.to(device)
        for name, each in found.items():
            each.append(measures[name](there).cpu())
    return {name: _interval(name, values[name], torch.cat(each)) for name, each in found.items()}


def _resampled(rows: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """How often each row is among as many drawn with replacement, some resamples at a time."""
    generator = torch.Generator().manual_seed(seed)
    step = max(1, AT_ONCE // rows)
    for start in range(0, resamples, step):
        drawn = torch.randint(rows, (min(step, resamples - start), rows), generator=generator)
        yield torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn).double())


def _interval(name: str, value: float, resampled: Tensor) -> Interval:
    """The quantiles of the resampled values; for what resampling raises, as far below the value as the upper is above.

    (The percentile interval of Davison & Hinkley 1997, chapter 5; with the basic one's lower bound, which together hold
    the truth more often than they say, where either alone holds it less often.)
    """
    tails = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=resampled.dtype)
    low, high = resampled.nanquantile(tails).tolist()
    if name in UPWARD:  # all of them from 0 to 1
        low, high = max(0.0, 2 * value - high), min(max(value, high), 1.0)
    return low, high
