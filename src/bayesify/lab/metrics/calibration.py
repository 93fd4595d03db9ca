"""Calibration errors (ECE, MCE, adaptive and class-wise ECE): accuracy against confidence, bin by bin."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.metrics.weighted import Measure, unit_weights

BINS = 15
EMP_BINS, EMP_FEW = 20, 5
"""The number of bins of EMP, appendix D.2, which drops those with at most this many rows."""
Edges = Callable[[Tensor, int], Tensor]


def equal_width(p: Tensor, bins: int) -> Tensor:
    """The bin of each probability; bin b is ((b - 1)/bins, b/bins] (Guo et al. 2017, section 2).

    >>> equal_width(torch.tensor([0.0, 0.1, 0.5, 0.51, 1.0]), 2)
    tensor([0, 0, 0, 1, 1])
    """
    return ((p.double() * bins).ceil().long() - 1).clamp(0, bins - 1)


def equal_mass(p: Tensor, bins: int) -> Tensor:
    """The bin of each probability between quantiles of all, with equal ones in the same bin.

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
    """Rows binned by the probability `p` of an event; `truth` is whether it happened.

    Torchmetrics puts probabilities of exactly 1, to which confident networks round, into a bin of their own (its
    issue 3510).
    """

    def __init__(self, p: Tensor, truth: Tensor, bins: int = BINS, edges: Edges = equal_width, few: int = 0) -> None:
        p = p.double().clamp(0, 1)
        place, empty = edges(p, bins).unsqueeze(1), p.new_zeros(len(p), bins)
        self.inside = empty.scatter(1, place, 1.0)
        self.gaps = empty.scatter(1, place, (truth.double() - p).unsqueeze(1))
        self.few = few

    def expected(self, counts: Tensor) -> Tensor:
        """Σ_b |B_b|/n · |accuracy(B_b) - confidence(B_b)| over the bins of more than `few` rows."""
        kept = counts @ self.inside > self.few
        error = ((counts @ self.gaps).abs() * kept).sum(-1) / counts.sum(-1)
        return error.where(kept.any(-1), torch.nan)

    def largest(self, counts: Tensor) -> Tensor:
        """max_b |accuracy(B_b) - confidence(B_b)| over the bins of more than `few` rows."""
        rows = counts @ self.inside
        error = ((counts @ self.gaps).abs() / rows.clamp_min(1) * (rows > self.few)).amax(-1)
        return error.where((rows > self.few).any(-1), torch.nan)


def classwise(probs: Tensor, y: Tensor, bins: int = BINS) -> Measure:
    """The mean over classes of the calibration error of each class's probability."""

    def measure(counts: Tensor) -> Tensor:
        each = [Bins(p, y == k, bins).expected(counts) for k, p in enumerate(probs.unbind(-1))]
        return torch.stack(each).mean(0)

    return measure


def ece(probs: Tensor, y: Tensor, bins: int = BINS, few: int = 0) -> Tensor:
    """The expected calibration error: |accuracy - confidence| in equal bins of confidence, weighted by their sizes.

    (Guo et al. 2017, eq. 3. EMP, appendix D.2, uses 20 bins and drops those with at most `few` = 5 rows.)

    Args:
        probs: Probabilities (N, classes).
        y: The true labels (N,).
        bins: The number of bins.
        few: Bins with at most this many rows are dropped.

    Returns:
        The error, from 0 to 1.

    >>> ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    tensor(0.4000, dtype=torch.float64)
    """
    return _once(Bins(*top_confidence(probs, y), bins, few=few).expected, probs)


def mce(probs: Tensor, y: Tensor, bins: int = BINS, few: int = 0) -> Tensor:
    """The maximum calibration error: |accuracy - confidence| of the worst bin (Guo et al. 2017, eq. 5).

    Args:
        probs: Probabilities (N, classes).
        y: The true labels (N,).
        bins: The number of bins.
        few: Bins with at most this many rows are dropped.

    Returns:
        The error, from 0 to 1.

    >>> mce(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))
    tensor(0.3000, dtype=torch.float64)
    """
    return _once(Bins(*top_confidence(probs, y), bins, few=few).largest, probs)


def adaptive_ece(probs: Tensor, y: Tensor, bins: int = BINS) -> Tensor:
    """The expected calibration error in bins with equally many rows (Nguyen & O'Connor 2015; Mukhoti et al. 2020).

    Args:
        probs: Probabilities (N, classes).
        y: The true labels (N,).
        bins: The number of bins.

    Returns:
        The error, from 0 to 1.
    """
    return _once(Bins(*top_confidence(probs, y), bins, equal_mass).expected, probs)


def classwise_ece(probs: Tensor, y: Tensor, bins: int = BINS) -> Tensor:
    """The mean over classes of the calibration error of each class's probability, in equal bins (Kull et al. 2019).

    Nixon et al. 2019 call it the static calibration error. Classes without rows count like the others.

    Args:
        probs: Probabilities (N, classes).
        y: The true labels (N,).
        bins: The number of bins.

    Returns:
        The error, from 0 to 1.
    """
    return _once(classwise(probs, y, bins), probs)


def calibration_bins(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> dict[str, np.ndarray]:
    """The middle, number of rows, mean confidence and accuracy of each non-empty bin of confidence.

    Args:
        confidence: The probability of each row's predicted class.
        correct: Whether it is the true class.
        bins: The number of bins.

    Returns:
        Arrays `middle`, `rows`, `confidence` and `accuracy`, with one entry per non-empty bin.
    """
    place = equal_width(torch.as_tensor(confidence), bins).numpy()
    count = np.bincount(place, minlength=bins)
    some = count > 0
    sums = {"confidence": confidence, "accuracy": correct.astype(float)}
    means = {name: np.bincount(place, values, bins)[some] / count[some] for name, values in sums.items()}
    return {"middle": (np.arange(bins)[some] + 0.5) / bins, "rows": count[some], **means}


def top_confidence(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of each row's most probable class, and whether that is the true class."""
    top = probs.max(-1)
    return top.values.flatten(), (top.indices == y).flatten()


def _once(measure: Measure, probs: Tensor) -> Tensor:
    return measure(unit_weights(probs[..., 0].numel(), probs.device)).squeeze(0)
