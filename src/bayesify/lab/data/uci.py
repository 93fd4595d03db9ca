"""The UCI regression sets in the format of Hernández-Lobato and Gal, with their fixed splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bayesify.lab.data.dataset import Source
from bayesify.lab.data.errors import DataError, list_some
from bayesify.lab.data.files import dataset_folder, existing_path
from bayesify.lab.data.frame import Frame
from bayesify.lab.data.table import TableRows, frame_source, target_values, without


def uci(path: str | Path | None = None, *, split: int = 0) -> Source[TableRows]:
    """One folder with data.txt, index_features.txt, index_target.txt, index_train_0.txt, index_test_0.txt, …

    `path` is that folder, its parent, or the name of a set in the folder `uci` of the data root. Columns are named x0,
    x1, … in the order of data.txt.
    """
    folder = _folder(path)
    rows = _numbers(folder / "data.txt")
    features, target = (_indices(folder / f"index_{what}.txt", rows.shape[1]) for what in ("features", "target"))
    _check_split(folder, split)
    train, test = (_indices(folder / f"index_{part}_{split}.txt", len(rows)) for part in ("train", "test"))
    shared = np.intersect1d(train, test)
    if len(shared):
        raise DataError(
            f"split {split} of {folder} has {len(shared)} rows in both training and test, such as {shared[0]}"
        )
    frame = Frame(str(folder / "data.txt"), {f"x{i}": rows[:, i] for i in (*features, *target)})
    _check_finite(frame)
    parts = {part: frame.take(torch.from_numpy(index)) for part, index in (("train", train), ("test", test))}
    columns = [f"x{i}" for i in target]
    targets, names = target_values(parts, columns, "regression")
    return frame_source({part: without(some, columns) for part, some in parts.items()}, targets, names, (), {})


def training_rows(path: str | Path, split: int = 0) -> int:
    """The number of training rows of a split, without reading the data.

    Args:
        path: As for `uci`.
        split: The number of the split.

    Returns:
        The number of rows.
    """
    folder = _folder(path)
    _check_split(folder, split)
    return (folder / f"index_train_{split}.txt").read_text().count("\n")


def _folder(path: str | Path | None) -> Path:
    if path is None:
        raise DataError("the data set 'uci' needs path=…: the folder of one set, or its name in the data root's uci")
    given = Path(path).expanduser()
    bare = given.name == str(given) and not given.exists()
    found = _in_root(given.name) if bare else existing_path(given)
    return found if (found / "data.txt").exists() or not (found / "data").is_dir() else found / "data"


def _in_root(name: str) -> Path:
    try:
        return existing_path(dataset_folder(None, "uci", remote=True) / name)
    except DataError as error:
        raise DataError(f"path={name!r} isn't here, and {error}") from None


def _check_split(folder: Path, split: int) -> None:
    count = len(list(folder.glob("index_train_*.txt")))
    if not isinstance(split, int) or not 0 <= split < count:
        raise DataError(f"split={split!r}: {folder} has {count} splits, 0 to {count - 1}")


def _check_finite(frame: Frame) -> None:
    """Raise for NaN and infinity, before rows are split, so that the message has the rows of the file."""
    for name in frame.columns:
        bad = np.flatnonzero(~np.isfinite(frame[name]))
        if len(bad):
            raise DataError(
                f"{frame.name} has NaN or infinity in {len(bad)} rows of {name} (rows {list_some(bad)}); remove them"
            )


def _numbers(path: Path) -> np.ndarray:
    """The numbers in a text file, always two-dimensional."""
    try:
        return np.loadtxt(existing_path(path), ndmin=2)
    except ValueError as error:
        raise DataError(f"{path} can't be read as rows of numbers ({error}); download it again") from error


def _indices(path: Path, count: int) -> np.ndarray:
    """The integers in a text file, each below `count`."""
    values = _numbers(path).ravel()
    wrong = values[(values % 1 != 0) | (values < 0) | (values >= count)]
    if len(wrong) or not len(values):
        found = f"has {wrong[0]:g}" if len(wrong) else "is empty"
        raise DataError(f"{path} {found}; expected integers from 0 to {count - 1}")
    return values.astype(np.int64)
