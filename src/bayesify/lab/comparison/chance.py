"""Which differences between models are beyond chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from bayesify.lab.comparison.columns import Column
from bayesify.lab.comparison.row import Row
from bayesify.prediction.results import student_quantile

LEVEL = 0.95
"""The probability that an interval holds the true difference."""
NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)
"""Half the width of a 95% interval, in standard errors."""


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The mean difference of values that belong together, such as those of one seed, and its margin.

    Args:
        ours: The values of one model.
        theirs: Those of the other, in the same order.

    Returns:
        The mean of ours - theirs, and half the width of its 95% interval by Student's t, which is infinite for a
        single pair. A difference is beyond chance if its size is above its margin.

    >>> paired_difference([0.1, 0.2, 0.3], [0.2, 0.3, 0.5])  # 0.0333 · Student's t for two degrees: 4.303
    (-0.1333..., 0.1434...)
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    n = len(differences)
    if n < 2:
        return fmean(differences), math.inf
    return fmean(differences), stdev(differences) / math.sqrt(n) * student_quantile((1 + LEVEL) / 2, n - 1)


def interval(row: Row, column: Column) -> tuple[float, float] | None:
    """The 95% interval of a metric: by Student's t over seeds, or the bootstrap's of a single run.

    Args:
        row: The model.
        column: The metric.

    Returns:
        The bounds; None if they are not known.
    """
    values = row.measured_values.get(column.key, ())
    if len(values) > 1:
        mean, margin = paired_difference(values, [0.0] * len(values))
        return mean - margin, mean + margin
    return row.intervals.get(column.key) if values else None


def standard_error(row: Row, column: Column) -> float | None:
    """The standard error of a metric, over seeds or by the bootstrap, if it is known.

    Args:
        row: The model.
        column: The metric.

    Returns:
        The standard error.
    """
    values = row.measured_values.get(column.key, ())
    if len(values) > 1:
        return stdev(values) / math.sqrt(len(values))
    ends = interval(row, column)
    return None if ends is None else (ends[1] - ends[0]) / (2 * NORMAL)


@dataclass(frozen=True)
class Difference:
    """The value of one model minus that of another, with its standard error and its 95% interval."""

    mean: float
    error: float
    low: float
    high: float

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the interval is without zero."""
        return self.low > 0 or self.high < 0


def difference(row: Row, other: Row, column: Column) -> Difference | None:
    """How much a metric of one model is above that of another.

    With several seeds the interval is that of the paired differences over seeds by Student's t. For single runs it is
    the paired bootstrap's: both models on the same resamples of the same rows.

    Args:
        row: The model.
        other: The other one.
        column: The metric.

    Returns:
        The difference; None if either model does not have the metric, or not row by row.
    """
    pairs = row.pairs(other, column.key)
    if not pairs:
        return None
    mean, margin = paired_difference(*zip(*pairs, strict=True))
    if len(row.runs) > 1:
        error = stdev(a - b for a, b in pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
        return Difference(mean, error, mean - margin, mean + margin)
    ours, theirs = row.resampled, other.resampled
    ends = None if ours is None or theirs is None else ours.difference_interval(theirs, column.key)
    if ends is None:
        return None
    low, high = min(ends[0], mean), max(ends[1], mean)
    return Difference(mean, (high - low) / (2 * NORMAL), low, high)


def beats(row: Row, other: Row, column: Column) -> bool:
    """Whether a model is better than another by a metric, beyond chance.

    The 95% interval of their difference must be without zero. Where that is not known of single runs, because an
    earlier version evaluated them, their bootstrap intervals must not overlap; a run without them is taken at its word.

    Args:
        row: The model.
        other: The other one.
        column: The metric.

    Returns:
        Whether it is; False if either does not have the metric.
    """
    pairs = row.pairs(other, column.key)
    if not pairs or column.best is None:
        return False
    mean, _ = paired_difference(*zip(*pairs, strict=True))
    if (mean >= 0) if column.best is min else (mean <= 0):
        return False
    found = difference(row, other, column)
    if found is not None:
        return found.is_beyond_chance
    ours, theirs = (each.intervals.get(column.key) for each in (row, other))
    return ours is None or theirs is None or ours[1] < theirs[0] or theirs[1] < ours[0]
