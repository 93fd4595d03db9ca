"""A drawn linear layer that keeps its factors apart from its weight, to be applied where that costs least."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..family import Perturbation
from .base import BayesianLayer
from .linear import BayesianLinear, folded_matrix
from .scaling import product, takes_passes_one_by_one

FACTORS = ("in_scale", "out_scale")
PRECISE = (torch.float32, torch.float64)


class FactoredLinear(nn.Linear):
    """(x ∘ in_scale) Wᵀ ∘ out_scale + b; the factors fold into the weight where the input has many rows.

    Whoever reads its weight finds the factors in it. Factors (S, …) of S draws are for S copies of a batch, one after
    the other.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        rows = input.numel() // max(self.in_features, 1)
        in_scale, out_scale = (self._buffers[name] for name in FACTORS)
        several = any(factor is not None and factor.dim() > 1 for factor in (in_scale, out_scale))
        if not several and rows * (self.in_features + self.out_features) >= weight.numel():
            return F.linear(input, self.weight, bias)
        x = input if in_scale is None else _scaled_input(input, in_scale)
        y = F.linear(x, weight, bias if out_scale is None else None)
        return y if out_scale is None else _scaled_output(y, out_scale, bias)

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        return value if name != "weight" else folded_matrix(value, *(self._buffers[factor] for factor in FACTORS))


def _scaled_input(x: Tensor, factor: Tensor) -> Tensor:
    """x ∘ s, in memory that the next layer's overwrites."""
    apart, factor = _by_draws(x, factor)
    y = product(apart, factor, "x") if _may_write(apart) else apart * factor
    return y.to(x.dtype).reshape(x.shape)


def _scaled_output(y: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    """y ∘ r + b, in y's place."""
    apart, factor = _by_draws(y, factor)
    place = apart if _may_write(apart) else None
    z = torch.mul(apart, factor, out=place) if bias is None else torch.addcmul(bias, apart, factor, out=place)
    return z.to(y.dtype).reshape(y.shape)


def _may_write(like: Tensor) -> bool:
    """Whether what is like this may be made in memory that is there: tapes and autograd follow values, not memory."""
    recorded = torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack()
    return not recorded and takes_passes_one_by_one(like)


def _by_draws(values: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Values (S·rows, …, n) and factors (S, n) of S draws shaped to be multiplied; a sole draw's (n) already are."""
    if factor.dim() == 1:
        return values, factor
    return values.reshape(len(factor), -1, values.shape[-1]), factor.unsqueeze(1)


def takes_factors(layer: BayesianLayer) -> bool:
    """Whether a layer's draws can be factors beside its weight."""
    if type(layer) is not BayesianLinear or layer._parameters.get("weight") is None:  # or what was made of one since
        return False
    return (layer.draws_factors or layer.family.factors_matrices) and layer.weight.dtype in PRECISE


def make_factored(linear: nn.Module) -> None:
    """Turn a plain linear layer into one with factors, of which there are none yet."""
    linear.__class__ = FactoredLinear
    linear._buffers.update(dict.fromkeys(FACTORS))


def factors_of(p: Perturbation) -> dict[str, Tensor]:
    """The factors of draws, each with a leading G."""
    each = {name: factor for name in FACTORS if isinstance(factor := getattr(p, name), Tensor)}
    return {name: factor.expand(p.size, -1) for name, factor in each.items()}
