"""A network that is no better than chance after training is worth a word: it spoils an ensemble without a trace."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch

from bayesify.lab.data import Classes, Examples, Targets

MARGIN = 0.01
"""In nats: what is this close to chance, or worse, has learnt nothing."""


def warn_of_chance(nll: float, validation: Examples, targets: Targets, folder: Path, lr: float) -> None:
    """Warn where validation rows are predicted no better than by the frequencies of their classes."""
    if not isinstance(targets, Classes):
        return
    chance = entropy_of(torch.bincount(validation.targets, minlength=targets.count))
    if math.isfinite(nll) and nll > chance - MARGIN:
        warnings.warn(
            f"{folder}: the network has learnt nothing. Its validation NLL is {nll:.3f}, and that of the classes' "
            f"frequencies alone {chance:.3f}. Lower training.lr (it is {lr:g}), set training.clip=1, or train longer",
            stacklevel=2,
        )


def entropy_of(counts: torch.Tensor) -> float:
    """The entropy of frequencies in nats.

    >>> round(entropy_of(torch.tensor([5, 5, 0])), 4)
    0.6931
    """
    p = counts.double() / counts.sum()
    return float(-torch.xlogy(p, p).sum())
