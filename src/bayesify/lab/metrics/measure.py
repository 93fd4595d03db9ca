"""Metrics as functions of how often each row counts: once each for the value, resampled for its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bayesify.errors import BayesifyError

Measure = Callable[[Tensor], Tensor]
"""From how often each row counts, float64 (R, rows), to a value for each of the R ways to count, (R,)."""


class MetricError(BayesifyError):
    """Predictions and targets that can't be measured."""


def mean(values: Tensor) -> Measure:
    """The mean of one number per row.

    >>> mean(torch.tensor([1.0, 4.0]))(torch.tensor([[1.0, 1.0], [2.0, 1.0]]).double())
    tensor([2.5000, 2.0000], dtype=torch.float64)
    """
    values = values.double()
    return lambda times: times @ values / times.sum(-1)


def each_once(rows: int, device: torch.device) -> Tensor:
    """Every row counts once."""
    return torch.ones(1, rows, dtype=torch.float64, device=device)


def values_of(measures: Mapping[str, Measure], rows: int, device: torch.device) -> dict[str, float | None]:
    """What each measure says of the rows; None, which JSON can hold, where that is no finite number."""
    once = each_once(rows, device)
    found = {name: float(measure(once)) for name, measure in measures.items()}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


class Ranked:
    """Rows by rising score, equal scores together."""

    def __init__(self, score: Tensor) -> None:
        values, self.order = score.sort(stable=True)
        last = values.new_ones(1, dtype=torch.bool)
        self.ends = torch.cat([values[1:] != values[:-1], last]).nonzero().squeeze(1)

    def totals(self, times: Tensor, *values: Tensor) -> list[Tensor]:
        """The sums of each of the values, one per row, up to and with each of the different scores: (R, scores)."""
        times = times.index_select(-1, self.order)
        sums = ((times * value.double()[self.order]).cumsum(-1) for value in values)
        return [each.index_select(-1, self.ends) for each in sums]


def before(totals: Tensor) -> Tensor:
    """What totals were one score earlier.

    >>> before(torch.tensor([[2, 3, 7]]))
    tensor([[0, 2, 3]])
    """
    return torch.nn.functional.pad(totals[:, :-1], (1, 0))
