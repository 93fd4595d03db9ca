"""What no drawn tensor touches is computed once: record a forward pass, then replay only what depends on the draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

COSTLY = ("convolution", "mm", "bmm", "addmm", "attention", "rnn", "lstm", "gru")
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

    def run(self, values: dict[int, Any]) -> dict[int, Any]:
        """The results by slot; in a call of its own, so that no argument outlives it."""
        args, kwargs = _filled(self.arguments, values)
        results = _as_tuple(self.function(*args, **kwargs))
        return {slot: result for slot, result in zip(self.results, results, strict=True) if slot is not None}


class Doubtful(Exception):
    """The pass can't be replayed with certainty; run the network as it is."""


class Tape(TorchDispatchMode):
    """The operations of one pass that depend on drawn tensors, in order.

    Recording gives up (`doubt`) where a replay might differ: a drawn value that decides Python's control flow, an
    in-place write that mixes drawn and other tensors, randomness.
    """

    def __init__(self, drawn: list[Tensor]) -> None:
        super().__init__()
        self.key = object()
        self.count = 0
        for tensor in drawn:
            self._add(tensor)
        self.drawn = len(drawn)
        self.steps: list[_Step] = []
        self.held: list[tuple[Tensor, int]] = []
        self.doubt: str | None = None
        self.saved = 0
        self.output: Any = None

    def record(self, call: Callable[[], Tensor]) -> Tensor:
        """Run a call and keep its tape."""
        with self, _Escapes(self):
            result = call()
        self.output = self._slot_or_value(result)
        self._mark_last_uses()
        return result

    def replay(self, drawn: list[Tensor]) -> Tensor:
        """The call's result had the drawn tensors had other values."""
        if self.doubt or any(_version(tensor) != version for tensor, version in self.held):
            raise Doubtful(self.doubt or "a tensor from before the draws was changed in place")
        values: dict[int, Any] = dict(enumerate(drawn))
        for step in self.steps:
            values.update(step.run(values))
            for slot in step.last_uses:
                del values[slot]
        result = _filled(self.output, values)
        assert isinstance(result, Tensor)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        touched = any(self._slot(tensor) is not None for tensor in tensors)
        if _is_random(func, args, kwargs):
            self._give_up(f"{func} is random")
        if not touched:
            self.saved += any(word in func._opname for word in COSTLY)
            return func(*args, **kwargs)
        others = [(tensor, _version(tensor)) for tensor in tensors if self._slot(tensor) is None]
        results = func(*args, **kwargs)
        if any(_version(tensor) != version for tensor, version in others):
            self._give_up(f"{func} wrote a drawn value into a tensor from before the draws")
        self.held += others
        self._keep(func, args, kwargs, results)
        return results

    def _keep(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        arguments = self._slot_or_value((args, kwargs))
        produced = _as_tuple(results)
        if any(not isinstance(result, Tensor) and result is not None for result in produced):
            self._give_up(f"{func} reads a drawn value out of its tensor")
        slots = tuple(self._add(result) if isinstance(result, Tensor) else None for result in produced)
        self.steps.append(_Step(func, arguments, slots))

    def _slot(self, tensor: Tensor) -> int | None:
        """A tensor's slot is kept on the tensor itself, so that the tape keeps no activation alive."""
        owner, slot = getattr(tensor, "_tape_slot", (None, None))
        return slot if owner is self.key else None

    def _add(self, tensor: Tensor) -> int:
        slot = self._slot(tensor)
        if slot is None:
            slot = self.count
            self.count += 1
            tensor._tape_slot = (self.key, slot)  # type: ignore[attr-defined]
        return slot

    def _slot_or_value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            slot = self._slot(value)
            return value if slot is None else _Slot(slot)
        if isinstance(value, dict):
            return {key: self._slot_or_value(part) for key, part in value.items()}
        return type(value)(self._slot_or_value(part) for part in value) if type(value) in (tuple, list) else value

    def _give_up(self, reason: str) -> None:
        self.doubt = self.doubt or reason

    def _mark_last_uses(self) -> None:
        """Free a value after the last step that reads it."""
        needed = {self.output.index} if isinstance(self.output, _Slot) else set()
        marked = []
        for step in reversed(self.steps):
            used = {leaf.index for leaf in tree_flatten(step.arguments)[0] if isinstance(leaf, _Slot)}
            used |= {slot for slot in step.results if slot is not None}
            marked.append(_Step(step.function, step.arguments, step.results, tuple(used - needed)))
            needed |= used
        self.steps = marked[::-1]


class _Escapes(TorchFunctionMode):
    """Sees drawn values leave torch, where no tape can follow them."""

    WAYS = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage)

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.WAYS and self.tape._slot(args[0]) is not None:
            self.tape._give_up(f"{func} takes a drawn value out of torch")
        return func(*args, **(kwargs or {}))


def _is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws numbers; attention only does so to drop."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    return (defaults | given).get("dropout_p") != 0.0


def _version(tensor: Tensor) -> int:
    """How often a tensor was written; tensors of inference mode don't count."""
    return 0 if tensor.is_inference() else tensor._version


def _filled(value: Any, values: dict[int, Any]) -> Any:
    """A structure with every slot's value in its place."""
    if isinstance(value, _Slot):
        return values[value.index]
    if isinstance(value, dict):
        return {key: _filled(part, values) for key, part in value.items()} if value else value
    return type(value)(_filled(part, values) for part in value) if type(value) in (tuple, list) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
