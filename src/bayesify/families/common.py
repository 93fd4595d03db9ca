"""What several families share: K factors, K copies of a tensor, and L2 divergences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..family import Draws, Site, parameter


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
    base = site.base[name] if name in site.base else site.statistics[name]
    copies = site.posterior[name]
    return torch.cat([base.unsqueeze(0).to(copies.dtype), copies])


def copies(site: Site, components: int, init: str, jitter: float) -> dict[str, Tensor]:
    """K - 1 further copies of each base tensor, by the layer's own reset or the base with a jitter.

    A jittered copy is t(1 + jε) + j·rms(weight)·ε'. Layers whose reset is not random (norms) are jittered after it.
    """
    noise_scale = jitter * site.base["weight"].detach().float().square().mean().sqrt()
    drawn: dict[str, list[Tensor]] = {name: [] for name in site.base}
    for _ in range(components - 1):
        values = site.reset() if init == "random" else site.base
        fixed = init == "jitter" or _reset_is_constant(site)
        for name, value in values.items():
            value = value.detach().float()
            if fixed:
                value = value * (1 + jitter * torch.randn_like(value)) + noise_scale * torch.randn_like(value)
            drawn[name].append(value)
    return {name: parameter(_stack(values, site.base[name])) for name, values in drawn.items()}


def _stack(values: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(values) if values else like.new_empty((0, *like.shape))


def _reset_is_constant(site: Site) -> bool:
    return bool(torch.equal(site.reset()["weight"], site.reset()["weight"]))


def l2(tensors: list[Tensor], prior_std: float) -> Tensor:
    """Σ‖t‖² / (2 prior_std²)."""
    return torch.stack([t.float().square().sum() for t in tensors]).sum() / (2 * prior_std**2)


def joined(sites: list[Site]) -> list[Site]:
    """The sites' posteriors (K, D) side by side as one site's, for divergences that are sums over entries."""
    names = {name for site in sites for name in site.posterior}
    together = {
        name: torch.cat([site.posterior[name] for site in sites if name in site.posterior], -1) for name in names
    }
    return [Site({}, together)]


def scaled(tensors: list[Tensor], factor: float) -> list[tuple[Tensor, Tensor]]:
    """Each trained tensor with itself times a factor: the gradients of L2 terms, in one fused call."""
    trained = [tensor for tensor in tensors if trainable(tensor)]
    return list(zip(trained, torch._foreach_mul([t.detach() for t in trained], factor), strict=True)) if trained else []


def trainable(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter that the optimizer may change."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad
