"""Random numbers for a batch in which rows don't depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Draws:
    """A generator for each row: its numbers are the same in any batch, at any position and on any device.

    >>> alone, together = Draws([7]), Draws([3, 7])
    >>> bool((alone.normal(2, 2)[0] == together.normal(2, 2)[1]).all())
    True

    The numbers are drawn on the CPU, row by row, which takes about a microsecond per hundred numbers.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = torch.device(device)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers (rows, *shape)."""
        return self._rows(lambda generator: torch.randn(shape, generator=generator, device="cpu"))

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Numbers from `low` to `high` (rows, *shape)."""
        return low + (high - low) * self._rows(lambda generator: torch.rand(shape, generator=generator, device="cpu"))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` to `high` - 1 (rows, *shape)."""
        return self._rows(lambda generator: torch.randint(low, high, shape, generator=generator, device="cpu"))

    def poisson(self, rate: Tensor) -> Tensor:
        """Poisson numbers with the given rates (rows, …)."""
        pairs = zip(rate.cpu(), self.generators, strict=True)
        numbers = [torch.poisson(row, generator=generator) for row, generator in pairs]
        return torch.stack(numbers).to(self.device) if numbers else rate

    def _rows(self, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        # Without rows, one is drawn for the shape.
        rows = [draw(generator) for generator in self.generators] or [draw(torch.Generator())]
        return torch.stack(rows)[: len(self.generators)].to(self.device)


Randomness = torch.Generator | Draws
"""A generator, from which every row gets a seed, or one generator per row."""


def draws_for(x: Tensor, random: Randomness) -> Draws:
    """Random numbers for the rows of a batch; those of the first rows don't depend on how many follow.

    >>> few, many = (draws_for(torch.zeros(n, 1), torch.Generator().manual_seed(0)) for n in (1, 3))
    >>> bool((few.normal()[0] == many.normal()[0]).all())
    True
    """
    if isinstance(random, Draws):
        return random
    # One call per row: a vectorised call may use the generator differently. CPU generators use 32 bits of a seed.
    seeds = [int(torch.randint(2**32, (), generator=random, device=random.device)) for _ in range(len(x))]
    return Draws(seeds, x.device)
