"""What layers with several weights share: each weight is a linear map with its own posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.layers.base import BayesianLayer, Tensors, plain_type
from bayesify.layers.linear import LinearMap
from bayesify.layers.network_state import copy_of
from bayesify.layers.rows import Rows
from bayesify.methods.base import Perturbation, Site

Map = Callable[[Tensor], Tensor]
"""A weight with its draws, as a function of inputs (rows, …, features)."""
LINEAR = LinearMap()


def weight_site(layer: nn.Module, suffix: str, tensors: Callable[[nn.Module], Tensors], **what: Any) -> Site:
    """What a method sees of one weight: `tensors` finds it, and its bias, in the layer or in a copy of it."""

    def reset() -> Tensors:
        other: Any = copy_of(layer)
        other.reset_parameters() if hasattr(other, "reset_parameters") else _reset_attention(other)
        return {name: t.detach() for name, t in tensors(other).items()}

    base = tensors(layer)
    posterior = layer.posterior.tensors(suffix) if isinstance(layer, BayesianLayer) else {}
    out_size, in_size = base["weight"].shape
    sizes: dict[str, Any] = {"in_size": in_size, "out_size": out_size, "is_matrix": True}
    return Site(base, posterior, reset=reset, kind=plain_type(layer).__name__, **sizes, **what)


def _reset_attention(layer: Any) -> None:
    layer.out_proj.reset_parameters()
    layer._reset_parameters()


def draws_of_call(layer: BayesianLayer, *, unbatched: bool) -> Tensors | Callable[[Rows], dict[str, Map]]:
    """What a layer needs for one call: its tensors, where one draw serves all rows or the input has none.

    Otherwise a function that returns the weights by suffix, each as a function of inputs with the given rows.
    """
    sites = layer.sites()
    drawn = {suffix: layer.perturbation(site, suffix) for suffix, site in sites.items()}
    if unbatched or all(p.size == 1 for p in drawn.values()):
        return layer.assemble({suffix: layer.one_draw(site, drawn[suffix].only(0)) for suffix, site in sites.items()})
    return lambda rows: {suffix: map_of(site, drawn[suffix], rows) for suffix, site in sites.items()}


def map_of(site: Site, p: Perturbation, rows: Rows) -> Map:
    """A weight as a function that can be called often: its draws are assigned to the rows once."""
    ready = _at_rows(p, rows, site.base["weight"].dtype)
    return lambda x: LINEAR.by_row(x, site.base, ready, rows)


def _at_rows(p: Perturbation, rows: Rows, dtype: torch.dtype) -> Perturbation:
    weight = None if p.weight is None else p.weight.to(dtype)
    return replace(
        p,
        in_scale=None if p.in_scale is None else rows.select(p.in_scale),
        out_scale=None if p.out_scale is None else rows.select(p.out_scale),
        bias=rows.select(p.bias) if p.bias is not None and weight is None else p.bias,
        weight=weight,
        plus=None if p.plus is None else _at_rows(p.plus, rows, dtype),
    )
