"""`Data`, a data set ready for use, and `Source`, what a loader returns before rows are split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from bayesify.lab.data.arrays import Arrays
from bayesify.lab.data.columns import Columns
from bayesify.lab.data.errors import DataError
from bayesify.lab.data.examples import Examples
from bayesify.lab.data.images import Images, learn_images
from bayesify.lab.data.inputs import Inputs
from bayesify.lab.data.series import Series
from bayesify.lab.data.targets import Targets, from_dict


@dataclass(frozen=True)
class Data:
    """A data set: its splits, and what their inputs and targets are.

    Attributes:
        name: The name of the data set or format.
        train: The training rows.
        validation: The validation rows.
        test: The test rows. Any split may be empty.
        inputs: What an input is, and how raw inputs are prepared for the network.
        targets: The names of the classes, or the names and units of real targets.
        calibration: Rows for conformal prediction, by which nothing else is chosen; none unless asked for.
        missing: The number of missing values of each column of a table that has some, over all splits.
    """

    name: str
    train: Examples
    validation: Examples
    test: Examples
    inputs: Inputs
    targets: Targets
    calibration: Examples
    missing: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = ("train", "validation", "test", *(["calibration"] if len(self.calibration) else []))
        sizes = ", ".join(f"{len(getattr(self, split))} {split}" for split in shown)
        inputs, targets = (type(part).__name__.lower() for part in (self.inputs, self.targets))
        return f"{self.name}: {sizes}; {inputs} {self.inputs.shape}, {self.targets.count} {targets}"


class Rows(Protocol):
    """Rows that can be split: `Examples`, or table rows that are encoded after the training split is known."""

    targets: Tensor
    """int64 classes (N,), uint8 labels (N, L) or masks (N, H, W), or reals (N, K) in their own units."""

    def __len__(self) -> int:
        """The number of rows."""

    def take(self, rows: Tensor) -> Any:
        """A selection of rows."""


R = TypeVar("R", bound=Rows)


@dataclass(frozen=True)
class Source(Generic[R]):
    """What a loader read, before rows are split and preprocessing is learnt."""

    train: R
    validation: R | None
    test: R | None
    names: tuple[str, ...]
    """The names of the classes, of the labels, or of the real targets."""
    learn: Callable[[R], Inputs]
    """Learns the preprocessing from the training split."""
    encode: Callable[[Any, R], Examples]
    """Turns rows into examples, given the preprocessing."""


def example_source(
    train: Examples,
    validation: Examples | None,
    test: Examples | None,
    names: Sequence[str],
    learn: Callable[[Examples], Inputs],
) -> Source[Examples]:
    """A source whose rows are already examples, all of one shape."""
    for split, other in (("validation", validation), ("test", test)):
        if other is not None and row_shape(other) != row_shape(train):
            raise DataError(f"{split} inputs have shape {row_shape(other)}, training inputs {row_shape(train)}")
    return Source(train, validation, test, tuple(names), learn, lambda inputs, rows: rows)


def image_source(
    train: Examples | None,
    validation: Examples | None,
    test: Examples | None,
    names: Sequence[str],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Source[Examples]:
    """A source of images; the training split is empty if only test files were found."""
    rows = train if train is not None else test
    assert rows is not None, "a loader returns training or test rows, or raises"
    shape = row_shape(rows)
    train = no_rows(rows) if train is None else train
    return example_source(train, validation, test, names, lambda train: learn_images(train, shape, mean, std))


def row_shape(examples: Examples) -> tuple[int, ...]:
    """The shape of one raw input."""
    return tuple(examples.raw(torch.arange(0)).shape[1:])


def no_rows(rows: R) -> R:
    """An empty selection of rows."""
    none: R = rows.take(torch.arange(0))
    return none


def inputs_from_dict(description: Mapping[str, Any]) -> Inputs:
    """The inputs that `to_dict` has described.

    Args:
        description: What `to_dict` returned.

    Returns:
        The inputs.

    Raises:
        DataError: If it does not describe inputs.

    >>> inputs_from_dict({"kind": "arrays", "shape": [1], "mean": [0.0], "std": [1.0]})
    Arrays(shape=(1,), mean=(0.0,), std=(1.0,))
    """
    kinds = {"images": Images, "arrays": Arrays, "columns": Columns, "series": Series}
    inputs: Inputs = from_dict(kinds, description, "inputs")
    return inputs
