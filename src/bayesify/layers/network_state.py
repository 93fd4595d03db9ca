"""What a network holds besides its parameters: copied for draws, and watched, as a call may store what it computed.

A network may keep class embeddings, merged weights or hidden states in attributes. These are results of one draw, so
the next draw must not start from them.
"""

import copy
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[str, str]
"""The name of a module, and of one of its attributes or buffers."""
Token = Any
"""Identifies a value and its content: equal as long as nothing is stored in it."""
STANDARD = set(vars(nn.Module()))
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, Enum)
OPAQUE = (nn.Module, FunctionType, BuiltinFunctionType, MethodType, ModuleType, property)
TORCH = "torch.nn.modules."
"""Layers of this package store nothing when they are called in evaluation; users may attach something to them."""
MOST_ENTRIES, MOST_VALUES = 100, 2000
"""Of longer containers, such as vocabularies, only the length is watched; of more values, only their identity."""


def copy_of(module: nn.Module, shared: Iterable[Any] = ()) -> nn.Module:
    """A deep copy but for what it shares.

    Activations that modules keep, which `deepcopy` refuses, are detached. Locks, open files and other things that can't
    be copied are shared with the copy.
    """
    memo = {id(each): each for each in shared}
    values = _reachable([vars(part) for part in module.modules()], set(memo))
    memo |= _detached(values) | _empty_copies(values)
    try:
        return copy.deepcopy(module, dict(memo))
    except (TypeError, NotImplementedError):
        return copy.deepcopy(module, memo | _uncopyable(values))


def _detached(values: Iterable[Any]) -> dict[int, Any]:
    """Activations without their history, by their ids."""
    return {id(value): value.detach() for value in values if isinstance(value, Tensor) and not value.is_leaf}


def _empty_copies(values: Iterable[Any]) -> dict[int, Any]:
    """New dicts for empty ones, by id: most that modules hold, for which `deepcopy` takes a third of the time."""
    return {id(value): type(value)() for value in values if type(value) in (dict, OrderedDict) and not value}


def _reachable(left: list[Any], seen: set[int]) -> list[Any]:
    """All values that these lead to, without those in `seen`."""
    found = []
    while left:
        value = left.pop()
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        found.append(value)
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, CONTAINERS):
            left += value
        elif hasattr(value, "__dict__") and not isinstance(value, (Tensor, type, *OPAQUE)):
            left += vars(value).values()
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value: in containers, and in the attributes of objects."""
    return [each for each in _reachable([value], set()) if isinstance(each, Tensor)]


def _uncopyable(values: Iterable[Any]) -> dict[int, Any]:
    """Those of the values that can't be copied, by their ids; an object is tried without parts that can't be."""
    found: dict[int, Any] = {}
    tried = [value for value in values if not isinstance(value, (Tensor, nn.Module, *CONTAINERS))]
    for value in sorted(tried, key=lambda value: bool(getattr(value, "__dict__", None))):
        try:
            copy.deepcopy(value, dict(found))
        except (TypeError, NotImplementedError):
            found[id(value)] = value
    return found


class _Same:
    """An object, equal to itself only; held, so that no other takes its place in memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def token(value: Any, seen: set[int] | None = None) -> Token:
    """The token of a value; values in `seen` are known by their identity only."""
    if isinstance(value, Tensor):
        return _Same(value), None if value.is_inference() else value._version
    if isinstance(value, ATOMS):
        return type(value), value if value == value else None  # NaN differs from itself
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, OPAQUE) or len(seen) > MOST_VALUES:
        return _Same(value)
    seen.add(id(value))
    if not isinstance(value, CONTAINERS):
        return _Same(value), token(getattr(value, "__dict__", None), seen)
    if len(value) > MOST_ENTRIES:
        return _Same(value), len(value)
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), [(key, token(part, seen)) for key, part in parts]


def tokens_of(network: nn.Module) -> dict[Place, Token]:
    """The tokens of a network's attributes and buffers: equal as long as no call stores anything there."""
    seen: set[int] = set()
    found: dict[Place, Token] = {}
    for name, module in network.named_modules():
        is_torchs = type(module).__module__.startswith(TORCH)
        for attribute, value in vars(module).items():
            if attribute not in STANDARD and not (is_torchs and isinstance(value, (tuple, *ATOMS))):
                found[name, attribute] = token(value, seen)
        if not is_torchs:
            found |= {(name, buffer): token(value) for buffer, value in module._buffers.items()}
            found[name, "modules"] = [(child, _Same(part)) for child, part in module._modules.items()]
    return found


def may_store(network: nn.Module) -> bool:
    """Whether a network has modules other than torch's, which may store what they compute."""
    return not all(type(module).__module__.startswith(TORCH) for module in network.modules())


class Missing:
    """The value of an attribute that is not there: the class itself, as copies and unpickling keep classes."""


def stored_results(model: nn.Module, changed: Iterable[Place], first: nn.Module, second: nn.Module) -> dict[Place, Any]:
    """The attributes in which calls store results of their draw, with the values that the model has now.

    They are all changed attributes of modules that stored different numbers in copies of the model with two draws.
    """
    places = [place for place in changed if place[1] != "modules"]
    modules = {place[0] for place in places if not _same_numbers(first, second, place)}
    places = [place for place in places if place[0] in modules]
    values = {place: getattr(model.get_submodule(place[0]), place[1], Missing) for place in places}
    return copy.deepcopy(values, _detached(_reachable([values], set())))


def _same_numbers(first: nn.Module, second: nn.Module, place: Place) -> bool:
    values = (getattr(network.get_submodule(place[0]), place[1], None) for network in (first, second))
    one, other = ([t for t in _reachable([value], set()) if isinstance(t, Tensor)] for value in values)
    return len(one) == len(other) and all(map(torch.equal, one, other))


def put_values(network: nn.Module, values: Mapping[Place, Any]) -> None:
    """Give attributes of a network other values, or remove them."""
    for (name, attribute), value in copy.deepcopy(dict(values)).items():
        module = network.get_submodule(name)
        if value is not Missing:
            setattr(module, attribute, value)
        elif hasattr(module, attribute):
            delattr(module, attribute)
