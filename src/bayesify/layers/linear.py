"""Linear layers: inputs (rows, …, features)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.layers.base import BayesianLayer, Operation, affine_site
from bayesify.methods.base import Site


class LinearMap(Operation):
    """y = x Wᵀ + b with an (out, in) matrix W."""

    features_last = True

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def fold(self, weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
        if in_scale is not None:
            weight = weight * in_scale.unsqueeze(-2)
        return weight if out_scale is None else weight * out_scale.unsqueeze(-1)

    def grouped(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        draws, rest = weight.shape[0], x.shape[1:-1]
        by_draw = x.reshape(x.shape[0] // draws, draws, -1, x.shape[-1]).transpose(0, 1).flatten(1, 2)
        y = torch.bmm(by_draw, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), by_draw, weight.mT)
        y = y.reshape(draws, x.shape[0] // draws, -1, y.shape[-1]).transpose(0, 1)
        return y.reshape(x.shape[0], *rest, y.shape[-1])


class BayesianLinear(LinearMap, BayesianLayer, nn.Linear):
    """`nn.Linear` under a perturbation."""

    plain = nn.Linear
    role = "linear"
    runs_in_chunks = True

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        assert isinstance(layer, nn.Linear)
        return affine_site(layer, in_size=layer.in_features, out_size=layer.out_features, is_matrix=True)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1
