"""What several methods share: checks of options, K factors, K copies of a tensor, and L2 penalties."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.methods.base import Draws, Gradients, Method, Site, at_least_float32, parameter, underlying_parameter
from bayesify.methods.distributions import scale_of

# Options.


def check_option(method: Method, name: str, allowed: tuple[str, ...]) -> None:
    """Raise unless an option has one of its allowed values."""
    value = getattr(method, name)
    if value not in allowed:
        raise BayesifyError(
            f"{type(method).__name__}({name}={value!r}): expected one of {', '.join(map(repr, allowed))}"
        )


def check_number(
    method: Method, name: str, low: float, high: float = float("inf"), *, integer: bool = False, open_low: bool = False
) -> None:
    """Raise unless an option is a number in [low, high) (or (low, high) with `open_low`)."""
    value = getattr(method, name)
    right_type = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
    if right_type and (low < value if open_low else low <= value) and value < high:
        return
    kind = "an integer" if integer else "a number"
    above = f"> {low}" if open_low else f">= {low}"
    below = "" if high == float("inf") else f" and < {high}"
    raise BayesifyError(f"{type(method).__name__}({name}={value!r}): expected {kind} {above}{below}")


def check_flag(method: Method, name: str) -> None:
    """Raise unless an option is True or False."""
    if not isinstance(getattr(method, name), bool):
        raise BayesifyError(f"{type(method).__name__}({name}={getattr(method, name)!r}): expected True or False")


# K factors.


def of_components(stack: Tensor, draws: Draws) -> Tensor:
    """For each draw, the entry of its component in a stack (K, …): (G, …)."""
    return stack.index_select(0, draws.component(stack.shape[0]))


def near_one(components: int, size: int, std: float, signs: float | None = None) -> Tensor:
    """K vectors around 1: Normal(1, std²), or random signs with probability `signs` of +1."""
    if signs is None:
        return 1 + std * torch.randn(components, size)
    return torch.where(torch.rand(components, size) < signs, 1.0, -1.0)


def joint_factors(sites: list[Site]) -> tuple[Tensor, Tensor]:
    """The locations and scales (K, ΣD) of all layers' factors, concatenated: a draw has one component in all layers."""
    names = [(site, name.removesuffix("_rho")) for site in sites for name in site.posterior if name.endswith("_rho")]
    device = names[0][0].posterior[f"{names[0][1]}_rho"].device
    locs = [site.posterior[f"{name}_loc"].to(device) for site, name in names]
    rhos = [site.posterior[f"{name}_rho"].to(device) for site, name in names]
    return torch.cat(locs, -1), scale_of(torch.cat(rhos, -1))


def smallest_scale(posterior: Mapping[str, Tensor]) -> float:
    """The smallest scale of a layer's factors."""
    return min(float(scale_of(t.detach()).min()) for name, t in posterior.items() if name.endswith("_rho"))


# K copies of a tensor; the base tensor is the first.


def initial_copies(site: Site, components: int, init: str, jitter: float) -> dict[str, Tensor]:
    """K - 1 further copies of each base tensor: from the layer's own reset, or the base tensor with a jitter.

    A jittered copy is t(1 + jε) + j·rms(weight)·ε'. Layers whose reset is not random (norms) are jittered after it.
    """
    noise_scale = jitter * at_least_float32(site.base["weight"].detach()).square().mean().sqrt()
    jittered = init == "jitter" or _reset_is_constant(site)
    drawn: dict[str, list[Tensor]] = {name: [] for name in site.base}
    for _ in range(components - 1):
        for name, value in (site.reset() if init == "random" else site.base).items():
            value = at_least_float32(value.detach())
            if jittered:
                value = value * (1 + jitter * torch.randn_like(value)) + noise_scale * torch.randn_like(value)
            drawn[name].append(value)
    empty = {name: base.new_empty((0, *base.shape)) for name, base in site.base.items()}
    return {name: parameter(torch.stack(values) if values else empty[name]) for name, values in drawn.items()}


def _reset_is_constant(site: Site) -> bool:
    first, second = site.reset()["weight"], site.reset()["weight"]
    return not first.is_meta and torch.equal(first, second)


def stacked(site: Site, name: str) -> Tensor:
    """The K copies of a tensor, stacked to (K, …)."""
    base, others = site.base[name] if name in site.base else site.statistics[name], site.posterior[name]
    dtype = torch.promote_types(base.dtype, others.dtype)
    return torch.cat([base.unsqueeze(0).to(dtype), others.to(dtype)])


def sum_of_squares(stack: Tensor) -> Tensor:
    """‖M_k‖² for each of K stacked tensors."""
    return stack.flatten(1).square().sum(1)


# L2 penalties and their gradients.


def l2(tensors: list[Tensor], prior_std: float) -> Tensor:
    """Σ‖t‖² / (2 prior_std²)."""
    return torch.stack([at_least_float32(t).square().sum() for t in tensors]).sum() / (2 * prior_std**2)


def l2_grad(tensors: list[Tensor], factor: float) -> Gradients:
    """The gradient of (factor / 2) Σ‖t‖²: factor · t for each trained tensor."""
    return [(tensor, tensor.detach(), factor) for tensor in tensors if is_trained(tensor)]


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor is a trained parameter, or a slice of one."""
    return underlying_parameter(tensor).requires_grad
