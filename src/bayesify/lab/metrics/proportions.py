"""Proportions, such as accuracy, with exact intervals: which shares fit what was counted."""

from __future__ import annotations

import math

import torch

from bayesify.lab.metrics.bootstrap import CONFIDENCE, Interval

STEPS = 50
"""Halvings of the interval in which a bound is sought."""


def exact_interval(successes: int, rows: int, confidence: float = CONFIDENCE) -> Interval:
    """The interval of a proportion of which `successes` of `rows` were counted (Clopper and Pearson 1934).

    Args:
        successes: How many were counted.
        rows: Of how many.
        confidence: The least probability with which the interval holds the true share.

    Returns:
        The bounds, from 0 to 1.

    >>> [round(bound, 4) for bound in exact_interval(9, 10)]
    [0.555, 0.9975]
    """
    tail = (1 - confidence) / 2
    return _lower(successes, rows, tail), 1 - _lower(rows - successes, rows, tail)


def tail_probability(successes: int, rows: int, share: float) -> float:
    """The probability of counting at least `successes` of `rows` if the true share is `share` (the binomial's tail).

    It is the p-value of the hypothesis that the true share is no higher than `share`.

    Args:
        successes: How many were counted.
        rows: Of how many.
        share: The share that is assumed.

    Returns:
        The probability.

    >>> round(tail_probability(9, 10, 0.5), 6)  # 11 of the 1024 outcomes
    0.010742
    """
    if successes <= 0:
        return 1.0
    if not 0 < share < 1:
        return float(share >= 1)
    counts = torch.arange(successes, rows + 1, dtype=torch.float64)
    ways = math.lgamma(rows + 1) - torch.lgamma(counts + 1) - torch.lgamma(rows - counts + 1)
    return float((ways + counts * math.log(share) + (rows - counts) * math.log1p(-share)).logsumexp(0).exp())


def _lower(successes: int, rows: int, tail: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(STEPS if successes else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if tail_probability(successes, rows, middle) < tail else (low, middle)
    return low
