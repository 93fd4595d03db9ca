"""`Examples`: one split of a data set, raw inputs and targets, fetched in batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bayesify.lab.data.checks import require_same_length
from bayesify.lab.data.errors import DataError
from bayesify.lab.data.image_files import decode, open_image

Batch = tuple[Tensor, Tensor]


class Examples(Dataset[Batch]):
    """A map-style data set of (raw x, y) from which a `DataLoader` fetches whole batches at once."""

    targets: Tensor
    """All targets: int64 classes (N,), uint8 labels (N, L) or masks (N, H, W), or standardised float32 reals (N, K)."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Batch:
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        x, y = self.__getitems__([i % len(self)])
        return x[0], y[0]

    def __getitems__(self, indices: list[int]) -> Batch:
        """The raw inputs and the targets of some rows."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        y = self.targets[rows]
        return self.raw(rows), y.long() if y.dtype == torch.uint8 else y

    @abstractmethod
    def raw(self, rows: Tensor) -> Tensor:
        """The raw inputs of some rows."""

    @abstractmethod
    def take(self, rows: Tensor) -> Examples:
        """A selection of rows as new examples."""

    @abstractmethod
    def with_targets(self, targets: Tensor) -> Examples:
        """The same inputs with other targets."""


class TensorExamples(Examples):
    """Examples in memory; images are uint8 (N, C, H, W).

    >>> examples = TensorExamples(torch.arange(6).view(3, 2), torch.tensor([0, 1, 0]))
    >>> examples[1]
    (tensor([2, 3]), tensor(1))
    >>> examples.take(torch.tensor([2])).__getitems__([0])
    (tensor([[4, 5]]), tensor([0]))
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        require_same_length(x, y, "TensorExamples(x, y)")
        self.x, self.targets = x, y

    def raw(self, rows: Tensor) -> Tensor:
        return self.x[rows]

    def take(self, rows: Tensor) -> TensorExamples:
        return TensorExamples(self.x[rows], self.targets[rows])

    def with_targets(self, targets: Tensor) -> TensorExamples:
        return TensorExamples(self.x, targets)


class FolderExamples(Examples):
    """Image files, decoded on access and resized to `shape` (C, H, W)."""

    def __init__(self, paths: Sequence[Path], y: Tensor, shape: tuple[int, ...]) -> None:
        require_same_length(paths, y, "FolderExamples(paths, y)")
        self.paths, self.targets, self.shape = tuple(paths), y, shape

    def raw(self, rows: Tensor) -> Tensor:
        if not len(rows):
            return torch.empty(0, *self.shape, dtype=torch.uint8)
        return torch.stack([self._image(self.paths[i]) for i in rows.tolist()])

    def take(self, rows: Tensor) -> FolderExamples:
        return FolderExamples([self.paths[i] for i in rows.tolist()], self.targets[rows], self.shape)

    def with_targets(self, targets: Tensor) -> FolderExamples:
        return FolderExamples(self.paths, targets, self.shape)

    def _image(self, path: Path) -> Tensor:
        with open_image(path) as image:
            return decode(image, self.shape, str(path))


class ChainedExamples(Examples):
    """The rows of several examples, one after another.

    >>> a, b = TensorExamples(torch.zeros(2, 1), torch.zeros(2)), TensorExamples(torch.ones(1, 1), torch.ones(1))
    >>> ChainedExamples([a, b]).raw(torch.tensor([2, 0])).flatten()
    tensor([1., 0.])
    """

    def __init__(self, parts: Sequence[Examples]) -> None:
        self.parts = tuple(parts)
        self.targets = torch.cat([part.targets for part in parts])
        self.starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)

    def raw(self, rows: Tensor) -> Tensor:
        owner = torch.bucketize(rows, self.starts[1:], right=True)
        pieces = [part.raw(rows[owner == i] - self.starts[i]) for i, part in enumerate(self.parts)]
        # The pieces are sorted by owner; restore the order of rows.
        return torch.cat(pieces)[owner.argsort(stable=True).argsort()]

    def take(self, rows: Tensor) -> Examples:
        return SomeExamples(self, rows)

    def with_targets(self, targets: Tensor) -> Examples:
        cut = zip(self.parts, targets.split([len(part) for part in self.parts]), strict=True)
        return ChainedExamples([part.with_targets(y) for part, y in cut])


class SomeExamples(Examples):
    """A selection of rows of other examples, as a view."""

    def __init__(self, base: Examples, rows: Tensor) -> None:
        self.base, self.rows, self.targets = base, rows, base.targets[rows]

    def raw(self, rows: Tensor) -> Tensor:
        return self.base.raw(self.rows[rows])

    def take(self, rows: Tensor) -> SomeExamples:
        return SomeExamples(self.base, self.rows[rows])

    def with_targets(self, targets: Tensor) -> Examples:
        all_targets = targets.new_zeros(len(self.base), *targets.shape[1:])
        all_targets[self.rows] = targets
        return SomeExamples(self.base.with_targets(all_targets), self.rows)


def evenly_spread(examples: Examples, most: int) -> Examples:
    """At most this many rows, evenly spread over all of them."""
    if len(examples) <= most:
        return examples
    return examples.take(torch.linspace(0, len(examples) - 1, most).round().long())


def whole(batch: Any) -> Any:
    """The collate function for a `DataLoader` over `Examples`, which return whole batches."""
    return batch


def loader(examples: Examples, batch_size: int = 128, **options: Any) -> DataLoader[Batch]:
    """A `DataLoader` of raw batches.

    Args:
        examples: The rows.
        batch_size: Rows per batch.
        **options: Further options of `DataLoader`, such as `shuffle=True` or `num_workers=4`.

    Returns:
        A loader of pairs (raw inputs, targets).

    >>> examples = TensorExamples(torch.zeros(5, 2), torch.zeros(5))
    >>> [len(y) for x, y in loader(examples, batch_size=2)]
    [2, 2, 1]
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise DataError(f"batch_size={batch_size!r}: expected an integer >= 1")
    return DataLoader(examples, batch_size=batch_size, collate_fn=whole, **options)


def blocks(examples: Examples, rows: int = 512) -> Iterator[Tensor]:
    """All raw inputs in order, in blocks of `rows`."""
    for part in torch.arange(len(examples)).split(rows):
        yield examples.raw(part)
