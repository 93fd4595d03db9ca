"""`Inputs`: what the inputs of a data set are, and how raw batches are prepared for a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.lab.data.errors import DataError
from bayesify.lab.data.examples import ChainedExamples, Examples
from bayesify.lab.data.files import existing_path

NamedExamples = tuple[Examples, list[str]]
"""Examples, and a name for each row."""


class Inputs(ABC):
    """How raw batches are prepared for the network, with statistics of the training split only."""

    shape: tuple[int, ...]
    """The shape of one network input."""

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """The shape of one raw input, before it is prepared."""
        return self.shape

    @abstractmethod
    def prepare(self, x: Tensor) -> Tensor:
        """A raw batch as float32 network inputs, on its device."""

    @abstractmethod
    def read_one(self, path: Path) -> NamedExamples:
        """The unlabelled inputs in one existing file or folder."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """A description for JSON, which `inputs_from_dict` reads."""

    def read(self, paths: Sequence[str | Path]) -> NamedExamples:
        """Read new, unlabelled inputs from files and folders.

        Args:
            paths: Files and folders of the kind that the model was trained on.

        Returns:
            The examples, whose targets are -1 for images and NaN for others, and a name for each row, such as
            "cat.png" or "table.csv:17", counted from 0.

        Raises:
            DataError: If a path does not exist, or its inputs don't fit.
        """
        if isinstance(paths, (str, Path)):
            raise DataError(f"read({str(paths)!r}): expected a list of paths")
        parts = [self.read_one(existing_path(path)) for path in paths]
        if not parts:
            raise DataError("read([]): nothing to read; give at least one file or folder")
        names = [name for _, some in parts for name in some]
        return (parts[0][0] if len(parts) == 1 else ChainedExamples([part for part, _ in parts])), names


def row_names(path: Path, rows: int) -> list[str]:
    """A name for each row of a file.

    >>> row_names(Path("somewhere/table.csv"), 2)
    ['table.csv:0', 'table.csv:1']
    """
    return [f"{path.name}:{row}" for row in range(rows)]


def moments(parts: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the standard deviation of each column over blocks of rows (Chan, Golub and LeVeque 1983, eq. 1.5).

    Constant columns get the standard deviation 1.

    >>> moments([torch.tensor([[1.0, 5.0], [2.0, 5.0]]), torch.tensor([[3.0, 5.0]])])
    ((2.0, 5.0), (0.816..., 1.0))
    """
    count, mean, squares = 0, torch.zeros(()).double(), torch.zeros(()).double()
    for part in parts:
        values = part.double()
        own = values.mean(0)
        total = count + len(values)
        squares = squares + (values - own).square().sum(0) + (own - mean).square() * (count * len(values) / total)
        mean = mean + (own - mean) * (len(values) / total)
        count = total
    std = (squares / max(count, 1)).sqrt()
    # The standard deviation of a constant may be a rounding error.
    return tuple(mean.tolist()), tuple(torch.where(std > 1e-9 * mean.abs(), std, 1.0).tolist())
