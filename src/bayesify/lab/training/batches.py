"""Which rows are in which batch: a function of the seed, the epoch and the rank, so that a run resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Sampler

from bayesify.lab.data import Examples, whole
from bayesify.lab.data.examples import Batch


class ShuffledBatches(Sampler[list[int]]):
    """Batches of all rows in a new order each epoch; of each batch, rank r of w takes the rows r, r + w, ….

    `batch_size` is that of all ranks together, so a recipe means the same on any number of devices. `start` is the
    number of batches since the first epoch that are done already. A last batch with fewer than two rows for each rank
    is left out where there are others: batch norms can't normalise one row. All ranks have as many rows, so the mean of
    their gradients is that of the batch: a last batch loses the rows that can't be shared out.

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
        """Itself: where Lightning looks for the one to tell the epoch to."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Lightning says which epoch begins."""
        self.epoch = epoch

    def __len__(self) -> int:
        whole_batches, rest = divmod(self.rows, self.batch_size)
        return whole_batches + (rest >= 2 * self.world or not whole_batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(mixed(self.seed, self.epoch)))
        done = max(self.start - self.epoch * len(self), 0)
        for batch in order.split(self.batch_size)[done : len(self)]:
            shared = batch[: len(batch) // self.world * self.world]
            yield shared[self.rank :: self.world].tolist()


def training_loader(examples: Examples, batches: ShuffledBatches, workers: int = 0) -> DataLoader[Batch]:
    """Raw batches of the training rows."""
    return DataLoader(
        examples,
        batch_sampler=batches,
        collate_fn=whole,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
    )


def mixed(*numbers: int) -> int:
    """One seed of several numbers, different where any of them is."""
    value = 0
    for number in numbers:
        value = (value * 6364136223846793005 + number * 1442695040888963407 + 1013904223) % 2**63
        value ^= value >> 29
    return value % 2**32
