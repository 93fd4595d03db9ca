"""Noise in fewer bits, and whether operations run as they are called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

MANY = 8192
"""To make fewer numbers takes as long as the operations that save bits."""
HALF = torch.tensor(0.5, dtype=torch.float32, device="cpu")


def coarse(into: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """Fill a tensor on the CPU, a part by each generator, with noise uniform on [0, 1): many in steps of 2⁻¹⁶.

    >>> coarse(torch.empty(2, 3), [torch.Generator().manual_seed(seed) for seed in (0, 0)]).unique().numel()
    3
    """
    size = into.numel() // len(generators)
    if size < MANY:
        for generator, part in zip(generators, _parts(into, len(generators)), strict=True):
            part.uniform_(generator=generator)
        return into
    bits = torch.empty(len(generators), -(-size // 4), dtype=torch.int64, device="cpu")  # four of 64 bits
    for generator, part in zip(generators, _parts(bits, len(generators)), strict=True):
        part.random_(-(2**63), None, generator=generator)
    steps = bits.view(torch.int16) if size % 4 == 0 else bits.view(torch.int16)[:, :size].contiguous()
    return torch.add(HALF, steps.view(into.shape), alpha=2**-16, out=into)  # one operation, where each has its price


def _parts(values: Tensor, count: int) -> Sequence[Tensor]:
    return (values,) if count == 1 else values.view(count, -1).unbind()


def is_eager() -> bool:
    """Whether operations run as they are called: not compiled, not transformed by torch.func, without tangents."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return not torch.compiler.is_compiling() and not transformed
