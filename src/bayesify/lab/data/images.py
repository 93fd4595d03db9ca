"""`Images`: image inputs, raw uint8 pixels or floats from 0 to 1, normalised per channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.lab.data.checks import require_numbers, require_shape
from bayesify.lab.data.errors import DataError, list_some
from bayesify.lab.data.examples import Examples, FolderExamples, TensorExamples, blocks
from bayesify.lab.data.files import input_array, is_idx
from bayesify.lab.data.image_files import SUFFIXES, as_images, image_files
from bayesify.lab.data.inputs import Inputs, NamedExamples, moments, row_names

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SAMPLE = 4096
"""At most this many image files, evenly spread, are decoded to learn the mean and standard deviation."""


@dataclass(frozen=True)
class Images(Inputs):
    """Images of one shape (C, H, W), with a mean and a standard deviation for each channel of pixels from 0 to 1.

    >>> grey = Images((1, 2, 2), mean=(0.5,), std=(0.25,))
    >>> grey.prepare(torch.tensor([0, 255, 255, 0], dtype=torch.uint8).view(1, 1, 2, 2)).flatten()
    tensor([-2.,  2.,  2., -2.])
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        require_shape(self.shape, 3)
        for option, values in (("mean", self.mean), ("std", self.std)):
            if isinstance(values, tuple) and len(values) != self.shape[0]:
                raise DataError(
                    f"{option}={list(values)}: expected one number for each of the {self.shape[0]} channels"
                )
        require_numbers("mean", self.mean, self.shape[0])
        require_numbers("std", self.std, self.shape[0], positive=True)

    def unit(self, x: Tensor) -> Tensor:
        """Raw images as float32 from 0 to 1."""
        return x.float() / 255 if x.dtype == torch.uint8 else x.float()

    def normalise(self, unit: Tensor) -> Tensor:
        """Images from 0 to 1, normalised for the network."""
        mean, std = (unit.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (unit - mean) / std

    def prepare(self, x: Tensor) -> Tensor:
        return self.normalise(self.unit(x))

    def read_one(self, path: Path) -> NamedExamples:
        """An image file, a folder of them, or an idx, .npz or .npy file; image files are resized."""
        if path.is_dir():
            return self._read_folder(path)
        if path.suffix.lower() in SUFFIXES:
            return self._files([path]), [path.name]
        x = image_array(path)
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"{path} has images of shape {tuple(x.shape[1:])}; expected {self.shape}")
        return TensorExamples(x, unlabelled(len(x))), row_names(path, len(x))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "images", "shape": list(self.shape), "mean": list(self.mean), "std": list(self.std)}

    def _read_folder(self, folder: Path) -> NamedExamples:
        files = image_files(folder)
        if not files:
            raise DataError(f"{folder} has no image file; expected {list_some(sorted(SUFFIXES), most=99)}")
        return self._files(files), [file.relative_to(folder).as_posix() for file in files]

    def _files(self, files: Sequence[Path]) -> Examples:
        return FolderExamples(files, unlabelled(len(files)), self.shape)


def image_array(path: Path) -> Tensor:
    """The images in an idx, .npz or .npy file, of any size."""
    if not (is_idx(path) or path.suffix in (".npz", ".npy")):
        raise DataError(f"{path}: expected a .npz, .npy, idx or image file ({list_some(sorted(SUFFIXES), most=99)})")
    return as_images(input_array(path), str(path))


def unlabelled(rows: int) -> Tensor:
    """The label -1, which is no class, for each row."""
    return torch.full((rows,), -1)


def learn_images(
    train: Examples, shape: tuple[int, ...], mean: Sequence[float] | None, std: Sequence[float] | None
) -> Images:
    """Images with the given mean and standard deviation, or those of the training split; 0 and 1 if it is empty."""
    learnt = ((0.0,) * shape[0], (1.0,) * shape[0])
    if len(train) and (mean is None or std is None):
        learnt = moments(_pixels(train))
    return Images(shape, _numbers("mean", mean, learnt[0]), _numbers("std", std, learnt[1]))


def _numbers(option: str, given: Sequence[float] | None, learnt: tuple[float, ...]) -> tuple[float, ...]:
    if given is None:
        return learnt
    try:
        return tuple(float(value) for value in given)
    except (TypeError, ValueError) as error:
        raise DataError(f"{option}={given!r}: expected a list of numbers, one for each channel") from error


def _pixels(train: Examples) -> Iterator[Tensor]:
    """Pixels from 0 to 1 with a column for each channel, block by block."""
    if not isinstance(train, TensorExamples) and len(train) > SAMPLE:
        train = train.take(torch.linspace(0, len(train) - 1, SAMPLE).long())
    for x in blocks(train):
        pixels = x.movedim(1, -1).flatten(0, -2).double()
        yield pixels / 255 if x.dtype == torch.uint8 else pixels
