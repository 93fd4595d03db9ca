"""The first part of a network, which is the same for all draws, computed once for a batch.

Every draw calls the same torch functions with the same arguments, in the same order, up to the first call that gets a
drawn tensor. The first draw records these calls. In the next ones, each call that equals the recorded one returns what
was recorded, and nothing is computed. All Python code of the network runs in every draw, hooks included, so a network
that does something else after all is found out, and the draw is computed without the recording.

50 draws of a ResNet-18 whose last block is Bayesian take as long as 7.9 forward passes of the network, in place of more
than 50 (benchmarks/results/last_blocks.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import get_device_states

from bayesify.layers.network_state import ATOMS

PLAIN = (*ATOMS, torch.layout, torch.memory_format, type(...))
"""Values that can't change, besides tensors; everything else in a call, such as a generator, ends the first part."""
METADATA = (Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__)  # type: ignore[attr-defined]
"""What may be asked about a drawn tensor: it is the same for all draws."""
UNSEEN = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
"""Ways to change a tensor that its version does not tell."""
OVER, DIFFERS = -1, -2
"""Instead of a place in the recording: the first part is over, the draw differs from the recorded one."""


class _Slot(int):
    """The number of a tensor in a recording."""


class _Freed(Tensor):
    """In place of a result that nothing used any more where the first part ended; a draw that does use it differs."""


class _Unknown(Exception):
    """A value that a recording can't hold, or a call that is not the recorded one."""


class FirstPart(TorchFunctionMode):
    """Records the calls of the first part in the first draw of a batch, and returns their results in later ones."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.parameters = list(network.parameters())
        self.calls: list[tuple[Any, Any]] = []
        """Each call and its result, with a slot for each tensor."""
        self.held: list[Any] = []
        """The tensor of each slot: while recording a weak reference, if a call of the first part made it."""
        self.slots: dict[int, _Slot] = {}
        self.states: dict[int, tuple[int, bool]] = {}
        """The states of the tensors that come from outside, then of all that are in use when the first part ends."""
        self.is_recorded = self.is_useless = False
        self.drawn: set[int] = set()
        self.place = 0
        """How many calls of the first part the current draw has made, or `OVER` or `DIFFERS`."""

    def run(self, call: Callable[[], Tensor], drawn: Iterable[Tensor]) -> Tensor:
        """The output of a draw, of which these are the drawn tensors."""
        if not self.is_useless:
            self.drawn, self.place = {id(tensor) for tensor in drawn}, 0
            is_first, self.random_states = not self.is_recorded, [] if self.is_recorded else self._random_states()
            try:
                with self:
                    output = call()
                changed = any(_state(self.held[slot]) != state for slot, state in self.states.items())
                self.is_useless = self.is_useless or changed  # a result of the first part, in place
                if self.place == OVER and (is_first or not changed):
                    return output
            except Exception:  # a draw that differs from the recorded one; an error of the network is raised below
                pass
            self.is_useless = True
        self.calls, self.held, self.slots, self.states = [], [], {}, {}
        return call()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or return its recorded result."""
        kwargs = kwargs or {}
        if func in METADATA and id(args[0]) in self.drawn:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and kwargs.get("key_padding_mask") is not None:
            self.is_recorded, self.place = True, DIFFERS  # without a mode, torch's fast path gives other outputs
        if self.place == OVER and _Freed not in types:
            return self._watched(func, func(*args, **kwargs))
        if self.is_recorded:
            return self._recorded_result(func, args, kwargs)
        try:
            call = func, self._key(args), self._key(kwargs)
        except _Unknown:
            self._end()
            return self._watched(func, func(*args, **kwargs))
        result = self._watched(func, func(*args, **kwargs))
        try:
            self.calls.append((call, self._key(result, is_result=True)))
        except _Unknown:
            self.is_useless = True
        if self.is_useless:
            self.place = OVER
        return result

    def _recorded_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        place, self.place = self.place, DIFFERS
        if place < 0 or (func, self._key(args), self._key(kwargs)) != self.calls[place][0]:
            raise _Unknown  # even if the network goes on after this error, `run` sees it
        self.place = place + 1 if place + 1 < len(self.calls) else OVER
        return self._value(self.calls[place][1])

    def _watched(self, func: Any, result: Any) -> Any:
        """A result of a call; if it is another kind of access to a tensor's memory, changes would not be seen."""
        if func in UNSEEN or not _is_plain(result):
            self.is_useless = True
        return result

    def _end(self) -> None:
        """Keep what is in use when the first part ends, and a tensor without numbers in place of each other result."""
        self.place = OVER
        held: list[Any] = [each() if isinstance(each, weakref.ref) else each for each in self.held]
        changed = any(_state(held[slot]) != state for slot, state in self.states.items())
        is_random = not all(map(torch.equal, self.random_states, self._random_states()))
        # A result that requires a gradient would collect those of all draws.
        collects = any(
            each is not None and each.requires_grad and slot not in self.states for slot, each in enumerate(held)
        )
        self.is_useless = self.is_useless or changed or is_random or collects or not self.calls
        self.is_recorded = True
        self.states = {slot: _state(each) for slot, each in enumerate(held) if each is not None}
        self.held = [torch.empty(0).as_subclass(_Freed) if each is None else each for each in held]
        self.slots = {id(each): _Slot(slot) for slot, each in enumerate(self.held)}

    def _random_states(self) -> list[Tensor]:
        """The states of the random generators that the network may use."""
        return [torch.get_rng_state(), *get_device_states(*self.parameters)[1]]

    # Values with slots for tensors.

    def _key(self, value: Any, is_result: bool = False) -> Any:
        """A value with a slot in place of each tensor, equal for equal calls."""
        if isinstance(value, Tensor):
            return self._slot(value, is_result)
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, slice):
            return slice, [self._key(part) for part in (value.start, value.stop, value.step)]
        if isinstance(value, (tuple, list)):
            return type(value), [self._key(part, is_result) for part in value]
        if isinstance(value, dict):
            return dict, [(key, self._key(part, is_result)) for key, part in value.items()]
        raise _Unknown

    def _slot(self, tensor: Tensor, is_result: bool) -> _Slot:
        slot = self.slots.get(id(tensor))
        if slot is not None:
            held = self.held[slot]
            if (held() if isinstance(held, weakref.ref) else held) is tensor:
                return slot
        if self.is_recorded or id(tensor) in self.drawn or tensor.is_inference():
            raise _Unknown
        slot = self.slots[id(tensor)] = _Slot(len(self.held))
        self.held.append(weakref.ref(tensor) if is_result else tensor)
        if not is_result:
            self.states[slot] = _state(tensor)
        return slot

    def _value(self, key: Any) -> Any:
        if isinstance(key, _Slot):
            return self.held[key]
        kind, value = key
        if issubclass(kind, dict):
            return {name: self._value(part) for name, part in value}
        if issubclass(kind, (tuple, list)) and not issubclass(kind, PLAIN):
            parts = [self._value(part) for part in value]
            return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
        return value


def _state(tensor: Tensor) -> tuple[int, bool]:
    """What is different once something has changed a tensor."""
    return tensor._version, tensor.requires_grad


def _is_plain(value: Any) -> bool:
    """Whether a result consists of tensors and values that can't change."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (Tensor, *PLAIN))
