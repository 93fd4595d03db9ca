"""Split rows: deterministic, disjoint, and with every class in proportion."""

from __future__ import annotations

import zlib
from numbers import Integral

import torch
from torch import Tensor

from bayesify.lab.data.errors import DataError


def number_of_rows(option: str, value: float | int, rows: int) -> int:
    """The number of rows that a fraction or a number stands for.

    >>> number_of_rows("validation", 0.1, 50), number_of_rows("validation", 7, 50)
    (5, 7)
    """
    is_count = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_count and not (isinstance(value, float) and 0 <= value < 1):
        raise DataError(f"{option}={value!r}: expected a fraction from 0 to below 1, or a number of rows")
    if is_count and not 0 <= value <= rows:
        raise DataError(f"{option}={value}: expected 0 to {rows}, the number of rows")
    return int(value) if is_count else round(value * rows)


def divide(targets: Tensor, count: int, seed: int, option: str) -> tuple[Tensor, Tensor]:
    """Split off `count` rows: the rows kept and the rows split off, both in order; at least one of each class is kept.

    Classes (int64 targets) are split off in proportion to their sizes, of other targets any rows. The selection depends
    on the seed and the name of the option, so that different options select independently.

    >>> kept, split_off = divide(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), 2, seed=0, option="validation")
    >>> len(kept), split_off.ge(4).tolist()
    (6, [False, True])
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{option} {seed}".encode()))
    order = torch.randperm(len(targets), generator=generator)
    is_off = torch.zeros(len(targets), dtype=torch.bool)
    if targets.is_floating_point() or targets.dim() > 1:
        if count >= len(targets):
            raise DataError(f"{option} would leave none of the {len(targets)} rows for training; change {option}=…")
        is_off[order[:count]] = True
    else:
        labels = targets[order]
        quota = torch.tensor(shares(torch.bincount(labels).tolist(), count, option))
        by_class = labels.argsort(stable=True)
        sizes = torch.bincount(labels)
        starts = sizes.cumsum(0) - sizes
        place = torch.arange(len(labels)) - starts[labels[by_class]]
        is_off[order[by_class[place < quota[labels[by_class]]]]] = True
    return (~is_off).nonzero().flatten(), is_off.nonzero().flatten()


def shares(sizes: list[int], count: int, option: str) -> list[int]:
    """How many rows of each class to take for `count` in total, in proportion, leaving at least one of each.

    >>> shares([10, 6, 1], 5, "validation")
    [3, 2, 0]
    """
    room = [max(size - 1, 0) for size in sizes]
    if count > sum(room):
        classes = sum(size > 0 for size in sizes)
        raise DataError(
            f"{option} would leave {sum(sizes) - count} training rows, fewer than the {classes} classes; "
            f"change {option}=…"
        )
    exact = [size * count / max(sum(sizes), 1) for size in sizes]
    share = [min(int(part), most) for part, most in zip(exact, room, strict=True)]
    while sum(share) < count:  # by the largest remainder, in rounds, because a class may have no room left
        open_classes = [i for i in range(len(sizes)) if share[i] < room[i]]
        by_remainder = sorted(open_classes, key=lambda i: share[i] - exact[i])
        for i in by_remainder[: count - sum(share)]:
            share[i] += 1
    return share
