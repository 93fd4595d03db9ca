"""Tensors that a hook makes before each call of a layer: pruned and, in the old style, normalised ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook, SpectralNormStateDictHook
from torch.nn.utils.weight_norm import WeightNorm

from ..family import whole

SOURCES = ("_orig", "_mask", "_g", "_u", "_v")
"""What such a hook makes a tensor of has the tensor's name and one of these."""
ABOUT_FILES = (SpectralNormLoadStateDictPreHook, SpectralNormStateDictHook)


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


def made_by_hooks(layer: nn.Module) -> list[str]:
    """The names of such tensors."""
    return [name for _, name, _ in _hooks(layer)]


def keep_what_hooks_make(layer: nn.Module) -> None:
    """Turn tensors that hooks make into parameters, and take off the hooks, which would replace what is drawn."""
    for key, name, hook in list(_hooks(layer)):
        with torch.enable_grad():
            made = _made(layer, hook)
        del layer._forward_pre_hooks[key]
        for place in (layer._parameters, layer._buffers, layer.__dict__):
            for each in (name, *(name + source for source in SOURCES)):
                place.pop(each, None)
        for hooks in (layer._state_dict_hooks, layer._load_state_dict_pre_hooks):
            for key, other in list(hooks.items()):
                if isinstance(getattr(other, "hook", other), ABOUT_FILES):
                    del hooks[key]
        layer._parameters[name] = nn.Parameter(made.detach().clone(), requires_grad=made.requires_grad)


def leaves(tensor: Tensor) -> list[Tensor]:
    """The parameters that a tensor is, is a part of, or is made of where gradients are recorded.

    >>> linear = nn.utils.prune.l1_unstructured(nn.Linear(2, 1), "weight", amount=1)
    >>> leaves(tensor_of(linear, "weight"))[0] is linear.weight_orig
    True
    """
    tensor = whole(tensor)
    if tensor.grad_fn is None:
        return [tensor]
    found, waiting = {}, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        waiting += [before for before, _ in node.next_functions if before is not None]
    return list(found.values())


def _hooks(layer: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """The keys of such hooks, the names of the tensors that they make, and the hooks."""
    for key, hook in layer._forward_pre_hooks.items():
        if isinstance(hook, BasePruningMethod):
            yield key, hook._tensor_name, hook
        elif isinstance(hook, (WeightNorm, SpectralNorm)):
            yield key, hook.name, hook


def _made(layer: nn.Module, hook: Any) -> Tensor:
    """What a hook would make; spectral norms improve their vectors, in place, only in the layer's own calls."""
    if isinstance(hook, BasePruningMethod):
        made: Tensor = hook.apply_mask(layer)
    elif isinstance(hook, SpectralNorm):
        source, u, v = (getattr(layer, hook.name + name) for name in ("_orig", "_u", "_v"))
        made = source / torch.dot(u.clone(), hook.reshape_weight_to_matrix(source) @ v.clone())
    else:
        made = hook.compute_weight(layer)
    return made
