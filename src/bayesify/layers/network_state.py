"""What a network holds besides its parameters: copied for draws, and watched, as a call may store what it computed.

A network may keep class embeddings, merged weights or hidden states in attributes. These are results of one draw, so
the next draw must not start from them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[str, str]
"""The name of a module, and of one of its attributes or buffers."""
Token = Any
"""What a value is known by: equal tokens mean that nothing was stored in the value in the meantime."""
STANDARD = {*vars(nn.Module()), "method", "scope", "site_name"}
"""The attributes that torch, or conversion, gives every module."""
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
OPAQUE = (nn.Module, FunctionType, BuiltinFunctionType, MethodType, ModuleType, property)
STATELESS = ("torch.nn.modules.", "bayesify.layers.")
"""Packages whose layers store nothing when they are called in evaluation; users may attach something to them."""
MOST_ENTRIES = 1000
"""Of longer containers, such as vocabularies, only the length is watched."""


class _Missing:
    """The value of an attribute that is not there; the same object in copies and after unpickling."""

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = _Missing()


# Copies.


def copy_of(module: nn.Module, shared: Iterable[Any] = ()) -> nn.Module:
    """A deep copy but for what it shares.

    Activations that modules keep, which `deepcopy` refuses, are detached. Locks, open files and other things that can't
    be copied are shared with the copy.
    """
    memo = {id(each): each for each in shared}
    values = _reachable([vars(part) for part in module.modules()], set(memo))
    memo |= _detached(values)
    try:
        return copy.deepcopy(module, dict(memo))
    except (TypeError, NotImplementedError):
        return copy.deepcopy(module, memo | _uncopyable(values))


def _detached(values: Iterable[Any]) -> dict[int, Any]:
    """Activations without their history, by their ids."""
    return {id(value): value.detach() for value in values if isinstance(value, Tensor) and not value.is_leaf}


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


# What calls store.


class Stored:
    """What the last call of a network in evaluation stored in its attributes: the values before, and those after."""

    def __init__(self) -> None:
        self.before: dict[Place, Any] = {}
        self.after: dict[Place, Any] = {}

    def note(self, earlier: Snapshot, network: nn.Module) -> None:
        """Note what has been stored since a snapshot of the network."""
        changes = earlier.changes(network)
        values = _places(network) if changes else {}
        changed = {id(values[place]) for place in changes if not isinstance(values.get(place), ATOMS)}
        every = [*changes, *(place for place, value in values.items() if id(value) in changed)]
        self.before = {place: earlier.values.get(place, MISSING) for place in every}
        self.after = {place: values.get(place, MISSING) for place in every}

    def undo(self, network: nn.Module, copied: nn.Module | None = None) -> None:
        """Give a network, or a copy of it, the values from before the call, except where another was set since."""
        if not self.before:
            return
        values, memo = _places(network), _detached(_reachable([self.before], set()))
        for place, before in self.before.items():
            if values.get(place, MISSING) is self.after[place]:
                value = before if copied is None else copy.deepcopy(before, memo)
                _put(network if copied is None else copied, place, value)


class Snapshot:
    """The attributes and buffers of a network at one time."""

    def __init__(self, network: nn.Module) -> None:
        copies: dict[int, Any] = {}
        self.values = {place: _with_own_containers(value, copies) for place, value in _places(network).items()}
        self.tokens = tokens_of(network)

    def changes(self, network: nn.Module) -> list[Place]:
        """Where something has been stored since."""
        now = tokens_of(network)
        return [place for place in {**self.tokens, **now} if self.tokens.get(place) != now.get(place)]


class _Same:
    """An object, equal to itself only; held, so that no other takes its place in memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def token(value: Any, seen: set[int] | None = None) -> Token:
    """What a value is known by: equal for the same object with the same content, which is looked at once in `seen`.

    >>> kept = {}
    >>> before = token(kept)
    >>> kept["result"] = torch.ones(1)
    >>> before == token(kept)
    False
    """
    if isinstance(value, Tensor):
        return _Same(value), None if value.is_inference() else value._version
    if isinstance(value, ATOMS):
        return type(value), value if value == value else None  # NaN differs from itself
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, OPAQUE):
        return _Same(value)
    seen.add(id(value))
    if isinstance(value, CONTAINERS):
        if len(value) > MOST_ENTRIES:
            return _Same(value), len(value)
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value), [(key, token(part, seen)) for key, part in parts]
    return _Same(value), token(vars(value), seen) if hasattr(value, "__dict__") else None


def tokens_of(network: nn.Module) -> dict[Place, Token]:
    """What the attributes and buffers of a network are known by: equal as long as no call stores anything there."""
    seen: set[int] = set()
    return {place: token(value, seen) for place, value in _places(network).items()}


def _places(network: nn.Module) -> dict[Place, Any]:
    """The attributes and buffers of a network's modules that calls may store something in."""
    found: dict[Place, Any] = {}
    for name, module in network.named_modules():
        known = getattr(module, "plain", type(module)).__module__.startswith(STATELESS)
        for attribute, value in vars(module).items():
            if attribute not in STANDARD and not (known and isinstance(value, (tuple, *ATOMS))):
                found[name, attribute] = value
        found |= {} if known else {(name, buffer): value for buffer, value in module._buffers.items()}
    return found


def _with_own_containers(value: Any, copies: dict[int, Any]) -> Any:
    """The value as it is now: its containers and plain objects, which may change, are copied, each once."""
    if id(value) in copies:
        return copies[id(value)]
    if type(value) in (dict, OrderedDict, list, set, deque) and len(value) <= MOST_ENTRIES:
        copies[id(value)] = copied = type(value)()
        if isinstance(value, dict):
            copied.update({key: _with_own_containers(part, copies) for key, part in value.items()})
        elif isinstance(value, set):
            copied.update(value)
        else:
            copied.extend(_with_own_containers(part, copies) for part in value)
        return copied
    if hasattr(value, "__dict__") and not isinstance(value, (Tensor, type, *OPAQUE)):
        try:
            copies[id(value)] = copied = object.__new__(type(value))
            vars(copied).update({key: _with_own_containers(part, copies) for key, part in vars(value).items()})
        except TypeError:  # it is more than its attributes
            copies[id(value)] = value
        return copies[id(value)]
    return value


def _put(network: nn.Module, place: Place, value: Any) -> None:
    name, attribute = place
    module = network.get_submodule(name)
    if value is not MISSING:
        setattr(module, attribute, value)
    elif hasattr(module, attribute):
        delattr(module, attribute)
