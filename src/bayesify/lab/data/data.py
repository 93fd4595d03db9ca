"""A data set ready for use, and what a loader hands over for it to be made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """Three splits, any of which may be empty, with what their inputs and targets are."""

    name: str
    train: Examples
    validation: Examples
    test: Examples
    inputs: Inputs
    targets: Targets

    def __str__(self) -> str:
        sizes = ", ".join(f"{len(getattr(self, split))} {split}" for split in ("train", "validation", "test"))
        inputs, targets = (type(part).__name__.lower() for part in (self.inputs, self.targets))
        return f"{self.name}: {sizes}; {inputs} {self.inputs.shape}, {self.targets.count} {targets}"


class Rows(Protocol):
    """Rows that can be split: `Examples`, or what becomes them once something has been learnt on the training split."""

    targets: Tensor
    """int64 classes (N,) or reals (N, K) in their own units."""

    def __len__(self) -> int:
        """How many."""

    def take(self, rows: Tensor) -> Any:
        """Some of them."""


R = TypeVar("R", bound=Rows)


@dataclass(frozen=True)
class Source(Generic[R]):
    """What a loader found in files, before rows are split off and anything is learnt."""

    train: R
    validation: R | None
    test: R | None
    names: tuple[str, ...]
    """Of the classes, or of the real targets."""
    learn: Callable[[R], Inputs]
    """What the inputs are, from the training split alone."""
    encode: Callable[[Any, R], Examples]
    """Rows as examples, given the inputs."""


def example_source(
    train: Examples,
    validation: Examples | None,
    test: Examples | None,
    names: Sequence[str],
    learn: Callable[[Examples], Inputs],
) -> Source[Examples]:
    """A source whose rows are examples already, all of one shape."""
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
    """A source of images; without a training part, as with sets that are used for testing alone, that is empty."""
    rows = train if train is not None else test
    assert rows is not None, "a loader finds training rows, test rows or an error"
    shape = row_shape(rows)
    train = nothing(rows) if train is None else train
    return example_source(train, validation, test, names, lambda train: learn_images(train, shape, mean, std))


def row_shape(examples: Examples) -> tuple[int, ...]:
    """The shape of one raw input."""
    return tuple(examples.raw(torch.arange(0)).shape[1:])


def nothing(rows: R) -> R:
    """No rows, of the same kind as others."""
    none: R = rows.take(torch.arange(0))
    return none


def inputs_from_dict(description: Mapping[str, Any]) -> Inputs:
    """The inputs that `to_dict` described.

    >>> inputs_from_dict({"kind": "arrays", "shape": [1], "mean": [0.0], "std": [1.0]})
    Arrays(shape=(1,), mean=(0.0,), std=(1.0,))
    """
    kinds = {"images": Images, "arrays": Arrays, "columns": Columns, "series": Series}
    made: Inputs = from_dict(kinds, description, "inputs")
    return made
