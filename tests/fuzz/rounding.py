"""How much a network amplifies rounding: the one tolerance of all oracles.

Two ways to compute the same numbers differ by rounding errors, and a network may amplify them: a norm over three nearly
equal features 400 times. So a comparison has no fixed tolerance. Where numbers differ by more than a few units in the
last place, the expected ones are computed again a few times, with each operand of each operation moved at random by
about such a unit (Monte Carlo arithmetic, Parker 1997), and what is compared may differ by a multiple of the largest
move. The difference that rounding really makes is hardly ever larger than one such move, and mostly less than a tenth
of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

TIMES = 4
"""How often numbers are computed again."""
MULTIPLE = 4
"""Numbers may differ by so many times the largest move."""
FLOOR = 4
"""Numbers may always differ by so many units in the last place of the largest."""
TINY = torch.finfo(torch.float32).tiny
"""And by the smallest number that has all its digits."""


class Expected:
    """The numbers that something else must compute, too, but for rounding.

    Args:
        compute: Computes them, with plain operations of torch, and afresh: without results of a call before.
        unit: The relative rounding error of what is compared: of the factors where they are less precise than the
            network.
    """

    def __init__(self, compute: Callable[[], Tensor], unit: float) -> None:
        self.compute, self.unit = compute, unit

    def then(self, function: Callable[[Tensor], Tensor]) -> Expected:
        """What a function computes from these numbers."""
        after = Expected(lambda: function(self.compute()), self.unit)
        after.output = function(self.output)
        return after

    @cached_property
    def output(self) -> Tensor:
        """The numbers as they are computed."""
        return self.compute().detach()

    @cached_property
    def value(self) -> Tensor:
        """The numbers in double precision."""
        return self.output.double()

    @cached_property
    def moved(self) -> float:
        """The largest move of a number by changes of operands in the last place."""
        moved = 0.0
        for seed in range(TIMES):
            with Rounded(self.unit, seed):
                found = self.compute().detach()
            moved = max(moved, largest(found.double() - self.value))
        return moved


class Rounded(TorchDispatchMode):
    """Moves operands of torch's operations, such as inputs, weights and results of others, by about a unit."""

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self.unit, self.generator = unit, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(argument.alias_info for argument in func._schema.arguments):  # else it writes, or returns a view
            args, kwargs = tree_map_only(Tensor, self._moved, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _moved(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        noise = torch.randn(x.shape, generator=self.generator)
        return (x.double() * (1 + self.unit * noise)).to(x.dtype)


def is_rounding(difference: float, expected: Expected) -> bool:
    """Whether rounding explains a difference."""
    floor = FLOOR * expected.unit * largest(expected.value) + TINY
    return difference <= floor or difference <= MULTIPLE * expected.moved


def largest(x: Tensor) -> float:
    """The largest absolute value."""
    return float(x.abs().max()) if x.numel() else 0.0
