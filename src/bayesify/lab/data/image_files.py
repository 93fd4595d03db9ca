"""Read image files, and arrays of images, as (C, H, W) tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.errors import DataError, import_optional

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""The formats that Pillow may find in a file, whatever its name: for others, such as EPS, it starts programs."""
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for each number of channels."""


def image_files(folder: Path) -> list[Path]:
    """Every image file in a folder and its subfolders, sorted by name."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    return sorted(path for path in found if not path.name.startswith("."))


@contextmanager
def open_image(path: Path) -> Iterator[Image]:
    """Open an image file; errors while it is read name the file."""
    pillow = import_optional("PIL.Image", "reading image files")
    try:
        with pillow.open(path, formats=FORMATS) as image:
            yield image
    except (OSError, SyntaxError, pillow.DecompressionBombError) as error:
        raise DataError(f"{path} can't be read as an image ({error}); replace or remove the file") from error


def decode(image: Image, shape: tuple[int, ...], name: str) -> Tensor:
    """A Pillow image as uint8 (C, H, W): center-cropped to the aspect ratio of `shape`, then resized bilinearly.

    >>> from PIL import Image
    >>> decode(Image.new("L", (20, 10), color=7), (1, 4, 4), "grey").unique()
    tensor([7], dtype=torch.uint8)
    """
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{name} has pixels of mode {image.mode!r}; expected 8 bits per channel: convert it first")
    image = image.convert(MODES[shape[0]])
    size = (shape[2], shape[1])
    if image.size != size:
        ops = import_optional("PIL.ImageOps", "resizing images")
        image = ops.fit(image, size, method=import_optional("PIL.Image", "resizing images").Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels.view(shape[1], shape[2], shape[0]).permute(2, 0, 1).contiguous()


def shape_of(channels: int, size: int | Sequence[int]) -> tuple[int, int, int]:
    """The shape (C, H, W) from the options of a loader.

    >>> shape_of(3, 32)
    (3, 32, 32)
    """
    if channels not in MODES:
        raise DataError(f"channels={channels!r}: expected 1 (grey), 3 (red, green, blue) or 4 (with alpha)")
    sides = [size, size] if isinstance(size, int) else list(size)
    if len(sides) != 2 or any(not isinstance(side, int) or side < 1 for side in sides):
        raise DataError(f"size={size!r}: expected a number of pixels, or (height, width)")
    return channels, sides[0], sides[1]


def common_size(sizes: Iterator[tuple[str, tuple[int, int]]]) -> tuple[int, int]:
    """The (height, width) that all images share, from their names and (width, height); raises if they differ."""
    first, size = next(sizes)
    for name, other in sizes:
        if other != size:
            raise DataError(
                f"images of different sizes: {first} has {size[0]}×{size[1]} pixels, {name} has {other[0]}×{other[1]}; "
                "set size=… to resize them"
            )
    return size[1], size[0]


def sizes_of(paths: Sequence[Path]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The name and the (width, height) of image files, from their headers."""
    for path in paths:
        with open_image(path) as image:
            yield str(path), image.size


def as_images(array: np.ndarray, what: str) -> Tensor:
    """An array (N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W): uint8, or float32 from 0 to 1.

    >>> as_images(np.zeros((5, 8, 9, 3), dtype=np.uint8), "x").shape
    torch.Size([5, 3, 8, 9])
    """
    images = _channels_first(array, what)
    if images.dtype.kind in "iu":
        _expect_between(images, 0, 255, what)
        return torch.from_numpy(np.ascontiguousarray(images, dtype=np.uint8))
    if images.dtype.kind != "f":
        raise DataError(f"{what} has pixels of type {images.dtype}; expected uint8, or floats from 0 to 1")
    _expect_between(images, 0, 1, what)
    return torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32))


def _channels_first(array: np.ndarray, what: str) -> np.ndarray:
    if array.ndim == 3:
        return array[:, None]
    for channels in ((1, 3), (4,)):  # 4 is more likely a number of pixels than of channels
        first, last = (array.ndim == 4 and array.shape[i] in channels for i in (1, 3))
        if first != last:
            return array if first else array.transpose(0, 3, 1, 2)
    raise DataError(
        f"{what} has shape {array.shape}; expected images (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 "
        "channels; for other arrays set kind='arrays'"
    )


def _expect_between(images: np.ndarray, low: int, high: int, what: str) -> None:
    if images.dtype == np.uint8 or not images.size:
        return
    # Written so that NaN fails too.
    if not (images.min() >= low and images.max() <= high):
        raise DataError(
            f"{what} has pixels from {images.min()} to {images.max()}; expected {low} to {high}: "
            "rescale them, or set kind='arrays' for inputs that aren't images"
        )
