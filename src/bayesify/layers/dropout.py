"""Dropout modules that a network already has, kept active in evaluation."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayesify.layers.base import BayesianLayer, layer_type
from bayesify.methods.base import Draws, Method, Site


class BayesianDropout(BayesianLayer, nn.Dropout):
    """`nn.Dropout` that in evaluation drops with one mask for the whole batch: one draw is one function."""

    plain: ClassVar[type[nn.Module]] = nn.Dropout
    role = "dropout"

    @classmethod
    def sites_of(cls, layer: nn.Module) -> dict[str, Site]:
        """No sites: it has no tensor to draw."""
        return {}

    def forward(self, input: Tensor) -> Tensor:
        """In training the ordinary mask for every element; in evaluation a draw."""
        if self.training:
            output: Tensor = self.plain.forward(self, input)
            return output
        position = self.scope.positions(self.site_name)[:1].to(input.device)
        return masked(input, self.method, Draws(position), mask_shape(self.plain, input, self.scope.batch_dim))


BayesianDropout1d = layer_type(nn.Dropout1d, BayesianDropout)
BayesianDropout2d = layer_type(nn.Dropout2d, BayesianDropout)
BayesianDropout3d = layer_type(nn.Dropout3d, BayesianDropout)


class FrozenDropout(nn.Module):
    """One draw of a dropout module: for inputs of one shape always the same mask."""

    def __init__(self, layer: BayesianDropout, seed: int) -> None:
        super().__init__()
        self.method, self.kind, self.seed = layer.method, layer.plain, seed
        self.batch_dim = layer.scope.batch_dim

    def forward(self, input: Tensor) -> Tensor:
        """The input times the mask for its shape."""
        draws = Draws.seeded(torch.zeros(1, dtype=torch.long, device=input.device), [self.seed])
        return masked(input, self.method, draws, mask_shape(self.kind, input, self.batch_dim))


def mask_shape(kind: type[nn.Module], x: Tensor, batch_dim: int) -> tuple[int, ...]:
    """The mask's shape, the same for all rows: every element for `nn.Dropout`, every channel for the others."""
    if kind is not nn.Dropout:
        dims: dict[type[nn.Module], int] = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
        return (1, x.shape[1], *[1] * (x.dim() - 2)) if x.dim() == dims[kind] else (x.shape[0], *[1] * (x.dim() - 1))
    rows = min(batch_dim, x.dim() - 1)
    return (*x.shape[:rows], 1, *x.shape[rows + 1 :])


def masked(x: Tensor, method: Method, draws: Draws, shape: tuple[int, ...]) -> Tensor:
    """An input times one draw of a mask."""
    factors = method.draw(Site({}, in_size=math.prod(shape)), draws).in_scale
    assert factors is not None
    return x * factors.reshape(shape).to(x)
