"""The rows of a Hugging Face data set as examples, and which columns are inputs and target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.arrays import as_floats
from bayesify.lab.data.errors import DataError, list_some, suggest
from bayesify.lab.data.examples import Examples
from bayesify.lab.data.files import TARGET_KEYS
from bayesify.lab.data.image_files import decode

NUMBERS = ("int", "uint", "float", "bool", "double")


class HubImages(Examples):
    """A column of images, decoded on access; unless `fit`, images of another size raise an error."""

    def __init__(self, rows: Any, column: str, targets: Tensor, shape: tuple[int, ...], fit: bool) -> None:
        self.rows, self.column, self.targets, self.shape, self.fit = rows, column, targets, shape, fit

    def raw(self, rows: Tensor) -> Tensor:
        if not len(rows):
            return torch.empty(0, *self.shape, dtype=torch.uint8)
        images = self.rows[rows.tolist()][self.column]
        return torch.stack([self._image(image, row) for image, row in zip(images, rows.tolist(), strict=True)])

    def take(self, rows: Tensor) -> HubImages:
        return HubImages(self.rows.select(rows.tolist()), self.column, self.targets[rows], self.shape, self.fit)

    def with_targets(self, targets: Tensor) -> HubImages:
        return HubImages(self.rows, self.column, targets, self.shape, self.fit)

    def _image(self, image: Any, row: int) -> Tensor:
        if image is None:
            raise DataError(f"row {row} has no image in the column {self.column!r}; remove it")
        if not self.fit and image.size != (self.shape[2], self.shape[1]):
            raise DataError(
                f"images of different sizes: row {row} of {self.column!r} has {image.size[0]}×{image.size[1]} pixels, "
                f"the first one {self.shape[2]}×{self.shape[1]}; set size=… to resize them"
            )
        return decode(image, self.shape, f"row {row} of {self.column!r}")


class HubArrays(Examples):
    """A column of equally long lists of numbers, read on access."""

    def __init__(self, rows: Any, column: str, targets: Tensor, shape: tuple[int, ...]) -> None:
        self.rows, self.column, self.targets, self.shape = rows, column, targets, shape

    def raw(self, rows: Tensor) -> Tensor:
        if not len(rows):
            return torch.empty(0, *self.shape)
        x = as_floats(number_array(self.rows[rows.tolist()][self.column], self.column), f"column {self.column!r}")
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"column {self.column!r} has arrays of shape {tuple(x.shape[1:])} and {self.shape}")
        return x

    def take(self, rows: Tensor) -> HubArrays:
        return HubArrays(self.rows.select(rows.tolist()), self.column, self.targets[rows], self.shape)

    def with_targets(self, targets: Tensor) -> HubArrays:
        return HubArrays(self.rows, self.column, targets, self.shape)


def number_array(values: Any, column: str) -> np.ndarray:
    """Lists of numbers of one length as an array."""
    try:
        return np.asarray(values, dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"column {column!r} has arrays of different shapes, or values that are not numbers ({error})"
        ) from error


def kind_of(feature: Any) -> str:
    """The kind of a column: image, class, array, number, text, or the name of a type that is not supported."""
    name = type(feature).__name__
    if name in ("Image", "ClassLabel"):
        return {"Image": "image", "ClassLabel": "class"}[name]
    if name == "Value":
        number = str(feature.dtype).startswith(NUMBERS)
        return "number" if number else "text" if "string" in str(feature.dtype) else str(feature.dtype)
    inner = getattr(feature, "feature", feature)
    if name in ("List", "LargeList", "Sequence"):
        return "array" if kind_of(inner) in ("array", "number") else name
    return "array" if name.startswith("Array") else name


def find_target(kinds: Mapping[str, str], given: str | None) -> str:
    """The target column: the one given, else the only column of classes, else one with a usual name."""
    if given is not None:
        if given not in kinds:
            raise DataError(f"y={given!r}: no such column; {suggest(given, kinds)}")
        return given
    classes = [name for name, kind in kinds.items() if kind == "class"]
    usual = [name for name in TARGET_KEYS if name in kinds]
    for found in (classes, usual):
        if len(found) == 1:
            return found[0]
    raise DataError(f"set y=… to the column to predict: there are {list_some(kinds, most=20)}")


def find_inputs(kinds: Mapping[str, str], given: str | Sequence[str] | None, target: str) -> list[str]:
    """The input columns: those given, else the only image, else the only array, else all numbers and words."""
    if given is not None:
        names = [given] if isinstance(given, str) else list(given)
        for name in names:
            if name not in kinds:
                raise DataError(f"x={name!r}: no such column; {suggest(name, kinds)}")
        return names
    rest = {name: kind for name, kind in kinds.items() if name != target}
    for wanted in ("image", "array"):
        found = [name for name, kind in rest.items() if kind == wanted]
        if len(found) > 1:
            raise DataError(f"set x=… to the input column: there are {list_some(found)}")
        if found:
            return found
    return [name for name, kind in rest.items() if kind in ("number", "class", "text")]
