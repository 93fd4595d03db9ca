"""What every data set must keep: finite numbers, labels that are classes, a training example of each class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.errors import DataError, listed


def finite(values: Tensor, what: str) -> None:
    """Refuse NaN and infinity, and say in which rows they are.

    >>> finite(torch.tensor([[1.0], [float("nan")]]), "x")
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: x has NaN or infinity in 1 of 2 rows (rows 1, columns 0); ...
    """
    bad = ~torch.isfinite(values)
    if not bad.any():
        return
    rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    columns = f", columns {listed(bad.any(0).nonzero().flatten().tolist())}" if bad.dim() == 2 else ""
    raise DataError(
        f"{what} has NaN or infinity in {int(rows.sum())} of {len(values)} rows "
        f"(rows {listed(rows.nonzero().flatten().tolist())}{columns}); remove or fill them"
    )


def as_labels(values: np.ndarray, what: str) -> Tensor:
    """Whole numbers >= 0 as int64 labels of shape (N,); one column of them counts too.

    >>> as_labels(np.array([[2.0], [0.0]]), "y")
    tensor([2, 0])
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise DataError(f"{what} has shape {values.shape}; expected one whole number per row, shape (N,)")
    if values.dtype.kind not in "buif":
        raise DataError(f"{what} has labels of type {values.dtype}; expected whole numbers 0, 1, 2, …")
    wrong = ~np.isfinite(values) | (values < 0) | (values != np.floor(values))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{what} has {int(wrong.sum())} labels that aren't whole numbers >= 0, such as {values[row]} in row {row}; "
            "expected 0, 1, 2, … (for real targets say task='regression' where the loader has it)"
        )
    return torch.from_numpy(values.astype(np.int64))


def same_rows(x: Sequence[object] | np.ndarray | Tensor, y: Tensor, what: str) -> None:
    """Refuse inputs and targets of different numbers."""
    if len(x) != len(y):
        raise DataError(f"{what} has {len(x)} inputs and {len(y)} targets; expected as many of one as of the other")


def labels_in_range(labels: Tensor, count: int, what: str) -> None:
    """Refuse labels that no class has.

    >>> labels_in_range(torch.tensor([0, 7]), 3, "the test split")
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: the test split has the labels 7; expected 0 to 2, for there are 3 classes
    """
    outside = labels[(labels < 0) | (labels >= count)].unique().tolist()
    if outside:
        raise DataError(
            f"{what} has the labels {listed(outside)}; expected 0 to {count - 1}, for there are {count} classes"
        )


def every_class_trained(labels: Tensor, names: Sequence[str]) -> None:
    """Refuse classes without a training example: nothing could be learnt about them.

    >>> every_class_trained(torch.tensor([0, 0]), ("cat", "dog"))
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: no training example of 1 of 2 classes: dog; add some, or ...
    """
    seen = torch.bincount(labels, minlength=len(names)) > 0
    empty = [name for name, found in zip(names, seen.tolist(), strict=True) if not found]
    if empty:
        raise DataError(
            f"no training example of {len(empty)} of {len(names)} classes: {listed(empty)}; "
            "add some, or remove these classes from every split (labels are expected to be 0, 1, 2, … without gaps)"
        )
