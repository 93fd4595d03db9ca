"""Which rows are in which batch: a function of seed, epoch and rank, so that a run resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Sampler

from bayesify.lab.data import Examples, whole
from bayesify.lab.data.examples import Batch


class ShuffledBatches(Sampler[list[int]]):
    """Batches of all rows, reshuffled each epoch; rank r of w takes the rows r, r + w, … of each batch.

    `batch_size` is that of all ranks together, so that a recipe means the same on any number of devices. `start` is the
    number of batches since the first epoch that are already done. A last batch with fewer than two rows per rank is
    dropped if there are others, because batch norm can't normalise a single row. All ranks get equally many rows, so
    that the mean of their gradients is that of the batch; a last batch loses the rows that can't be divided evenly.

    >>> batches = ShuffledBatches(5, 2, seed=0)
    >>> sorted(row for batch in batches for row in batch) == sorted({row for batch in batches for row in batch})
    True
    """

    def __init__(self, rows: int, batch_size: int, *, seed: int, rank: int = 0, world: int = 1, start: int = 0) -> None:
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.world, self.start = rank, world, start
        self.epoch = 0

    @property
    def sampler(self) -> ShuffledBatches:
        """Itself: Lightning calls `set_epoch` on it."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning when an epoch begins."""
        self.epoch = epoch

    def __len__(self) -> int:
        full_batches, rest = divmod(self.rows, self.batch_size)
        return full_batches + (rest >= 2 * self.world or not full_batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(mix_seeds(self.seed, self.epoch)))
        done = max(self.start - self.epoch * len(self), 0)
        for batch in order.split(self.batch_size)[done : len(self)]:
            shared = batch[: len(batch) // self.world * self.world]
            yield shared[self.rank :: self.world].tolist()


def training_loader(examples: Examples, batches: ShuffledBatches, workers: int = 0) -> DataLoader[Batch]:
    """A loader of raw training batches."""
    return DataLoader(
        examples,
        batch_sampler=batches,
        collate_fn=whole,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
    )


def mix_seeds(*numbers: int) -> int:
    """One seed from several numbers, different if any of them is."""
    value = 0
    for number in numbers:
        value = (value * 6364136223846793005 + number * 1442695040888963407 + 1013904223) % 2**63
        value ^= value >> 29
    return value % 2**32
