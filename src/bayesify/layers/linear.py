"""Linear layers: inputs (…, D), rows in the first dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..family import Site
from .base import BayesianLayer, affine_site
from .kernel import Factors, Kernel
from .rows import Rows
from .scaled_linear import ScaledLinear, scaled_linear
from .scaling import takes_passes_one_by_one


def folded_matrix(weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
    """A matrix (…, out, in) times its factors."""
    if in_scale is not None:
        weight = weight * in_scale.unsqueeze(-2)
    return weight if out_scale is None else weight * out_scale.unsqueeze(-1)


class LinearMap(Kernel):
    """y = x Wᵀ + b under a perturbation of an (out, in) matrix W."""

    features_last = True

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def fold(self, weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
        return folded_matrix(weight, in_scale, out_scale)

    def scaled_op(self, h: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors, rows: Rows) -> Tensor:
        draws = {len(scale) for scale in factors if scale is not None}
        alike = len(draws) == 1 and rows.takes_turns(max(draws))
        keeps_little = bool(draws) and h.numel() >= weight.numel() and takes_passes_one_by_one(h)
        if not alike and not keeps_little:
            return super().scaled_op(h, weight, bias, factors, rows)
        each = [s if s is None or alike else rows.spread(s).expand(len(h), -1) for s in factors]
        turns = rows.by_turns(h, max(draws) if alike else len(h))
        s, r = (None if scale is None else scale.to(h.dtype).unsqueeze(1) for scale in each)
        y: Tensor = (ScaledLinear.apply if keeps_little else scaled_linear)(turns, weight, bias, s, r)
        return y.reshape(*h.shape[:-1], -1)

    def grouped(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        draws, features = weight.shape[0], h.shape[-1]
        x = h.reshape(h.shape[0] // draws, draws, -1, features).transpose(0, 1).reshape(draws, -1, features)
        y = torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
        y = y.reshape(draws, h.shape[0] // draws, -1, y.shape[-1]).transpose(0, 1)
        return y.reshape(*h.shape[:-1], y.shape[-1])


class BayesianLinear(LinearMap, BayesianLayer, nn.Linear):
    """`nn.Linear` under a perturbation."""

    plain = nn.Linear
    role = "linear"
    takes_some_rows = True

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        assert isinstance(layer, nn.Linear)
        return affine_site(layer, in_size=layer.in_features, out_size=layer.out_features, is_matrix=True)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1
