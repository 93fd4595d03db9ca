"""Checks that every data set must pass: finite numbers, valid labels, a training example of each class."""

from __future__ import annotations

from collections.abc import Sequence

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
    outside = labels[(labels < 0) | (labels >= count)].unique().tolist()
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
