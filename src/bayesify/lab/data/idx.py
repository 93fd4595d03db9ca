"""MNIST and data sets in its format: folders of idx files, plain or compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bayesify.lab.data.checks import as_labels, require_same_length
from bayesify.lab.data.dataset import Source, image_source
from bayesify.lab.data.errors import DataError, list_some
from bayesify.lab.data.examples import Examples, TensorExamples
from bayesify.lab.data.files import dataset_folder, read_idx, required_path
from bayesify.lab.data.image_files import as_images

DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
LETTERS = tuple("ABCDEFGHIJ")
HIRAGANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
PARTS = {"train": ("train",), "test": ("t10k", "test")}


def idx(
    path: str | Path | None = None,
    *,
    prefix: str = "",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Source[Examples]:
    """A folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…, each plain or .gz.

    `prefix` is prepended to all file names (EMNIST: "emnist-balanced-"). The training or the test files may be missing.
    """
    folder = required_path(path, "idx", "the folder with train-images-idx3-ubyte[.gz] and the others")
    return _source(folder, prefix, None, mean, std)


def named_idx_set(folder: str, names: Sequence[str]) -> Callable[..., Source[Examples]]:
    """The loader of a known data set in the idx format, with its usual folder and the names of its classes."""

    def load_known(
        path: str | Path | None = None, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> Source[Examples]:
        return _source(dataset_folder(path, folder, remote=True), "", names, mean, std)

    load_known.__doc__ = f"The folder {folder} in the data root, or another with its files."
    return load_known


def _source(
    folder: Path,
    prefix: str,
    names: Sequence[str] | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Source[Examples]:
    if not folder.is_dir():
        raise DataError(f"{folder} is a file; expected the folder with the idx files")
    train, test = (_part(folder, prefix, part) for part in ("train", "test"))
    there = [part for part in (train, test) if part is not None]
    if not there:
        raise DataError(
            f"{folder} has {list_some(sorted(p.name for p in folder.iterdir())) or 'nothing'}; expected "
            f"{prefix}train-images-idx3-ubyte, {prefix}train-labels-idx1-ubyte or t10k-…, plain or .gz"
        )
    if names is None:
        names = [str(i) for i in range(max(int(part.targets.max()) + 1 for part in there))]
    return image_source(train, None, test, names, mean, std)


def _part(folder: Path, prefix: str, part: str) -> Examples | None:
    """The images and labels of one part, or None if both files are missing."""
    images, labels = (_file(folder, prefix, part, what) for what in ("images-idx3", "labels-idx1"))
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        raise DataError(f"{folder} has {(images or labels)}, but not its {'labels' if images else 'images'}")
    x, y = as_images(_of_dimensions(images, 3), str(images)), as_labels(_of_dimensions(labels, 1), str(labels))
    require_same_length(x, y, str(folder))
    if not len(y):
        raise DataError(f"{images} has no images")
    return TensorExamples(x, y)


def _file(folder: Path, prefix: str, part: str, what: str) -> Path | None:
    """A file under one of its usual names, uncompressed ones first."""
    stems = [f"{prefix}{name}-{what}-ubyte" for name in PARTS[part]]
    dotted = [stem.replace("-idx", ".idx") for stem in stems]
    candidates = [folder / f"{stem}{end}" for end in ("", ".gz") for stem in (*stems, *dotted)]
    return next((path for path in candidates if path.is_file()), None)


def _of_dimensions(path: Path, dims: int) -> np.ndarray:
    array = read_idx(path)
    if array.ndim != dims or array.dtype != np.uint8:
        raise DataError(
            f"{path} holds {array.dtype} of shape {array.shape}; expected uint8 with {dims} dimensions: "
            "are images and labels swapped?"
        )
    return array
