"""How draws are split into those that are made in one call, and their outputs put together again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

TOGETHER = 1 << 14
"""Outputs wait for those of further draws until they are so many numbers: to count few takes as long."""


def evenly(draws: range, most: int) -> list[range]:
    """As few parts as can be, none larger than that.

    >>> evenly(range(3, 10), 4)
    [range(3, 6), range(6, 10)]
    """
    parts = -(-len(draws) // most)
    return [range(*each) for each in pairwise(draws[0] + len(draws) * part // parts for part in range(parts + 1))]


def joined(stacks: Iterable[Tensor]) -> Iterable[Tensor]:
    """Small stacks as fewer larger ones."""
    waiting: list[Tensor] = []
    for stack in stacks:
        waiting.append(stack)
        if sum(each.numel() for each in waiting) >= TOGETHER:
            yield _cat(waiting)
            waiting = []
    if waiting:
        yield _cat(waiting)


def _cat(stacks: list[Tensor]) -> Tensor:
    return torch.cat(stacks) if len(stacks) > 1 else stacks[0]


def over_again(stacks: Iterable[Tensor], different: int, count: int, *, in_order: bool) -> Iterable[Tensor]:
    """So many draws, of which those in the stacks are the only different ones; out of order none need be kept."""
    first = 0
    for stack in [torch.cat(list(stacks))] if in_order else stacks:
        yield from (stack[: max(count - start, 0)] for start in range(first, count, different))
        first += len(stack)
