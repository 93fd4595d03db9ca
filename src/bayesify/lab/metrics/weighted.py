"""Metrics as functions of how often each row counts: once for the value, resampled for its bootstrap interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bayesify.errors import BayesifyError

Measure = Callable[[Tensor], Tensor]
"""From row counts, float64 (R, rows), to R values, (R,): one for each of R resamples."""


class MetricError(BayesifyError):
    """Predictions and targets that don't fit each other or the metric."""


def mean(values: Tensor) -> Measure:
    """The mean of one number per row.

    >>> mean(torch.tensor([1.0, 4.0]))(torch.tensor([[1.0, 1.0], [2.0, 1.0]]).double())
    tensor([2.5000, 2.0000], dtype=torch.float64)
    """
    values = values.double()
    return lambda counts: counts @ values / counts.sum(-1)


def root(measure: Measure) -> Measure:
    """The square root of a measure."""
    return lambda counts: measure(counts).sqrt()


def average(measures: Sequence[Measure]) -> Measure:
    """The mean of several measures."""
    return lambda counts: torch.stack([measure(counts) for measure in measures]).mean(0)


def unit_weights(rows: int, device: torch.device) -> Tensor:
    """Counts in which every row counts once."""
    return torch.ones(1, rows, dtype=torch.float64, device=device)


def evaluate_measures(measures: Mapping[str, Measure], rows: int, device: torch.device) -> dict[str, float | None]:
    """The value of each metric over all rows; None, which JSON can hold, if it is not finite."""
    once = unit_weights(rows, device)
    found = {name: float(measure(once)) for name, measure in measures.items()}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


class Ranked:
    """Rows by increasing score, equal scores together."""

    def __init__(self, score: Tensor) -> None:
        values, self.order = score.sort(stable=True)
        last = values.new_ones(1, dtype=torch.bool)
        self.ends = torch.cat([values[1:] != values[:-1], last]).nonzero().squeeze(1)

    def totals(self, counts: Tensor, *values: Tensor) -> list[Tensor]:
        """The cumulative sums of per-row values, up to and including each distinct score: (R, scores)."""
        counts = counts.index_select(-1, self.order)
        sums = ((counts * value.double()[self.order]).cumsum(-1) for value in values)
        return [each.index_select(-1, self.ends) for each in sums]


def previous_totals(totals: Tensor) -> Tensor:
    """Cumulative sums shifted by one score, starting at 0.

    >>> previous_totals(torch.tensor([[2, 3, 7]]))
    tensor([[0, 2, 3]])
    """
    return torch.nn.functional.pad(totals[:, :-1], (1, 0))
