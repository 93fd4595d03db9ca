"""ORL's 400 faces of 40 people, 112×92 grey pixels (Samaria and Harter 1994), as an archive of images and labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from bayesify.lab.data.checks import as_labels, require_same_length
from bayesify.lab.data.dataset import Source, image_source
from bayesify.lab.data.errors import DataError
from bayesify.lab.data.examples import Examples, TensorExamples
from bayesify.lab.data.files import dataset_folder, existing_path, read_npz
from bayesify.lab.data.image_files import as_images, shape_of

FILE = "orl_faces.npz"


def orl_faces(
    path: str | Path | None = None,
    *,
    people: Sequence[int] = (0, 40),
    size: int | Sequence[int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Source[Examples]:
    """The faces of the people from the first number up to, but without, the second; scaled bilinearly to `size`.

    Train on some people and verify others: `people=[0, 20]` and `people=[20, 40]`. Without `path`, the file
    orl_faces.npz in the data root.
    """
    place = dataset_folder(path, ".")
    file = existing_path(place / FILE) if place.is_dir() else place
    arrays = read_npz(file)
    if missing := {"images", "labels"} - arrays.keys():
        raise DataError(
            f"{file} has no {' and no '.join(sorted(missing))}; expected images (N, 112, 92) and labels (N,)"
        )
    images, labels = as_images(arrays["images"], str(file)), as_labels(arrays["labels"], str(file))
    require_same_length(images, labels, str(file))
    first, end = _range_of(people, int(labels.max()) + 1)
    chosen = ((labels >= first) & (labels < end)).nonzero().flatten()
    x = images[chosen]
    if size is not None:
        x = F.interpolate(x.float(), shape_of(1, size)[1:], mode="bilinear", antialias=True).round().to(torch.uint8)
    names = [f"person {i}" for i in range(first, end)]
    return image_source(TensorExamples(x, labels[chosen] - first), None, None, names, mean, std)


def _range_of(people: Sequence[int], count: int) -> tuple[int, int]:
    given = list(people)
    if len(given) != 2 or not all(isinstance(each, int) for each in given) or not 0 <= given[0] < given[1] <= count:
        raise DataError(f"people={given}: expected the first person and the one after the last, from 0 to {count}")
    return given[0], given[1]
