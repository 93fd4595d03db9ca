"""Tensors that a hook makes before each call of a layer: pruned and, in the old style, normalised ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

SOURCES = ("_orig", "_mask", "_g", "_u", "_v")
"""What such a hook makes a tensor of has the tensor's name and one of these."""


def tensor_of(layer: nn.Module, name: str) -> Any:
    """A layer's tensor as its next call would find it; None where it has none.

    >>> linear = nn.utils.prune.l1_unstructured(nn.Linear(2, 1), "weight", amount=1)
    >>> linear.weight_orig.data.fill_(3.0)
    tensor([[3., 3.]])
    >>> linear.weight.max() == 3, tensor_of(linear, "weight").max() == 3
    (tensor(False), tensor(True))
    """
    if name in layer._parameters:
        return layer._parameters[name]
    hook = next((hook for _, its_name, hook in _hooks(layer) if its_name == name), None)
    return getattr(layer, name, None) if hook is None else _made(layer, hook)


def keep_what_hooks_make(layer: nn.Module) -> None:
    """Turn tensors that hooks make into parameters, and take off the hooks, which would replace what is drawn."""
    for key, name, hook in list(_hooks(layer)):
        value = _made(layer, hook).detach().clone()
        del layer._forward_pre_hooks[key]
        for place in (layer._parameters, layer._buffers, layer.__dict__):
            for each in (name, *(name + source for source in SOURCES)):
                place.pop(each, None)
        layer._parameters[name] = nn.Parameter(value, requires_grad=False)


def _hooks(layer: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """The keys of such hooks, the names of the tensors that they make, and the hooks."""
    for key, hook in layer._forward_pre_hooks.items():
        if isinstance(hook, BasePruningMethod):
            yield key, hook._tensor_name, hook
        elif isinstance(hook, (WeightNorm, SpectralNorm)):
            yield key, hook.name, hook


def _made(layer: nn.Module, hook: Any) -> Tensor:
    """What a hook would make; spectral norms improve their vectors only in the layer's own calls."""
    if isinstance(hook, BasePruningMethod):
        made: Tensor = hook.apply_mask(layer)
    elif isinstance(hook, SpectralNorm):
        made = hook.compute_weight(layer, do_power_iteration=False)
    else:
        made = hook.compute_weight(layer)
    return made
