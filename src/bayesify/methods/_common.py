"""What several methods share: checks of options, and K copies of a tensor."""

from dataclasses import fields
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.methods.base import Method, Site, at_least_float32, parameter

# Options.

RANGES: dict[str, dict[str, Any]] = {
    **{name: {"low": 1, "integer": True} for name in ("components", "rank", "kl_samples", "rows_at_once")},
    **{name: {"low": 0} for name in ("mean_std", "scale_std", "std", "jitter")},
    **{name: {"low": 0, "open_low": True} for name in ("prior_std", "scale_mean")},
    "p": {"low": 0, "high": 1},
    "signs": {"low": 0, "high": 1 + 1e-9},
    "dropout_rate": {"low": 0, "high": 1, "open_low": True},
}
"""The numbers that an option may be, by its name: it means the same in every method."""


def check_options(method: Method) -> None:
    """Raise unless every option is one of the values that its type lists, True or False, or in its range."""
    types = get_type_hints(type(method))
    for option in fields(method):  # type: ignore[arg-type]
        name, kind = option.name, types[option.name]
        parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        allowed = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
        if getattr(method, name) is None and type(None) in parts:
            continue
        if allowed and getattr(method, name) not in allowed:
            refuse(method, name, f"one of {', '.join(map(repr, allowed))}")
        if kind is bool and not isinstance(getattr(method, name), bool):
            refuse(method, name, "True or False")
        if name in RANGES:
            check_number(method, name, **RANGES[name])


def check_number(
    method: Method, name: str, low: float, high: float = float("inf"), *, integer: bool = False, open_low: bool = False
) -> None:
    """Raise unless an option is a number in [low, high) (or (low, high) with `open_low`)."""
    value = getattr(method, name)
    right_type = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
    if not (right_type and (low < value if open_low else low <= value) and value < high):
        above, below = f"{'>' if open_low else '>='} {low}", "" if high == float("inf") else f" and < {high}"
        refuse(method, name, f"{'an integer' if integer else 'a number'} {above}{below}")


def refuse(method: Method, name: str, expected: str) -> NoReturn:
    """Raise for the value of an option."""
    raise BayesifyError(f"{type(method).__name__}({name}={getattr(method, name)!r}): expected {expected}")


# K copies of a tensor; the base tensor is the first.


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
