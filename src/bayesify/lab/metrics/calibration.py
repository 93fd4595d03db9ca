"""Calibration: how far probabilities are from the share of rows that they promise, bin by bin."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.metrics.measure import Measure, each_once

BINS = 15
EMP_BINS, EMP_FEW = 20, 5
"""The bins of EMP, appendix D.2, of which those with so few rows are dropped."""
Edges = Callable[[Tensor, int], Tensor]


def equal_width(p: Tensor, bins: int) -> Tensor:
    """The bin of each probability; bin b is ((b - 1)/bins, b/bins] (Guo et al. 2017, section 2).

    >>> equal_width(torch.tensor([0.0, 0.1, 0.5, 0.51, 1.0]), 2)
    tensor([0, 0, 0, 1, 1])
    """
    return ((p.double() * bins).ceil().long() - 1).clamp(0, bins - 1)


def equal_mass(p: Tensor, bins: int) -> Tensor:
    """The bin of each probability between quantiles of all, equal ones together.

    >>> equal_mass(torch.tensor([0.1, 0.7, 0.8, 0.9]), 2)
    tensor([0, 0, 1, 1])
    """
    inner = torch.arange(1, bins, dtype=torch.float64, device=p.device) / bins
    rising = p.double().sort().values
    place = inner * (len(p) - 1)
    low = place.floor().long()
    edges = torch.lerp(rising[low], rising[(low + 1).clamp_max(len(p) - 1)], place - low)
    return torch.searchsorted(edges, p.double())


class Bins:
    """Rows in bins of their probabilities `p` that something is so; `truth` tells whether it was.

    Torchmetrics gives probabilities of exactly 1, to which confident networks round, a bin of their own (its issue
    3510).
    """

    def __init__(self, p: Tensor, truth: Tensor, bins: int = BINS, edges: Edges = equal_width, few: int = 0) -> None:
        p = p.double().clamp(0, 1)
        place, empty = edges(p, bins).unsqueeze(1), p.new_zeros(len(p), bins)
        self.inside = empty.scatter(1, place, 1.0)
        self.gaps = empty.scatter(1, place, (truth.double() - p).unsqueeze(1))
        self.few = few

    def expected(self, times: Tensor) -> Tensor:
        """Σ_b |B_b|/n · |accuracy(B_b) - confidence(B_b)| over the bins of more than `few` rows."""
        kept = times @ self.inside > self.few
        error = ((times @ self.gaps).abs() * kept).sum(-1) / times.sum(-1)
        return error.where(kept.any(-1), torch.nan)

    def largest(self, times: Tensor) -> Tensor:
        """max_b |accuracy(B_b) - confidence(B_b)| over the bins of more than `few` rows."""
        rows = times @ self.inside
        error = ((times @ self.gaps).abs() / rows.clamp_min(1) * (rows > self.few)).amax(-1)
        return error.where((rows > self.few).any(-1), torch.nan)


def classwise(probs: Tensor, y: Tensor, bins: int = BINS) -> Measure:
    """The mean over classes of the error of each one's own probability."""

    def measure(times: Tensor) -> Tensor:
        each = [Bins(p, y == k, bins).expected(times) for k, p in enumerate(probs.unbind(-1))]
        return torch.stack(each).mean(0)

    return measure


def ece(probs: Tensor, y: Tensor, bins: int = BINS, few: int = 0) -> Tensor:
    """The expected calibration error: |accuracy - confidence| in equal bins of confidence, weighted by their sizes.

    (Guo et al. 2017, eq. 3; EMP, appendix D.2, has 20 bins and drops those of at most 5 rows: `few`.)

    >>> ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    tensor(0.4000, dtype=torch.float64)
    """
    return _once(Bins(*confident(probs, y), bins, few=few).expected, probs)


def mce(probs: Tensor, y: Tensor, bins: int = BINS, few: int = 0) -> Tensor:
    """The maximum calibration error: |accuracy - confidence| of the worst bin (Guo et al. 2017, eq. 5).

    >>> mce(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))
    tensor(0.3000, dtype=torch.float64)
    """
    return _once(Bins(*confident(probs, y), bins, few=few).largest, probs)


def adaptive_ece(probs: Tensor, y: Tensor, bins: int = BINS) -> Tensor:
    """The expected calibration error in bins of equally many rows (Nguyen & O'Connor 2015; Mukhoti et al. 2020)."""
    return _once(Bins(*confident(probs, y), bins, equal_mass).expected, probs)


def classwise_ece(probs: Tensor, y: Tensor, bins: int = BINS) -> Tensor:
    """The mean over classes of the error of each one's own probability in equal bins (Kull et al. 2019).

    Nixon et al. 2019 call the same the static calibration error. A class that no row has counts like the others.
    """
    return _once(classwise(probs, y, bins), probs)


def calibration_bins(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> dict[str, np.ndarray]:
    """For each bin of confidence that has rows: its middle, their number, mean confidence and accuracy."""
    place = equal_width(torch.as_tensor(confidence), bins).numpy()
    count = np.bincount(place, minlength=bins)
    some = count > 0
    sums = {"confidence": confidence, "accuracy": correct.astype(float)}
    means = {name: np.bincount(place, values, bins)[some] / count[some] for name, values in sums.items()}
    return {"middle": (np.arange(bins)[some] + 0.5) / bins, "rows": count[some], **means}


def confident(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of each row's most probable class, and whether that is the right one."""
    top = probs.max(-1)
    return top.values.flatten(), (top.indices == y).flatten()


def _once(measure: Measure, probs: Tensor) -> Tensor:
    return measure(each_once(probs[..., 0].numel(), probs.device)).squeeze(0)
