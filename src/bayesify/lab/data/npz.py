"""NumPy archives: images or plain arrays under their usual names, already split or not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.arrays import as_floats, learn_arrays
from bayesify.lab.data.checks import as_labels, require_finite, require_same_length
from bayesify.lab.data.dataset import Source, example_source, image_source, no_rows, row_shape
from bayesify.lab.data.errors import DataError, list_some, require_choice
from bayesify.lab.data.examples import Examples, TensorExamples
from bayesify.lab.data.files import INPUT_KEYS, TARGET_KEYS, pick, read_npz, required_path
from bayesify.lab.data.image_files import as_images
from bayesify.lab.data.images import unlabelled as no_labels

SPLITS = {"train": ("train",), "validation": ("val", "valid", "validation"), "test": ("test",)}

TASKS = (None, "classification", "multilabel", "segmentation", "regression")

DIMENSIONS = {
    "multilabel": (2, "0 or 1 for every label, shape (N, labels)"),
    "segmentation": (3, "the number of a class for every pixel, shape (N, height, width)"),
}
"""How many dimensions the targets of a task have, and what they are."""

Pair = tuple[np.ndarray, np.ndarray | None]


def npz(
    path: str | Path | None = None,
    *,
    x: str | None = None,
    y: str | None = None,
    kind: str | None = None,
    task: str | None = None,
    unlabelled: bool = False,
    standardise: bool = True,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Source[Examples]:
    """Arrays x and y, or x_train, y_train, x_val, …, under these or similar names, or those given.

    uint8 arrays with 3 or 4 dimensions are images, others plain arrays, unless `kind` is given. Integer targets (N,)
    are classes, (N, L) of 0 and 1 several labels and (N, H, W) masks, others real, unless `task` is given. With
    `unlabelled`, all rows become test rows without labels.
    """
    require_choice("kind", kind, (None, "images", "arrays"))
    require_choice("task", task, TASKS)
    file = required_path(path, "npz", "a file with arrays x and y")
    pairs = split_pairs(read_npz(file), x, y, unlabelled, file)
    first = next(iter(pairs.values()))
    if kind is None:
        kind = "images" if first[0].dtype == np.uint8 and first[0].ndim in (3, 4) else "arrays"
    task = task or task_of(first[1])
    parts = {split: _examples(pair, kind, task, f"{split} of {file}") for split, pair in pairs.items()}
    names = target_names(list(parts.values()), task, unlabelled)
    rest = parts.get("validation"), parts.get("test")
    if kind == "images":
        return image_source(parts.get("train"), *rest, names, mean, std)
    if mean is not None or std is not None:
        raise DataError(f"mean={mean}, std={std}: for images only; for plain arrays use standardise=…")
    train = parts["train"] if "train" in parts else no_rows(parts["test"])
    return example_source(train, *rest, names, lambda train: learn_arrays(train, row_shape(train), standardise))


def split_pairs(
    arrays: dict[str, np.ndarray], x: str | None, y: str | None, unlabelled: bool, file: Path
) -> dict[str, Pair]:
    """Inputs and targets of each split that the file has."""
    if unlabelled:
        return {"test": (arrays[pick(arrays, x, INPUT_KEYS, "inputs, as x=…", file)], None)}
    if x is not None or y is not None:
        return {"train": _pair(arrays, x, y, INPUT_KEYS, TARGET_KEYS, file)}
    split = {part: (array_names(INPUT_KEYS, names), array_names(TARGET_KEYS, names)) for part, names in SPLITS.items()}
    found = {part: keys for part, keys in split.items() if any(key in arrays for key in chain(*keys))}
    if not found:
        return {"train": _pair(arrays, x, y, INPUT_KEYS, TARGET_KEYS, file)}
    if "train" not in found:
        raise DataError(
            f"{file} has the arrays {list_some(arrays)}, but none to train on; expected x_train and y_train"
        )
    return {part: _pair(arrays, None, None, *keys, file) for part, keys in found.items()}


def _pair(
    arrays: dict[str, np.ndarray], x: str | None, y: str | None, xs: Sequence[str], ys: Sequence[str], file: Path
) -> Pair:
    inputs = pick(arrays, x, xs, "inputs, as x=…", file)
    return arrays[inputs], arrays[pick(arrays, y, ys, "targets, as y=… (or unlabelled=True if there are none)", file)]


def array_names(keys: Sequence[str], splits: Sequence[str]) -> tuple[str, ...]:
    """The names that an array of a split may have: x_train, train_x.

    >>> array_names(["x"], ["val"])
    ('x_val', 'val_x')
    """
    return tuple(name for key in keys for split in splits for name in (f"{key}_{split}", f"{split}_{key}"))


def _examples(pair: Pair, kind: str, task: str, what: str) -> Examples:
    array, targets = pair
    x = as_images(array, what) if kind == "images" else as_floats(array, what)
    if not len(x):
        raise DataError(f"{what} has no rows")
    y = no_labels(len(x)) if targets is None else target_tensor(targets, task, f"targets of {what}")
    require_same_length(x, y, what)
    return TensorExamples(x, y)


def task_of(targets: np.ndarray | None) -> str:
    """The default task: regression if targets are floats, else by the number of their dimensions."""
    if targets is None or targets.dtype.kind == "f":
        return "classification" if targets is None else "regression"
    if targets.ndim == 2 and targets.shape[1] > 1 and targets.dtype.kind in "bui" and (targets <= 1).all():
        return "multilabel"
    return "segmentation" if targets.ndim == 3 and targets.dtype.kind in "bui" else "classification"


def target_tensor(targets: np.ndarray, task: str, what: str) -> Tensor:
    """Labels (N,), several labels (N, L), masks (N, H, W), or reals (N, K)."""
    if task == "classification":
        return as_labels(targets, what)
    if task in DIMENSIONS:
        return small_labels(targets, task, what)
    if targets.dtype.kind not in "buif" or targets.ndim not in (1, 2):
        raise DataError(f"{what} have type {targets.dtype} and shape {targets.shape}; expected numbers, (N,) or (N, K)")
    y = torch.from_numpy(targets.astype(np.float64)).view(len(targets), -1)
    require_finite(y, what)
    return y


def small_labels(targets: np.ndarray, task: str, what: str) -> Tensor:
    """Several labels (N, L) or masks (N, H, W), as uint8.

    >>> small_labels(np.array([[True, False]]), "multilabel", "y")
    tensor([[1, 0]], dtype=torch.uint8)
    """
    dims, expected = DIMENSIONS[task]
    if targets.dtype.kind not in "buif" or targets.ndim != dims:
        raise DataError(f"{what} have type {targets.dtype} and shape {targets.shape}; expected {expected}")
    most = 1 if task == "multilabel" else 255
    wrong = ~np.isfinite(targets) | (targets < 0) | (targets > most) | (targets != np.floor(targets))
    if wrong.any():
        raise DataError(
            f"{what} have {int(wrong.sum())} values that aren't integers from 0 to {most}, such as "
            f"{targets[wrong][0]}; expected {expected}"
        )
    return torch.from_numpy(targets.astype(np.uint8))


def target_names(parts: Sequence[Examples], task: str, unlabelled: bool) -> list[str]:
    """The names of the classes or of the real targets."""
    if unlabelled:
        return []
    if task == "classification":
        return [str(i) for i in range(max(int(part.targets.max()) for part in parts) + 1)]
    if task == "segmentation":
        return [str(i) for i in range(max(int(part.targets.max()) for part in parts) + 1)]
    columns = parts[0].targets.shape[1]
    return ["y"] if columns == 1 else [f"y{i}" for i in range(columns)]
