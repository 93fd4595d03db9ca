"""Folders of images: one folder for each class, by itself or in train/, val/ and test/."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from bayesify.lab.data.dataset import Source, image_source
from bayesify.lab.data.errors import DataError, list_some
from bayesify.lab.data.examples import Examples, FolderExamples
from bayesify.lab.data.files import required_path
from bayesify.lab.data.image_files import SUFFIXES, common_size, image_files, shape_of, sizes_of

SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test", "testing")}

Labelled = tuple[list[Path], list[int]]


def folder(
    path: str | Path | None = None,
    *,
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Source[Examples]:
    """Images decoded on access; with `size`, center-cropped and resized, else all must have the same size."""
    root = required_path(
        path, "folder", "a folder with one folder of images for each class, or with train/, val/ and test/"
    )
    if not root.is_dir():
        raise DataError(f"{root} is a file; expected a folder with one folder of images for each class")
    roots = {split: split_folder(root, names) for split, names in SPLITS.items()}
    if roots["train"] is None:
        if roots["validation"] or roots["test"]:
            raise DataError(f"{root} has {roots['validation'] or roots['test']}, but no folder train beside it")
        roots = {"train": root, "validation": None, "test": None}
    names = sorted({name for place in roots.values() if place for name in _class_folders(place)})
    found = {split: _files_and_labels(place, names) for split, place in roots.items() if place is not None}
    files = list(chain.from_iterable(paths for paths, _ in found.values()))
    shape = shape_of(channels, common_size(sizes_of(files)) if size is None else size)
    parts = {split: FolderExamples(paths, torch.tensor(y), shape) for split, (paths, y) in found.items()}
    return image_source(parts["train"], parts.get("validation"), parts.get("test"), names, mean, std)


def split_folder(root: Path, names: Sequence[str]) -> Path | None:
    """The folder of a split, by the first of its names that is there."""
    return next((root / name for name in names if (root / name).is_dir()), None)


def _class_folders(place: Path) -> list[str]:
    names = sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{place} has no folders; expected one for each class, with its images in it")
    return names


def _files_and_labels(place: Path, names: Sequence[str]) -> Labelled:
    """The files of a split by class, and their labels; raises if a class folder is empty."""
    files = {name: image_files(place / name) for name in _class_folders(place)}
    empty = [name for name, some in files.items() if not some]
    if empty:
        raise DataError(
            f"no image in {len(empty)} class folders of {place}: {list_some(empty)}; add images "
            f"({list_some(sorted(SUFFIXES), most=99)}) or remove the folders"
        )
    paths = list(chain.from_iterable(files.values()))
    return paths, [names.index(name) for name, some in files.items() for _ in some]
