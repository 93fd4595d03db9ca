"""A drawn linear layer that keeps its factors apart from its weight, to be applied where that costs least."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..family import Perturbation
from .base import BayesianLayer
from .linear import BayesianLinear, folded_matrix

FACTORS = ("in_scale", "out_scale")
PRECISE = (torch.float32, torch.float64)


class FactoredLinear(nn.Linear):
    """(x ∘ in_scale) Wᵀ ∘ out_scale + b; the factors fold into the weight where the input has many rows.

    Whoever reads its weight finds the factors in it.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        rows = input.numel() // max(self.in_features, 1)
        if rows * (self.in_features + self.out_features) >= weight.numel():
            return F.linear(input, self.weight, bias)
        in_scale, out_scale = (self._buffers[name] for name in FACTORS)
        x = input if in_scale is None else (input * in_scale).to(input.dtype)
        y = F.linear(x, weight, bias if out_scale is None else None)
        if out_scale is not None:
            y = (y * out_scale if bias is None else torch.addcmul(bias, y, out_scale)).to(y.dtype)
        return y

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        return value if name != "weight" else folded_matrix(value, *(self._buffers[factor] for factor in FACTORS))


def takes_factors(layer: BayesianLayer) -> bool:
    """Whether a layer's draws can be factors beside its weight."""
    return type(layer) is BayesianLinear and layer.draws_factors and layer.weight.dtype in PRECISE


def make_factored(linear: nn.Module) -> None:
    """Turn a plain linear layer into one with factors, of which there are none yet."""
    linear.__class__ = FactoredLinear
    linear._buffers.update(dict.fromkeys(FACTORS))


def factors_of(p: Perturbation) -> dict[str, Tensor]:
    """The factors of draws, each with a leading G."""
    each = {name: factor for name in FACTORS if isinstance(factor := getattr(p, name), Tensor)}
    return {name: factor.expand(p.size, -1) for name, factor in each.items()}
