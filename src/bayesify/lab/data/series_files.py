"""Time series with gaps from NumPy archives: your own, and the PhysioNet challenge of 2012."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bayesify.lab.data.checks import require_same_length
from bayesify.lab.data.dataset import Source, example_source, no_rows
from bayesify.lab.data.errors import DataError, list_some, require_choice
from bayesify.lab.data.examples import Examples, TensorExamples
from bayesify.lab.data.files import STATIC_KEYS, dataset_folder, existing_path, pick, read_npz, required_path
from bayesify.lab.data.images import unlabelled as no_labels
from bayesify.lab.data.npz import SPLITS, TASKS, Pair, array_names, split_pairs, target_names, target_tensor, task_of
from bayesify.lab.data.series import as_series, learn_series

CHALLENGE = {"train": "a", "validation": "b", "test": "c"}
"""The challenge's sets for training, for ranking entries, and the hidden set for the final score."""
OUTCOMES = ("survived", "died")


def series(
    path: str | Path | None = None,
    *,
    x: str | None = None,
    y: str | None = None,
    static: str | None = None,
    task: str | None = None,
    unlabelled: bool = False,
) -> Source[Examples]:
    """Arrays x (N, time, variables), with NaN for missing values, y, and optionally static (N, variables).

    They have these or similar names, or those given; or x_train, static_train, y_train, x_val, …. `task` and
    `unlabelled` are as in `npz`.
    """
    require_choice("task", task, TASKS)
    file = required_path(path, "series", "an .npz file with arrays x (N, time, variables) and y")
    arrays = read_npz(file)
    pairs = split_pairs(arrays, x, y, unlabelled, file)
    statics = {split: _static(arrays, split, static, file) for split in pairs}
    task = task or task_of(next(iter(pairs.values()))[1])
    parts = {split: _examples(pair, statics[split], task, f"{split} of {file}") for split, pair in pairs.items()}
    return _source(parts, target_names(list(parts.values()), task, unlabelled), next(iter(statics.values())))


def physionet2012(path: str | Path | None = None) -> Source[Examples]:
    """12,000 stays in intensive care: 48 hours of 37 variables, 5 static ones, and whether the patient died there.

    `path` is the file hourly48.npz, or its folder, with a_x, a_static and a_y, b_x, …. Set a is for training, b for
    validation and c for testing, as in the challenge.
    """
    place = dataset_folder(path, "physionet2012")
    file = existing_path(place / "hourly48.npz") if place.is_dir() else place
    arrays = read_npz(file)
    missing = [key for name in CHALLENGE.values() for key in _keys(name) if key not in arrays]
    if missing:
        raise DataError(f"{file} has the arrays {list_some(arrays)}; expected also {list_some(missing)}")
    parts = {}
    for split, name in CHALLENGE.items():
        x, fixed, y = (arrays[key] for key in _keys(name))
        parts[split] = _examples((x, y), fixed, "classification", f"set {name} of {file}")
    return _source(parts, OUTCOMES, arrays[_keys(CHALLENGE["train"])[1]])


def _keys(name: str) -> tuple[str, str, str]:
    return f"{name}_x", f"{name}_static", f"{name}_y"


def _static(arrays: Mapping[str, np.ndarray], split: str, given: str | None, file: Path) -> np.ndarray | None:
    """The static variables of a split, if there are any."""
    usual = (*STATIC_KEYS, *array_names(STATIC_KEYS, SPLITS[split]))
    if given is None and not any(key in arrays for key in usual):
        return None
    return arrays[pick(arrays, given, usual, f"static variables of the {split} split", file)]


def _examples(pair: Pair, static: np.ndarray | None, task: str, what: str) -> TensorExamples:
    array, targets = pair
    x = as_series(array, static, what)
    if not len(x):
        raise DataError(f"{what} has no rows")
    y = no_labels(len(x)) if targets is None else target_tensor(targets, task, f"targets of {what}")
    require_same_length(x, y, what)
    return TensorExamples(x, y)


def _source(parts: Mapping[str, Examples], names: Sequence[str], static: np.ndarray | None) -> Source[Examples]:
    train = parts["train"] if "train" in parts else no_rows(parts["test"])
    fixed = 0 if static is None else static.shape[1]
    return example_source(
        train, parts.get("validation"), parts.get("test"), names, lambda train: learn_series(train, fixed)
    )
