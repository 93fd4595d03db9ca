"""What several families share: K factors, K copies of a tensor, and L2 divergences."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..distributions import scale_of
from ..family import Draws, Gradients, Site, parameter, precise, whole
from ..noise import is_eager


def of_components(stack: Tensor, draws: Draws) -> Tensor:
    """The entry of each draw's component from a stack (K, …): (G, …)."""
    return stack.index_select(0, draws.component(stack.shape[0]))


def near_one(components: int, size: int, std: float, signs: float | None = None) -> Tensor:
    """K vectors around 1: Normal(1, std²), or random signs with probability `signs` of +1."""
    if signs is None:
        return 1 + std * torch.randn(components, size)
    return torch.where(torch.rand(components, size) < signs, 1.0, -1.0)


def stacked(site: Site, name: str) -> Tensor:
    """The K copies of a tensor: the base tensor is component 0."""
    return with_copies(site.base[name] if name in site.base else site.statistics[name], site.posterior[name])


def with_copies(base: Tensor, copies: Tensor) -> Tensor:
    """A tensor and K - 1 others like it as one (K, …)."""
    dtype = torch.promote_types(base.dtype, copies.dtype)
    return torch.cat([base.unsqueeze(0).to(dtype), copies.to(dtype)])


def chosen(site: Site, name: str, z: Tensor) -> Tensor:
    """The copy of a tensor that z (one of K, of shape (1,)) says; without a gradient, without a stack of all."""
    base, others = site.base[name].unsqueeze(0), site.posterior[name]
    if torch.is_grad_enabled() or not len(others):
        return stacked(site, name).index_select(0, z)
    if z.is_cpu and is_eager() and not torch._C._len_torch_dispatch_stack():  # to look at a number is nothing there
        k = int(z)
        return (others[k - 1 : k] if k else base).clone()
    other = others.index_select(0, (z - 1).clamp_min(0))
    return torch.where((z == 0).reshape([1] * base.dim()), base, other)


def copies(site: Site, components: int, init: str, jitter: float) -> dict[str, Tensor]:
    """K - 1 further copies of each base tensor, by the layer's own reset or the base with a jitter.

    A jittered copy is t(1 + jε) + j·rms(weight)·ε'. Layers whose reset is not random (norms) are jittered after it.
    """
    noise_scale = jitter * precise(site.base["weight"].detach()).square().mean().sqrt()
    drawn: dict[str, list[Tensor]] = {name: [] for name in site.base}
    for _ in range(components - 1):
        values = site.reset() if init == "random" else site.base
        fixed = init == "jitter" or _reset_is_constant(site)
        for name, value in values.items():
            value = precise(value.detach())
            if fixed:
                value = value * (1 + jitter * torch.randn_like(value)) + noise_scale * torch.randn_like(value)
            drawn[name].append(value)
    return {name: parameter(_stack(values, site.base[name])) for name, values in drawn.items()}


def _stack(values: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(values) if values else like.new_empty((0, *like.shape))


def _reset_is_constant(site: Site) -> bool:
    first, second = site.reset()["weight"], site.reset()["weight"]
    return not first.is_meta and torch.equal(first, second)


def l2(tensors: list[Tensor], prior_std: float) -> Tensor:
    """Σ‖t‖² / (2 prior_std²)."""
    return torch.stack([precise(t).square().sum() for t in tensors]).sum() / (2 * prior_std**2)


def joined(sites: list[Site]) -> tuple[Tensor, Tensor]:
    """The locations and scales (K, ΣD) of all factors of all layers: one draw's component is the same in all."""
    names = [(site, name.removesuffix("_rho")) for site in sites for name in site.posterior if name.endswith("_rho")]
    device = names[0][0].posterior[f"{names[0][1]}_rho"].device
    locs = [site.posterior[f"{name}_loc"].to(device) for site, name in names]
    rhos = [site.posterior[f"{name}_rho"].to(device) for site, name in names]
    return torch.cat(locs, -1), scale_of(torch.cat(rhos, -1))


def smallest_scale(posterior: Mapping[str, Tensor]) -> float:
    """The smallest scale of a layer's factors."""
    return min(float(scale_of(t.detach()).min()) for name, t in posterior.items() if name.endswith("_rho"))


def scaled(tensors: list[Tensor], factor: float) -> Gradients:
    """Each trained tensor with itself times a factor: the gradients of L2 terms."""
    return [(tensor, tensor.detach(), factor) for tensor in tensors if trainable(tensor)]


def trainable(tensor: Tensor) -> bool:
    """Whether a tensor is, is a part of, or is made of, a parameter that the optimizer may change."""
    return whole(tensor).requires_grad
