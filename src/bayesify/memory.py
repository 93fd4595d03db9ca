"""Memory that serves again: to get fresh pages takes longer than to fill them with numbers."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

LARGEST = 1 << 26
"""Memory of more bytes is given back once it has served."""
COPIES: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""A copy of a model that may serve again, as long as nothing changes the model and it lives."""
_kept = threading.local()


class _Scratch(threading.local):
    """By use and dtype, a thread's memory and the tensor that was last seen in it."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = {}


_scratch = _Scratch()


class Memory:
    """Uninitialised float32 tensors on the CPU, taken in turn; if `reused`, the same ones again after `rewind`.

    >>> memory = Memory()
    >>> first = memory.take((2, 3)).fill_(1)
    >>> memory.rewind()
    >>> memory.take((6,))
    tensor([1., 1., 1., 1., 1., 1.])
    """

    def __init__(self, *, reused: bool = True) -> None:
        self.reused = reused
        self.blocks: list[Tensor] = []
        self.taken = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor whose memory is nobody else's until `rewind`."""
        size = math.prod(shape)
        if not self.reused:
            return torch.empty(shape, dtype=torch.float32, device="cpu")
        if self.taken == len(self.blocks):
            self.blocks.append(torch.empty(0))
        if self.blocks[self.taken].numel() < size:
            self.blocks[self.taken] = torch.empty(size, dtype=torch.float32, device="cpu")
        self.taken += 1
        return self.blocks[self.taken - 1][:size].view(shape)

    def rewind(self) -> None:
        """What was taken is needed no longer."""
        self.taken = 0

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lives in this memory."""
        pointer = tensor.untyped_storage().data_ptr()
        return any(block.untyped_storage().data_ptr() == pointer for block in self.blocks)


@contextmanager
def lent_memory() -> Iterator[Memory]:
    """Memory for as long as the context lasts, which this thread keeps for the next time unless it is large."""
    memory = _kept.__dict__.pop("memory", None) or Memory()
    memory.rewind()
    try:
        yield memory
    finally:
        if sum(4 * block.numel() for block in memory.blocks) <= LARGEST:
            _kept.memory = memory


def scratch(like: Tensor, use: str) -> Tensor:
    """Memory for a tensor on the CPU like another, which this thread's next call for the same use overwrites."""
    memory, last = _scratch.kept.get((use, like.dtype), (None, None))
    if last is not None and last.shape == like.shape:
        return last
    with torch.inference_mode(False):
        if memory is None or memory.numel() < like.numel():
            memory = torch.empty(like.numel(), dtype=like.dtype, device="cpu")
        last = memory[: like.numel()].view(like.shape)
    _scratch.kept[use, like.dtype] = memory, last
    return last


def forget_scratch() -> None:
    """Give back this thread's scratch memory."""
    _scratch.kept.clear()


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from looking for garbage for a while.

    >>> with no_collection():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
