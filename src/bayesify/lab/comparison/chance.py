"""Which differences between models are beyond chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from bayesify.lab.comparison.columns import Column
from bayesify.lab.comparison.table import Row
from bayesify.prediction.results import student_quantile

LEVEL = 0.95
"""The probability that an interval holds the true difference."""


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


def beats(row: Row, other: Row, column: Column) -> bool:
    """Whether a model is better than another by a metric, beyond chance.

    With several seeds the 95% interval of the paired differences must be without zero. The bootstrap intervals of
    single runs must not overlap; a run without them is taken at its word.

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
    mean, margin = paired_difference(*zip(*pairs, strict=True))
    if (mean >= 0) if column.best is min else (mean <= 0):
        return False
    if len(row.runs) > 1:
        return abs(mean) > margin
    ours, theirs = (each.intervals.get(column.key) for each in (row, other))
    return ours is None or theirs is None or ours[1] < theirs[0] or theirs[1] < ours[0]
