"""Check images, intensities and severities; `ShiftError`."""

from __future__ import annotations

from torch import Tensor

from bayesify.errors import BayesifyError

SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 8
"""The smallest height and width of an image: one block of JPEG."""


class ShiftError(BayesifyError):
    """A corruption that can't be applied, or a corruption error that can't be computed."""


def require_unit_images(x: Tensor) -> None:
    """Raise unless `x` is a batch of grey or colour images from 0 to 1.

    >>> import torch
    >>> require_unit_images(torch.zeros(2, 3, 32))
    Traceback (most recent call last):
    bayesify.lab.shift.checks.ShiftError: a batch of shape (2, 3, 32) can't be corrupted; expected images ...
    """
    if x.dim() != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) < SMALLEST:
        raise ShiftError(
            f"a batch of shape {tuple(x.shape)} can't be corrupted; expected images (B, 1 or 3, H, W) of at least "
            f"{SMALLEST} × {SMALLEST} pixels"
        )
    if not x.is_floating_point():
        raise ShiftError(f"images of type {x.dtype} can't be corrupted; expected floats from 0 to 1: pass x / 255")
    # Written so that NaN fails too.
    if x.numel() and not (x.amin() >= 0 and x.amax() <= 1):
        low, high = x.amin().item(), x.amax().item()
        raise ShiftError(f"images from {low:.4g} to {high:.4g} can't be corrupted; expected pixels from 0 to 1")


def require_share(value: float, what: str) -> float:
    """The value, if it is a number from 0 to 1; else raises."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ShiftError(f"{what}={value!r}: expected a number from 0 to 1")
    return float(value)


def require_severity(value: float) -> int:
    """The value, if it is one of the five severities; else raises.

    >>> require_severity(6)
    Traceback (most recent call last):
    bayesify.lab.shift.checks.ShiftError: severity=6: expected 1, 2, 3, 4 or 5
    """
    if isinstance(value, bool) or value not in SEVERITIES:
        raise ShiftError(f"severity={value!r}: expected 1, 2, 3, 4 or 5")
    return int(value)
