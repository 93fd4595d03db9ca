"""Dropout modules that a network already has, kept alive in evaluation."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..family import Draws, Elementwise, Perturbation, Site
from .base import BayesianLayer


class BayesianDropout(BayesianLayer, nn.Dropout):
    """`nn.Dropout` that in evaluation drops with one mask for the whole batch: one draw is one function."""

    plain: ClassVar[type[nn.Module]] = nn.Dropout
    role = "dropout"
    weight = None

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        return Site({}, kind=type(layer).__name__)

    def settled(self, p: Perturbation) -> Perturbation:
        """The mask is drawn when the input's shape is known."""
        return p

    def forward(self, input: Tensor) -> Tensor:
        """In training the ordinary mask for every element; in evaluation a draw."""
        if self.training:
            output: Tensor = self.plain.forward(self, input)
            return output
        return input * mask_of(self.perturbation(), mask_shape(self.plain, input, self.scope.batch_dim)).to(input)


class BayesianDropout1d(BayesianDropout, nn.Dropout1d):
    """`nn.Dropout1d`, kept alive in evaluation."""

    plain = nn.Dropout1d


class BayesianDropout2d(BayesianDropout, nn.Dropout2d):
    """`nn.Dropout2d`, kept alive in evaluation."""

    plain = nn.Dropout2d


class BayesianDropout3d(BayesianDropout, nn.Dropout3d):
    """`nn.Dropout3d`, kept alive in evaluation."""

    plain = nn.Dropout3d


class FrozenDropout(nn.Module):
    """One draw of a dropout module: for inputs of one shape always the same mask."""

    def __init__(self, layer: BayesianDropout, seed: int) -> None:
        super().__init__()
        self.family, self.kind, self.seed = layer.family, layer.plain, seed
        self.batch_dim = layer.scope.batch_dim

    def forward(self, input: Tensor) -> Tensor:
        """The input times the mask for its shape."""
        draws = Draws(torch.zeros(1, dtype=torch.long), (torch.Generator().manual_seed(self.seed),))
        drawn = self.family.draw(Site({}), draws)
        return input * mask_of(drawn, mask_shape(self.kind, input, self.batch_dim)).to(input)


def mask_shape(kind: type[nn.Module], x: Tensor, batch_dim: int) -> tuple[int, ...]:
    """The mask's shape, the same for all rows: every element for `nn.Dropout`, every channel for the others."""
    if kind is not nn.Dropout:
        dims: dict[type[nn.Module], int] = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
        return (1, x.shape[1], *[1] * (x.dim() - 2)) if x.dim() == dims[kind] else (x.shape[0], *[1] * (x.dim() - 1))
    rows = min(batch_dim, x.dim() - 1)
    return (*x.shape[:rows], 1, *x.shape[rows + 1 :])


def mask_of(perturbation: Perturbation, shape: tuple[int, ...]) -> Tensor:
    """The first draw's mask."""
    assert isinstance(perturbation.in_scale, Elementwise)
    return perturbation.in_scale.all(shape)[0]
