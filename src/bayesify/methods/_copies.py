"""K copies of a tensor, of which the base tensor is the first."""

import torch
from torch import Tensor

from bayesify.methods.base import Site, at_least_float32, parameter


def initial_copies(site: Site, components: int, init: str, jitter: float) -> dict[str, Tensor]:
    """K - 1 further copies of each base tensor: from the layer's own reset, or the base tensor with a jitter.

    A jittered copy is t(1 + jε) + j·rms(weight)·ε'. Layers whose reset is not random (norms) are jittered after it.
    """
    noise_scale = jitter * at_least_float32(site.base["weight"].detach()).square().mean().sqrt()
    jittered = init == "jitter" or _reset_is_constant(site)
    drawn = {name: [base.new_empty((0, *base.shape))] for name, base in site.base.items()}
    for _ in range(components - 1):
        for name, value in (site.reset() if init == "random" else site.base).items():
            value = at_least_float32(value.detach())
            if jittered:
                value = value * (1 + jitter * torch.randn_like(value)) + noise_scale * torch.randn_like(value)
            drawn[name].append(value.unsqueeze(0))
    return {name: parameter(torch.cat(values)) for name, values in drawn.items()}


def _reset_is_constant(site: Site) -> bool:
    first, second = site.reset()["weight"], site.reset()["weight"]
    return not first.is_meta and torch.equal(first, second)


def bias_copies(site: Site, components: int, bias: str) -> dict[str, Tensor]:
    """K - 1 further copies of the bias, if each component has its own."""
    if bias == "shared" or site.bias is None:
        return {}
    return {"bias": parameter(site.bias.expand(components - 1, *site.bias.shape).clone())}


def stacked(site: Site, name: str) -> Tensor:
    """The K copies of a tensor, stacked to (K, …)."""
    base, others = site.base[name] if name in site.base else site.statistics[name], site.posterior[name]
    dtype = torch.promote_types(base.dtype, others.dtype)
    return torch.cat([base.unsqueeze(0).to(dtype), others.to(dtype)])
