"""Which layers a module reads the weights of without calling them, by what its methods say."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

Chain = tuple[str, ...]
TENSORS = ("weight", "bias")
FUNCTIONS = ("linear", "conv1d", "conv2d", "conv3d")
"""What a weight is handed to in place of a call of its layer."""
_found: WeakKeyDictionary[type[nn.Module], tuple[frozenset[str], frozenset[str]]] = WeakKeyDictionary()


def read_not_called(kind: type[nn.Module]) -> frozenset[str]:
    """The names of layers in a module of this type whose tensors `forward` reads, while no method uses them otherwise.

    Names are relative to the module. What a method reaches by other ways than `self.name` is not seen.

    >>> sorted(read_not_called(nn.MultiheadAttention))
    ['out_proj']
    >>> sorted(read_not_called(nn.TransformerEncoderLayer))  # reads some for its fast path, and calls them
    []
    """
    return _readings(kind)[0]


def handed_over(kind: type[nn.Module]) -> frozenset[str]:
    """The names of layers whose weight `forward` hands to a function such as `F.linear`, in a branch at least.

    >>> class Attention(nn.Module):
    ...     def forward(self, x):
    ...         return self.qkv(x) if self.bias is None else nn.functional.linear(x, self.qkv.weight, self.bias)
    >>> sorted(handed_over(Attention)), sorted(read_not_called(Attention))
    (['qkv'], [])
    """
    return _readings(kind)[1]


def _readings(kind: type[nn.Module]) -> tuple[frozenset[str], frozenset[str]]:
    if kind not in _found:
        _found[kind] = _read_not_called(kind), _handed_over(kind)
    return _found[kind]


def _handed_over(kind: type[nn.Module]) -> frozenset[str]:
    codes = _methods(kind)
    handed = {chain for name in _reached(codes) for chain in _chains(codes[name], FUNCTIONS) if chain[-1] == "weight"}
    return frozenset(".".join(chain[:-1]) for chain in handed if len(chain) > 1)


def _read_not_called(kind: type[nn.Module]) -> frozenset[str]:
    codes = _methods(kind)
    used = {chain for code in codes.values() for chain in _chains(code) if not _tensor_in(chain)}
    read = {chain[:-1] for name in _reached(codes) for chain in _chains(codes[name]) if chain[-1] in TENSORS}
    return frozenset(".".join(owner) for owner in read if owner and not any(owner[: len(u)] == u for u in used))


def _methods(kind: type[nn.Module]) -> dict[str, CodeType]:
    """The code of every method but what runs before the first call."""
    found: dict[str, CodeType] = {}
    for part in kind.__mro__[: -len(nn.Module.__mro__)]:
        for name, value in vars(part).items():
            code = getattr(inspect.unwrap(_function(value)), "__code__", None)
            if isinstance(code, CodeType) and name != "__init__":
                found.setdefault(name, code)
    return found


def _function(value: Any) -> Any:
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _reached(codes: dict[str, CodeType]) -> set[str]:
    """The methods that `forward` leads to."""
    reached: set[str] = set()
    ahead = {"forward"} & set(codes)
    while ahead:
        reached |= ahead
        ahead = {chain[0] for name in ahead for chain in _chains(codes[name])} & set(codes) - reached
    return reached


def _chains(code: CodeType, within: tuple[str, ...] = ()) -> Iterator[Chain]:
    """The attributes of `self` that code loads, each as far as it goes: `self.a.weight` is `("a", "weight")`.

    `within` asks only for those that are arguments of functions with these names.
    """
    chain: list[str] | None = None
    inside = not within
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain is not None:
            chain.append(step.argval)
            continue
        if chain and inside:
            yield tuple(chain)
        if within:
            inside = step.argval in within or (inside and not step.opname.startswith("CALL"))
        loads_self = step.opname.startswith("LOAD_") and str(step.argrepr).split(", ")[-1] == "self"
        chain = [] if loads_self else None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _chains(inner, within)


def _tensor_in(chain: Chain) -> bool:
    return any(name in TENSORS for name in chain)
