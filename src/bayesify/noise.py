"""Noise in fewer bits, and whether operations run as they are called."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def coarse(shape: tuple[int, ...], *, generator: torch.Generator | None = None, **place: Any) -> Tensor:
    """As `torch.rand`, in steps of 2⁻¹⁶: four of a generator's 64 bits."""
    if place.get("device", torch.device("cpu")).type != "cpu" or not is_eager():
        return torch.rand(shape, generator=generator, **place)
    size = math.prod(shape)
    bits = torch.empty(-(-size // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=generator)
    steps = bits.view(torch.int16)[:size].view(shape)
    values = place["out"].copy_(steps) if "out" in place else steps.to(torch.float32)
    result: Tensor = values.add_(2**15).mul_(2**-16)
    return result


def is_eager() -> bool:
    """Whether operations run as they are called: not compiled, not transformed by torch.func, without tangents."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return not torch.compiler.is_compiling() and not transformed
