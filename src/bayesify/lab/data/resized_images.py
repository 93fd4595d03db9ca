"""`ResizedImages`: images of another size or number of channels, resized for a network."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.lab.data.errors import DataError
from bayesify.lab.data.examples import Examples

LUMA = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in a grey pixel (ITU-R BT.601)."""


class ResizedImages(Examples):
    """Images scaled to `shape` (C, H, W) and made grey or colour, as floats from 0 to 1.

    >>> from bayesify.lab.data import TensorExamples
    >>> grey = TensorExamples(torch.full((1, 1, 4, 4), 51, dtype=torch.uint8), torch.zeros(1))
    >>> ResizedImages(grey, (3, 2, 2)).raw(torch.tensor([0])).mean((0, 2, 3))
    tensor([0.2000, 0.2000, 0.2000])
    """

    def __init__(self, base: Examples, shape: tuple[int, ...]) -> None:
        self.base, self.shape, self.targets = base, shape, base.targets

    def raw(self, rows: Tensor) -> Tensor:
        x = self.base.raw(rows)
        if x.ndim != 4 or x.shape[1] not in (1, 3, self.shape[0]):
            raise DataError(f"inputs of shape {tuple(x.shape[1:])} can't become images of shape {self.shape}")
        unit = x.float() / 255 if x.dtype == torch.uint8 else x.float()
        unit = _channels(unit, self.shape[0])
        if unit.shape[2:] == self.shape[1:]:
            return unit
        return F.interpolate(unit, self.shape[1:], mode="bilinear", antialias=True).clamp(0, 1)

    def take(self, rows: Tensor) -> ResizedImages:
        return ResizedImages(self.base.take(rows), self.shape)

    def with_targets(self, targets: Tensor) -> ResizedImages:
        return ResizedImages(self.base.with_targets(targets), self.shape)


def _channels(unit: Tensor, channels: int) -> Tensor:
    if unit.shape[1] == channels:
        return unit
    grey = unit if unit.shape[1] == 1 else (unit * unit.new_tensor(LUMA).view(-1, 1, 1)).sum(1, keepdim=True)
    return grey.expand(-1, channels, -1, -1)
