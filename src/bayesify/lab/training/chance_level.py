"""Warn if a trained network is no better than chance, which could go unnoticed in an ensemble."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch

from bayesify.lab.data import Classes, Examples, Targets

MARGIN = 0.01
"""In nats: a validation NLL this close to chance level, or above it, means that nothing was learnt."""


def warn_if_at_chance_level(nll: float, validation: Examples, targets: Targets, folder: Path, lr: float) -> None:
    """Warn if validation rows are predicted no better than by the frequencies of their classes."""
    if not isinstance(targets, Classes):
        return
    chance = entropy_of(torch.bincount(validation.targets, minlength=targets.count))
    if math.isfinite(nll) and nll > chance - MARGIN:
        warnings.warn(
            f"{folder}: the network has learnt nothing. Its validation NLL is {nll:.3f}; predicting class frequencies "
            f"gives {chance:.3f}. Lower training.lr (now {lr:g}), set training.clip=1, or train longer",
            stacklevel=2,
        )


def entropy_of(counts: torch.Tensor) -> float:
    """The entropy of class frequencies in nats.

    >>> round(entropy_of(torch.tensor([5, 5, 0])), 4)
    0.6931
    """
    p = counts.double() / counts.sum()
    return float(-torch.xlogy(p, p).sum())
