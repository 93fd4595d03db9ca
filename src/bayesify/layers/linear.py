"""Linear layers: inputs (rows, …, features); and what layers with several linear maps share."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.layers.base import BayesianLayer, Operation, Tensors, affine_site
from bayesify.layers.rows import Rows
from bayesify.methods.base import Site

Map = Callable[[Tensor], Tensor]
"""A weight with its draws, as a function of inputs (rows, …, features)."""


class LinearMap(Operation):
    """y = x Wᵀ + b with an (out, in) matrix W."""

    features_last = True

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return F.linear(x, weight, bias)

    def grouped(self, x: Tensor, weight: Tensor) -> Tensor:
        draws = weight.shape[0]
        by_draw = x.reshape(x.shape[0] // draws, draws, -1, x.shape[-1]).transpose(0, 1).flatten(1, 2)
        y: Tensor = torch.bmm(by_draw, weight.mT).unflatten(1, (x.shape[0] // draws, -1)).transpose(0, 1)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class BayesianLinear(LinearMap, BayesianLayer, nn.Linear):
    """`nn.Linear` under a perturbation."""

    plain = nn.Linear
    role = "linear"
    runs_in_chunks = True

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        return affine_site(layer, is_matrix=True)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1


# Layers with several weights, each a linear map with its own posterior.

LINEAR = LinearMap()


def draws_of_call(layer: BayesianLayer, *, unbatched: bool) -> Tensors | Callable[[Rows], dict[str, Map]]:
    """What a layer needs for one call: its tensors, where one draw serves all rows or the input has none.

    Otherwise a function that returns the weights by suffix, each as a function of inputs with the given rows.
    """
    sites = layer.sites()
    drawn = {suffix: layer.perturbation(site, suffix) for suffix, site in sites.items()}
    if unbatched or all(p.size == 1 for p in drawn.values()):
        return layer.assemble({suffix: layer.one_draw(site, drawn[suffix].only(0)) for suffix, site in sites.items()})
    return lambda rows: {
        suffix: partial(LINEAR.by_row, base=site.base, p=drawn[suffix], rows=rows) for suffix, site in sites.items()
    }
