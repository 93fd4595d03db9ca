"""Copies of models that serve again: while nothing that a model holds has changed, a prediction needs no new one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .copies import ATOMS, CONTAINERS, REGISTRIES, are_ordinary
from .family import Family
from .layers import named_modules
from .layers.scope import Scope, hooks_of_scope_alone
from .selection import unwrapped
from .skeleton import Skeleton
from .verdicts import Verdicts

WATCHED = CONTAINERS | {list}
FIXED = (torch.dtype, torch.device, FunctionType, BuiltinFunctionType, Family, Scope)
"""What copies share, so that they see how it changes, if it does."""
NOTHING = object()


class Watch:
    """What modules held at some time; the first of them is given again to ask, for a watch must not keep it alive.

    >>> net = nn.Sequential(nn.Linear(2, 1))
    >>> watch = Watch.over([net, net[0]])
    >>> watch.sees_no_change(net)
    True
    >>> net[0].weight.data.fill_(1.0)  # values are not watched
    tensor([[1., 1.]])
    >>> watch.sees_no_change(net)
    True
    >>> net[0].bias = None
    >>> watch.sees_no_change(net)
    False
    """

    def __init__(self, modules: Sequence[nn.Module], held: list[Any]) -> None:
        self.parts = modules[1:]
        self.types = [type(module) for module in modules]
        self.held, self.then = held, [copy.copy(each) for each in held]
        self.tensors = _tensors(modules)
        self.forms = [_form(tensor) for tensor in self.tensors]

    @classmethod
    def over(cls, modules: Sequence[nn.Module]) -> Watch | None:
        """A watch over all that modules hold; None if they hold what may change unseen."""
        held = []
        for module in modules:
            held.append(vars(module))
            of_scope = hooks_of_scope_alone(module) if module._forward_pre_hooks else []
            for name, value in vars(module).items():
                if type(value) in WATCHED:
                    known = name in REGISTRIES or any(value is hooks for hooks in of_scope)
                    if not known and not _has_atoms_alone(value.values() if isinstance(value, dict) else value):
                        return None
                    held.append(value)
                elif not _is_fixed(value):
                    return None
        return cls(modules, held)

    def sees_no_change(self, first: nn.Module) -> bool:
        """Whether modules are of the same types, hold the same objects, and their tensors have the same form."""
        try:
            same = self.held == self.then  # by identity first: no tensor is compared with itself
        except RuntimeError:  # a tensor in place of another
            return False
        types = [type(first), *map(type, self.parts)]
        return same and types == self.types and [_form(tensor) for tensor in self.tensors] == self.forms


def _is_fixed(value: Any) -> bool:
    if isinstance(value, tuple):
        return _has_atoms_alone(value)
    return type(value) in ATOMS or isinstance(value, FIXED)


def _has_atoms_alone(values: Iterable[Any]) -> bool:
    return all(type(value) in ATOMS for value in values)


def _tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Their parameters and buffers."""
    each = [t for module in modules for kind in (module._parameters, module._buffers) for t in kind.values()]
    return [tensor for tensor in each if tensor is not None]


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.shape


@dataclass(frozen=True)
class Kept:
    """A copy with what is known of its model, and the watches that tell whether both are as they were."""

    skeleton: Skeleton
    families: Sequence[Family]
    verdicts: Verdicts
    model: Watch
    network: Watch
    buffers: list[tuple[Tensor, Tensor]]
    """The copy's, each with the model's, which may have been written since."""


_KEPT: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()


def kept_copy(model: nn.Module) -> Kept | None:
    """The copy of a model that was kept, if there is one and it still says the same; nobody else gets it until it is
    kept again."""
    kept = _KEPT.pop(model, None)
    if kept is None or not kept.model.sees_no_change(unwrapped(model)):
        return None
    if not kept.network.sees_no_change(kept.skeleton.network):
        return None
    with torch.no_grad():
        for own, other in kept.buffers:
            own.copy_(other)
    return kept


def keep_copy(model: nn.Module, kept: Kept) -> None:
    """Let a copy serve again."""
    _KEPT[model] = kept


def to_be_kept(model: nn.Module, skeleton: Skeleton, families: Sequence[Family], verdicts: Verdicts) -> Kept | None:
    """A copy that may serve again; None if it is written by other ways than draws, or changes could not be seen."""
    if skeleton.has_channels_last or skeleton.has_dropout or "" in skeleton.layers:  # a model would keep itself alive
        return None
    modules, copied = named_modules(unwrapped(model)), named_modules(skeleton.network)
    if not are_ordinary(list(modules.values())):
        return None
    of_model, of_copy = (Watch.over(list(each.values())) for each in (modules, copied))
    if of_model is None or of_copy is None:
        return None
    written = {id(target) for target in skeleton.targets.values()}
    if not all(name in modules and _is_as_made(each, modules[name], written) for name, each in copied.items()):
        return None
    buffers = [
        (own, other)
        for name, module in copied.items()
        for key, own in module._buffers.items()
        if own is not None and (other := modules[name]._buffers.get(key)) is not None
    ]
    return Kept(skeleton, families, verdicts, of_model, of_copy, buffers)


def _is_as_made(module: nn.Module, original: nn.Module, written: set[int]) -> bool:
    """Whether a module of a copy still holds what it got from the model's, but for tensors that draws have written."""
    hooks = hooks_of_scope_alone(original)
    for name, value in vars(module).items():
        if name == "training" or name in REGISTRIES:
            continue
        other = vars(original).get(name, NOTHING)
        if not (value == other or any(other is each for each in hooks)):
            return False
    parameters = all(p is original._parameters.get(name) or id(p) in written for name, p in module._parameters.items())
    buffers = all(name in original._buffers or b is None or id(b) in written for name, b in module._buffers.items())
    return parameters and buffers and module._modules.keys() == original._modules.keys() - {"posterior"}
