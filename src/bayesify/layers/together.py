"""The factors of many layers drawn as those of one wide layer: a few operations in place of a few for each layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..family import Draws, Elementwise, Perturbation, Site

if TYPE_CHECKING:
    from .kernel import Kernel


def drawn_together(kernel: Kernel, root: nn.Module, draws: Draws) -> dict[Kernel, Perturbation]:
    """The perturbations of a kernel and of all others whose factors can be drawn with its own."""
    sites = {peer: peer.site() for peer in kernels_in(root) if peer.draws_factors and are_alike(peer, kernel)}
    forms = {peer.site_name: _form(site) for peer, site in sites.items()}
    sites = {peer: site for peer, site in sites.items() if forms[peer.site_name] == forms[kernel.site_name]}
    wide = kernel.family.draw(_side_by_side(list(sites.values())), draws)
    ins = _split(wide.in_scale, [site.in_size or 0 for site in sites.values()])
    outs = _split(wide.out_scale, [site.out_size or 0 for site in sites.values()])
    return {
        peer: Perturbation(wide.size, in_scale=in_scale, out_scale=out_scale)
        for peer, in_scale, out_scale in zip(sites, ins, outs, strict=True)
    }


def kernels_in(root: nn.Module) -> Iterator[Kernel]:
    """All weights with a posterior of their own."""
    for module in root.modules():
        kernels = getattr(type(module), "kernels", None)
        if kernels is not None:
            yield from kernels(module)


def are_alike(peer: Kernel, kernel: Kernel) -> bool:
    """Whether two kernels have their draws from the same family for the same call."""
    device = kernel.weight.device
    return peer.scope is kernel.scope and peer.family == kernel.family and peer.weight.device == device


def _form(site: Site) -> list[tuple[object, ...]]:
    """What must be equal for factors to stand side by side."""
    return [(name, tensor.dtype, tensor.shape[0]) for name, tensor in site.posterior.items()]


def _side_by_side(sites: list[Site]) -> Site:
    posterior = {name: torch.cat([site.posterior[name] for site in sites], -1) for name in sites[0].posterior}
    return Site(
        {}, posterior, in_size=sum(site.in_size or 0 for site in sites), out_size=sum(s.out_size or 0 for s in sites)
    )


def _split(factors: Tensor | Elementwise | None, sizes: list[int]) -> tuple[Tensor | None, ...]:
    if factors is None:
        return (None,) * len(sizes)
    drawn = factors.all((sum(sizes),)) if isinstance(factors, Elementwise) else factors
    parts: tuple[Tensor, ...] = drawn.split(sizes, -1)
    return parts
