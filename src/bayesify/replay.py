"""What no drawn tensor touches is computed once: record a forward pass, then replay only what depends on the draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

COSTLY = ("convolution", "mm", "bmm", "addmm", "attention", "lstm", "gru")
"""Words in the names of operations that are worth computing once."""


@dataclass(frozen=True)
class _Slot:
    """A value of the recorded pass that differs by draw."""

    index: int


@dataclass(frozen=True)
class _Step:
    """One operation on such values; other tensors are held as they were."""

    function: Any
    arguments: Any
    results: tuple[int | None, ...]
    last_uses: tuple[int, ...] = ()


class Doubtful(Exception):
    """The pass can't be replayed with certainty; run the network as it is."""


class Tape(TorchDispatchMode):
    """The operations of one pass that depend on drawn tensors, in order.

    Recording gives up (`doubt`) where a replay might differ: a drawn value that decides Python's control flow, an
    in-place write that mixes drawn and other tensors, randomness.
    """

    def __init__(self, drawn: list[Tensor]) -> None:
        super().__init__()
        self.slots: Any = WeakTensorKeyDictionary()
        self.count = 0
        for tensor in drawn:
            self._add(tensor)
        self.drawn = len(drawn)
        self.steps: list[_Step] = []
        self.held: list[tuple[Tensor, int]] = []
        self.doubt: str | None = None
        self.saved = 0
        self.output: Any = None

    def record(self, call: Callable[[], Any]) -> Any:
        """Run a call and keep its tape."""
        with self:
            result = call()
        leaves, self._structure = tree_flatten(result)
        self.output = [self._slot_or_value(leaf) for leaf in leaves]
        self._mark_last_uses()
        return result

    @property
    def useful(self) -> bool:
        """Whether the tape is certain and saves anything."""
        return self.doubt is None and self.saved > 0

    def replay(self, drawn: list[Tensor]) -> Any:
        """The call's result had the drawn tensors had other values."""
        if self.doubt or any(tensor._version != version for tensor, version in self.held):
            raise Doubtful(self.doubt or "a tensor from before the draws was changed in place")
        values: dict[int, Any] = dict(enumerate(drawn))
        for step in self.steps:
            args, kwargs = tree_map_only(_Slot, lambda slot: values[slot.index], step.arguments)
            results = step.function(*args, **kwargs)
            for slot, result in zip(step.results, _as_tuple(results), strict=True):
                if slot is not None:
                    values[slot] = result
            for slot in step.last_uses:
                values.pop(slot, None)
        return tree_unflatten(
            [values[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self.output], self._structure
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        touched = any(tensor in self.slots for tensor in tensors)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._give_up(f"{func} is random")
        before = [tensor._version for tensor in tensors]
        results = func(*args, **kwargs)
        if not touched:
            self.saved += any(word in func._opname for word in COSTLY)
            return results
        for tensor, version in zip(tensors, before, strict=True):
            if tensor not in self.slots and tensor._version != version:
                self._give_up(f"{func} wrote a drawn value into a tensor from before the draws")
        self._keep(func, args, kwargs, tensors, results)
        return results

    def _keep(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: Any) -> None:
        self.held += [(tensor, tensor._version) for tensor in tensors if tensor not in self.slots]
        arguments = tree_map_only(Tensor, self._slot_or_value, (args, kwargs))
        produced = _as_tuple(results)
        if any(not isinstance(result, Tensor) and result is not None for result in produced):
            self._give_up(f"{func} reads a drawn value out of its tensor")
        slots = tuple(self._add(result) if isinstance(result, Tensor) else None for result in produced)
        self.steps.append(_Step(func, arguments, slots))

    def _add(self, tensor: Tensor) -> int:
        if tensor not in self.slots:
            self.slots[tensor] = self.count
            self.count += 1
        return int(self.slots[tensor])

    def _slot_or_value(self, leaf: Any) -> Any:
        return _Slot(self.slots[leaf]) if isinstance(leaf, Tensor) and leaf in self.slots else leaf

    def _give_up(self, reason: str) -> None:
        self.doubt = self.doubt or reason

    def _mark_last_uses(self) -> None:
        """Free a value after the last step that reads it."""
        needed = {leaf.index for leaf in self.output if isinstance(leaf, _Slot)}
        marked = []
        for step in reversed(self.steps):
            used = {leaf.index for leaf in tree_flatten(step.arguments)[0] if isinstance(leaf, _Slot)}
            used |= {slot for slot in step.results if slot is not None}
            marked.append(_Step(step.function, step.arguments, step.results, tuple(used - needed)))
            needed |= used
        self.steps = marked[::-1]


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
