"""Rounding of pixels, as image libraries do it."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(unit: Tensor) -> Tensor:
    """Pixels from 0 to 1 as integers from 0 to 255, stored as floats."""
    return round_half_up(unit * 255).clamp(0, 255)


def round_half_up(x: Tensor) -> Tensor:
    """Round to the nearest integer, halves up; `torch.round` rounds halves to even."""
    return torch.floor(x + 0.5)
