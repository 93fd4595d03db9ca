"""The 1797 handwritten digits of 8×8 pixels that come with scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from bayesify.lab.data.dataset import Source, image_source
from bayesify.lab.data.errors import DataError, import_optional
from bayesify.lab.data.examples import Examples, TensorExamples
from bayesify.lab.data.image_files import shape_of


def digits(
    path: str | Path | None = None,
    *,
    size: int | Sequence[int] = 8,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Source[Examples]:
    """The digits, scaled bilinearly to `size` pixels (28 or 32 for networks made for MNIST).

    >>> digits(size=28).train[0][0].shape
    torch.Size([1, 28, 28])
    """
    if path is not None:
        raise DataError(
            f"path={str(path)!r}: the digits come with scikit-learn; leave out path, or load 'idx' or 'npz'"
        )
    found = import_optional("sklearn.datasets", "the digits").load_digits()
    # The 17 levels of grey, 0 to 16, over the range of uint8; they stay distinct.
    x = torch.from_numpy(np.rint(found.images * (255 / 16)).astype(np.float32))[:, None]
    shape = shape_of(1, size)
    x = F.interpolate(x, shape[1:], mode="bilinear") if x.shape[1:] != shape else x
    rows = TensorExamples(x.round().to(torch.uint8), torch.from_numpy(found.target).long())
    return image_source(rows, None, None, [str(name) for name in found.target_names], mean, std)
