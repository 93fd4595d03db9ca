"""CIFAR-10 and CIFAR-100 from their original pickles, whose values are read without Python's `pickle`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.checks import as_labels, require_same_length
from bayesify.lab.data.dataset import Source, image_source
from bayesify.lab.data.errors import DataError, list_some, require_choice
from bayesify.lab.data.examples import Examples, TensorExamples
from bayesify.lab.data.files import dataset_folder
from bayesify.lab.data.plain_pickle import read_plain_pickle

SHAPE = (3, 32, 32)


def cifar10(
    path: str | Path | None = None, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Source[Examples]:
    """The folder cifar-10-batches-py: data_batch_1 to 5, test_batch and batches.meta."""
    folder = _folder(path, "cifar-10-batches-py")
    train = _part(folder, [f"data_batch_{i}" for i in range(1, 6)], "labels")
    test = _part(folder, ["test_batch"], "labels")
    return _source(folder, train, test, _names(folder / "batches.meta", "label_names", 10), mean, std)


def cifar100(
    path: str | Path | None = None,
    *,
    labels: str = "fine",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Source[Examples]:
    """The folder cifar-100-python: train, test and meta; labels are the 100 "fine" or the 20 "coarse" ones."""
    require_choice("labels", labels, ("fine", "coarse"))
    folder = _folder(path, "cifar-100-python")
    train, test = (_part(folder, [file], f"{labels}_labels") for file in ("train", "test"))
    names = _names(folder / "meta", f"{labels}_label_names", 100 if labels == "fine" else 20)
    return _source(folder, train, test, names, mean, std)


def _source(
    folder: Path,
    train: Examples | None,
    test: Examples | None,
    names: Sequence[str],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Source[Examples]:
    if train is None and test is None:
        there = list_some(sorted(path.name for path in folder.iterdir()))
        raise DataError(f"{folder} has {there or 'nothing'}; expected CIFAR's python batches")
    return image_source(train, None, test, names, mean, std)


def _folder(path: str | Path | None, usual: str) -> Path:
    """The folder with the batches, given directly or by its parent."""
    folder = dataset_folder(path, usual, remote=True)
    if not folder.is_dir():
        raise DataError(f"{folder} is a file; expected the folder {usual}: unpack it, tar -xzf {folder.name}")
    return folder / usual if (folder / usual).is_dir() else folder


def _part(folder: Path, files: Sequence[str], key: str) -> Examples | None:
    """The images and labels of some files, or None if all are missing."""
    missing = [file for file in files if not (folder / file).is_file()]
    if len(missing) == len(files):
        return None
    if missing:
        raise DataError(f"{folder} lacks {list_some(missing)}; expected {list_some(files)}")
    parts = [_batch(folder / file, key) for file in files]
    return TensorExamples(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def _batch(path: Path, key: str) -> tuple[Tensor, Tensor]:
    content = _content(path)
    if "data" not in content or key not in content:
        raise DataError(f"{path} has {list_some(content)}; expected the entries data and {key}")
    pixels = content["data"]
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataError(f"{path} has data of {found}; expected uint8 rows of 3072 = 3×32×32 bytes")
    labels = _labels(content[key], f"{key} of {path}")
    require_same_length(pixels, labels, str(path))
    return torch.from_numpy(np.array(pixels, order="C")).view(-1, *SHAPE), labels


def _names(path: Path, key: str, count: int) -> list[str]:
    """The names of the classes, or their numbers if the file with the names is missing."""
    if not path.is_file():
        return [str(i) for i in range(count)]
    names = _content(path).get(key)
    if not isinstance(names, list) or len(names) != count:
        raise DataError(
            f"{path} has no list {key} of {count} names; download the file again, or remove it to use numbers as names"
        )
    if not all(isinstance(name, (str, bytes)) for name in names):
        raise DataError(f"{path} has names in {key} that are not words; download the file again")
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names]


def _content(path: Path) -> dict[str, Any]:
    """The dictionary in a batch or meta file, with words as keys."""
    content = read_plain_pickle(path)
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; expected a dictionary")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}


def _labels(values: Any, what: str) -> Tensor:
    """A flat list of integers, or an array of them, as labels."""
    if isinstance(values, list) and all(type(value) in (int, float) and abs(value) < 2**31 for value in values):
        values = np.array(values)
    if not isinstance(values, np.ndarray):
        raise DataError(f"{what} is a {type(values).__name__}; expected a list of integers")
    return as_labels(values, what)
