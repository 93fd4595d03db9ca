"""Checks that every data set must pass: finite numbers, valid labels, a training example of each class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.errors import DataError, list_some


def require_finite(values: Tensor, what: str) -> None:
    """Raise if there is NaN or infinity, naming the rows.

    >>> require_finite(torch.tensor([[1.0], [float("nan")]]), "x")
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: x has NaN or infinity in 1 of 2 rows (rows 1, columns 0); ...
    """
    bad = ~torch.isfinite(values)
    if not bad.any():
        return
    rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    columns = f", columns {list_some(bad.any(0).nonzero().flatten().tolist())}" if bad.dim() == 2 else ""
    raise DataError(
        f"{what} has NaN or infinity in {int(rows.sum())} of {len(values)} rows "
        f"(rows {list_some(rows.nonzero().flatten().tolist())}{columns}); remove or fill them"
    )


def as_labels(values: np.ndarray, what: str) -> Tensor:
    """Integers >= 0, of shape (N,) or (N, 1), as int64 labels (N,).

    >>> as_labels(np.array([[2.0], [0.0]]), "y")
    tensor([2, 0])
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise DataError(f"{what} has shape {values.shape}; expected one integer per row, shape (N,)")
    if values.dtype.kind not in "buif":
        raise DataError(f"{what} has labels of type {values.dtype}; expected integers 0, 1, 2, …")
    wrong = ~np.isfinite(values) | (values < 0) | (values != np.floor(values))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{what} has {int(wrong.sum())} labels that aren't integers >= 0, such as {values[row]} in row {row}; "
            "expected 0, 1, 2, … (for real targets, use task='regression' if the loader has that option)"
        )
    return torch.from_numpy(values.astype(np.int64))


def require_same_length(x: Sequence[object] | np.ndarray | Tensor, y: Tensor, what: str) -> None:
    """Raise if there are not as many inputs as targets."""
    if len(x) != len(y):
        raise DataError(f"{what} has {len(x)} inputs and {len(y)} targets; expected equally many")


def require_labels_in_range(labels: Tensor, count: int, what: str) -> None:
    """Raise if a label is not the number of a class.

    >>> require_labels_in_range(torch.tensor([0, 7]), 3, "the test split")
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: the test split has the labels 7; expected 0 to 2 for 3 classes
    """
    outside = [label for label in labels.unique().tolist() if not 0 <= label < count]
    if outside:
        raise DataError(f"{what} has the labels {list_some(outside)}; expected 0 to {count - 1} for {count} classes")


def require_every_class(labels: Tensor, names: Sequence[str]) -> None:
    """Raise if a class has no training example.

    >>> require_every_class(torch.tensor([0, 0]), ("cat", "dog"))
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: no training example of 1 of 2 classes: dog; add some, or ...
    """
    seen = torch.bincount(labels, minlength=len(names)) > 0
    empty = [name for name, found in zip(names, seen.tolist(), strict=True) if not found]
    if empty:
        raise DataError(
            f"no training example of {len(empty)} of {len(names)} classes: {list_some(empty)}; "
            "add some, or remove these classes from every split (labels are expected to be 0, 1, 2, … without gaps)"
        )


def require_both_answers(labels: Tensor, names: Sequence[str]) -> None:
    """Raise if a label is the same in all training rows.

    >>> require_both_answers(torch.tensor([[0, 1], [1, 1]]), ("cat", "dog"))
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: 1 of 2 labels is the same in all training rows: dog; ...
    """
    same = (labels.amin(0) == labels.amax(0)).tolist() if len(labels) else []
    constant = [name for name, is_same in zip(names, same, strict=False) if is_same]
    if constant:
        raise DataError(
            f"{len(constant)} of {len(names)} labels {'is' if len(constant) == 1 else 'are'} the same in all training "
            f"rows: {list_some(constant)}; leave {'it' if len(constant) == 1 else 'them'} out, or add other examples"
        )


MOST_NUMBERS = 10**7
"""An input with more numbers than this is a mistake."""


def require_shape(shape: Any, dims: int | None = None) -> None:
    """Raise unless a shape has positive integers, and as many as `dims` if that is given.

    >>> require_shape((3, 0, 32), 3)
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: shape=(3, 0, 32): expected 3 integers >= 1
    """
    right = isinstance(shape, tuple) and shape and all(type(size) is int and size >= 1 for size in shape)
    if not right or (dims is not None and len(shape) != dims):
        count = "a list of" if dims is None else str(dims)
        raise DataError(f"shape={str(shape)[:80]}: expected {count} integers >= 1")
    if math.prod(shape) > MOST_NUMBERS:
        numbers = f"{math.prod(shape):.3g}" if math.prod(shape) < 1e300 else "too many"
        raise DataError(f"shape={str(shape)[:80]}: {numbers} numbers in one input; expected at most {MOST_NUMBERS:,}")


def require_numbers(option: str, values: Any, count: int, *, positive: bool = False) -> None:
    """Raise unless there are as many finite numbers as expected, all positive if that is asked for.

    >>> require_numbers("std", (1.0, 0.0), 2, positive=True)
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: std=[1.0, 0.0]: expected 2 numbers > 0
    """
    right = isinstance(values, tuple) and len(values) == count
    right = right and all(type(each) in (int, float) and math.isfinite(each) for each in values)
    if not right or (positive and values and min(values) <= 0):
        shown = str(list(values) if isinstance(values, tuple) else values)[:80]
        raise DataError(f"{option}={shown}: expected {count} numbers{' > 0' if positive else ''}")


def require_words(option: str, values: Any, *, distinct: bool = False) -> None:
    """Raise unless the values are a list of words, no word twice if that is asked for.

    >>> require_words("names", ("cat", 3))
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: names=('cat', 3): expected a list of words
    """
    if not isinstance(values, (tuple, list)) or not all(isinstance(each, str) for each in values):
        raise DataError(f"{option}={str(values)[:80]}: expected a list of words")
    if distinct and len(set(values)) < len(values):
        twice = next(each for each in values if values.count(each) > 1)
        raise DataError(f"{option}={str(values)[:80]}: expected different words; {twice[:80]!r} occurs twice")
