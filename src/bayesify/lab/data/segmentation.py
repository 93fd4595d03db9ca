"""Folders of images and masks: images/ and masks/, by themselves or in train/, val/ and test/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.dataset import Source, image_source
from bayesify.lab.data.errors import DataError, import_optional, list_some
from bayesify.lab.data.examples import Examples, FolderExamples
from bayesify.lab.data.files import required_path
from bayesify.lab.data.folder import SPLITS, split_folder
from bayesify.lab.data.image_files import common_size, image_files, open_image, shape_of, sizes_of

Pairs = list[tuple[Path, Path]]


def segmentation(
    path: str | Path | None = None,
    *,
    images: str = "images",
    masks: str = "masks",
    names: Sequence[str] | None = None,
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Source[Examples]:
    """Images, and for each a mask of the same name: an image of one channel whose values are the classes.

    The values that occur, in order, are the classes, whose `names` may be given. With `size`, both are center-cropped
    and resized, else all must have the same size.
    """
    root = required_path(path, "segmentation", f"a folder with {images}/ and {masks}/, or with train/, val/ and test/")
    places = {split: split_folder(root, own) for split, own in SPLITS.items()}
    if places["train"] is None:
        places = {"train": root, "validation": None, "test": None}
    pairs = {split: _pairs(place, images, masks) for split, place in places.items() if place is not None}
    files = [image for some in pairs.values() for image, _ in some]
    shape = shape_of(channels, common_size(sizes_of(files)) if size is None else size)
    raw = {split: torch.stack([_mask(pair, shape, size is None) for pair in some]) for split, some in pairs.items()}
    values = torch.cat([each.unique() for each in raw.values()]).unique().tolist()
    if names is not None and len(names) != len(values):
        raise DataError(
            f"names={list(names)}: the masks have {len(values)} values, {list_some(values, 20)}; one for each"
        )
    place = torch.zeros(256, dtype=torch.uint8)
    place[values] = torch.arange(len(values), dtype=torch.uint8)
    parts = {
        split: FolderExamples([image for image, _ in some], place[raw[split].long()], shape)
        for split, some in pairs.items()
    }
    every = [str(value) for value in values] if names is None else names
    return image_source(parts["train"], parts.get("validation"), parts.get("test"), every, mean, std)


def _pairs(place: Path, images: str, masks: str) -> Pairs:
    """The images of a split, each with the mask of the same name."""
    for name in (images, masks):
        if not (place / name).is_dir():
            raise DataError(
                f"{place} has no folder {name}; expected images in {images}/ and a mask for each in {masks}/"
            )
    found = {path.stem: path for path in image_files(place / images)}
    other = {path.stem: path for path in image_files(place / masks)}
    if not found:
        raise DataError(f"{place / images} has no image")
    if missing := sorted(found.keys() - other.keys()):
        raise DataError(
            f"{len(missing)} of {len(found)} images in {place / images} have no mask in {place / masks}: "
            f"{list_some(missing)}; a mask has the name of its image, with any ending"
        )
    return [(image, other[stem]) for stem, image in sorted(found.items())]


def _mask(pair: tuple[Path, Path], shape: tuple[int, ...], must_fit: bool) -> Tensor:
    """A mask as uint8 (H, W), cropped and resized as its image is, to the nearest pixel."""
    image_path, path = pair
    with open_image(path) as image:
        if image.mode not in ("1", "L", "P"):
            raise DataError(
                f"{path} has pixels of mode {image.mode!r}; expected one channel of 8 bits, whose values are classes"
            )
        size = (shape[2], shape[1])
        if image.size != size:
            if must_fit:
                raise DataError(f"{path} has {image.size} pixels, and its image {image_path} {size}; expected as many")
            ops = import_optional("PIL.ImageOps", "resizing images")
            image = ops.fit(image, size, method=import_optional("PIL.Image", "resizing images").Resampling.NEAREST)
        return torch.from_numpy(np.array(image, dtype=np.uint8))
