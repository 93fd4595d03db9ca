"""Noise in fewer bits, and whether operations run as they are called."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

MANY = 8192
"""To make fewer numbers takes as long as the operations that save bits."""
MANY_NORMAL, CHUNK, SHARING = 1 << 17, 1 << 18, 256
"""Of normal noise too, how much of it is made at a time, so that the cache holds it, and how many share some bits."""
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


def normal(shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise on the CPU by torch's own generator: many numbers √2 erfinv(v), in 0.6 of `randn`'s time.

    v is uniform on (-1, 1) in steps of 2⁻²³: of 16 bits for each number, and 8 that 256 of them share. So each is as
    normal as `randn`'s, and two are correlated by about 10⁻⁹. Without MKL `erfinv` would take longer than is saved.

    >>> abs(normal((1000, 1000)).var() - 1) < 0.01
    tensor(True)
    """
    size = math.prod(shape)
    observed = torch._C._len_torch_dispatch_stack() > 0  # by a mode, which may not know such operations
    if size < MANY_NORMAL or observed or not torch.backends.mkl.is_available():
        return torch.randn(shape, dtype=torch.float32, device="cpu")
    noise = torch.empty(shape, dtype=torch.float32, device="cpu")
    flat, rest = noise.view(-1).split([size - size % SHARING, size % SHARING])
    bits = torch.empty(CHUNK // 4, dtype=torch.int64, device="cpu")
    for chunk in flat.view(-1, SHARING).split(CHUNK // SHARING):
        shared = torch.empty(len(chunk), 1, dtype=torch.float32, device="cpu").random_(256).mul_(2**-23).add_(2**-24)
        steps = bits[: chunk.numel() // 4].random_(-(2**63), None).view(torch.int16).view(chunk.shape)
        torch.add(shared, steps, alpha=2**-15, out=chunk).erfinv_().mul_(math.sqrt(2))
    rest.normal_()
    return noise


def _parts(values: Tensor, count: int) -> Sequence[Tensor]:
    return (values,) if count == 1 else values.view(count, -1).unbind()


def is_eager() -> bool:
    """Whether operations run as they are called: not compiled, not transformed by torch.func, without tangents."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return not torch.compiler.is_compiling() and not transformed
