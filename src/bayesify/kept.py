"""Copies of models that serve again: while nothing that a model holds has changed, a prediction needs no new one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from .copies import ATOMS, BAYESIAN_ATTRIBUTES, CONTAINERS, REGISTRIES, are_ordinary
from .family import Family
from .layers import named_modules
from .layers.base import plain_type
from .layers.factored import FACTORS, FactoredLinear
from .layers.scope import Scope, hooks_of_scope_alone
from .memory import COPIES
from .selection import unwrapped
from .skeleton import Skeleton
from .verdicts import Verdicts

WATCHED = CONTAINERS | {list}
SHARED = (torch.dtype, torch.device, Family, Scope)
"""What copies share, so that they see how it changes, if it does."""


class Watch:
    """What modules held at some time. It keeps the first of them not alive, the others as long as that is.

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
        self.first, self.parts = ref(modules[0]), modules[1:]
        self.types, self.attributes = [type(module) for module in modules], [vars(module) for module in modules]
        self.held, self.then = held, _contents(held)
        self.tensors = [tensor for tensor in self.then if isinstance(tensor, Tensor)]
        self.forms = [_form(tensor) for tensor in self.tensors]

    @classmethod
    def over(cls, modules: Sequence[nn.Module]) -> Watch | None:
        """A watch over all that modules hold; None if they hold what may change unseen."""
        held: list[Any] = []
        for module in modules:
            held.append(vars(module))
            of_scope = hooks_of_scope_alone(module) if module._forward_pre_hooks else []
            for name, value in vars(module).items():
                if type(value) in WATCHED:
                    known = name in REGISTRIES or any(value is hooks for hooks in of_scope)
                    if not known and not _are_atoms(_contents([value])):
                        return None
                    held.append(value)
                elif not _is_fixed(value):
                    return None
        return cls(modules, held)

    def sees_no_change(self, first: nn.Module) -> bool:
        """Whether modules are the same, of the same types, hold the same objects, and tensors have the same form."""
        modules = [first, *self.parts]
        same = self.first() is first and all(map(is_, map(vars, modules), self.attributes))
        if not same or [type(module) for module in modules] != self.types:
            return False
        try:
            now = _contents(self.held)
        except RuntimeError:  # changed by another thread in this moment
            return False
        return _are_identical(now, self.then) and [_form(tensor) for tensor in self.tensors] == self.forms


def _contents(held: list[Any]) -> list[Any]:
    """The entries of containers, and of dicts the values, in their order."""
    return [*chain.from_iterable(held), *chain.from_iterable(each.values() for each in held if isinstance(each, dict))]


def _are_identical(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _are_atoms(values: Iterable[Any]) -> bool:
    return all(type(value) in ATOMS for value in values)


def _is_fixed(value: Any) -> bool:
    """Whether it can't change, or copies share it; functions if they are of a module, so that they hold nothing."""
    if type(value) in (tuple, torch.Size):
        return _are_atoms(value)
    if isinstance(value, FunctionType):
        return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, (ModuleType, type, NoneType))
    return type(value) in ATOMS or isinstance(value, SHARED)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.shape


def watch_over(model: nn.Module) -> Watch | None:
    """A watch over a model whose copy might serve again."""
    modules = list(named_modules(unwrapped(model)).values())
    return Watch.over(modules) if are_ordinary(modules) else None


class Kept:
    """A copy of a model, with what is known of it, and watches that tell whether both are as they were.

    The copy is kept without buffers: it gets new ones each time, so none that a call has put there is ever written.
    """

    def __init__(self, skeleton: Skeleton, families: Sequence[Family], verdicts: Verdicts, model: Watch) -> None:
        self.skeleton, self.families, self.verdicts, self.model = skeleton, families, verdicts, model
        self.network: Watch | None = None
        self.places: list[tuple[dict[str, Any], str, Tensor]] = []
        """Where its buffers belong, by name, and the model's."""
        self.buffers: list[Tensor] = []

    def take(self) -> None:
        """Give the copy buffers like the model's."""
        self.buffers = [source.detach().clone() for _, _, source in self.places]
        for (place, key, _), buffer in zip(self.places, self.buffers, strict=True):
            place[key] = buffer
        self.skeleton.buffers = self.buffers

    def is_as_made(self, model: nn.Module) -> bool:
        """Whether calls have left the copy as it was; it is without draws and buffers from here on."""
        self.skeleton.forget()
        if self.network is None and not self._can_be_watched(model):
            return False
        if not _are_identical([place.get(key) for place, key, _ in self.places], self.buffers):
            return False
        for place, key, _ in self.places:
            place[key] = None
        self.buffers = self.skeleton.buffers = []
        if self.network is None:
            self.network = Watch.over(list(named_modules(self.skeleton.network).values()))
        return self.network is not None and self.network.sees_no_change(self.skeleton.network)

    def _can_be_watched(self, model: nn.Module) -> bool:
        """Compare a new copy with its model, and find its buffers."""
        modules, copied = named_modules(model), named_modules(self.skeleton.network)
        written = {id(target) for target in self.skeleton.targets.values()}
        if not all(name in modules and _is_alike(each, modules[name], written) for name, each in copied.items()):
            return False
        for name, module in copied.items():
            for key, buffer in module._buffers.items():
                source = modules[name]._buffers.get(key)
                if id(buffer) not in written and not (buffer is None and source is None):
                    if buffer is None or source is None:
                        return False
                    self.places.append((module._buffers, key, source))
                    self.buffers.append(buffer)
        made = {id(buffer) for buffer in self.skeleton.buffers}
        memories = {source.untyped_storage().data_ptr() for _, _, source in self.places}
        return len(memories) == len(self.places) and all(id(buffer) in made for buffer in self.buffers)


def _is_alike(module: nn.Module, original: nn.Module, written: set[int]) -> bool:
    """Whether a module of a copy holds what the model's does, but for tensors that draws have written."""
    own, others, hooks = vars(module), vars(original), hooks_of_scope_alone(original)
    if type(module) not in (plain_type(original), FactoredLinear) or own.keys() != others.keys() - BAYESIAN_ATTRIBUTES:
        return False
    for name, value in own.items():
        other = others[name]
        if value is other or name == "training" or name in REGISTRIES:
            continue
        if any(other is each for each in hooks) and not value:
            continue
        if type(value) is not type(other) or type(value) not in WATCHED:
            return False
        if not _are_identical(_contents([value]), _contents([other])):
            return False
    parameters = [p is original._parameters.get(name) or id(p) in written for name, p in module._parameters.items()]
    parts = [name for name in original._modules if name != "posterior" or name in module._modules]
    buffers = [name for name in module._buffers if name not in FACTORS]
    return all(parameters) and list(module._modules) == parts and buffers == list(original._buffers)


def kept_copy(model: nn.Module) -> Kept | None:
    """The copy of a model that was kept, if it still says the same; nobody else gets it until it is kept again."""
    kept: Kept | None = COPIES.pop(model, None)
    if kept is None or torch._C._len_torch_dispatch_stack() or not kept.model.sees_no_change(unwrapped(model)):
        return None
    kept.take()
    return kept


def keep_copy(model: nn.Module, kept: Kept) -> None:
    """Let a copy serve again, if its calls have left it as it was."""
    skeleton = kept.skeleton
    if skeleton.has_channels_last or skeleton.has_dropout:
        return
    if "" in skeleton.layers or any(layer.scope.root is model for layer in skeleton.layers.values()):
        return  # the model would keep itself alive
    if not torch._C._len_torch_dispatch_stack() and kept.is_as_made(unwrapped(model)):
        COPIES[model] = kept
