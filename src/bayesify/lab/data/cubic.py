"""The curve y = x³ with noise, on which regressions with uncertainty are shown (Hernández-Lobato and Adams 2015)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bayesify.lab.data.arrays import learn_arrays
from bayesify.lab.data.dataset import Source, example_source, row_shape
from bayesify.lab.data.errors import DataError
from bayesify.lab.data.examples import Examples, TensorExamples

END = 4.0
"""Inputs are from -4 to 4."""
TEST = 1000
"""The number of test points, evenly spread."""


def cubic(
    path: str | Path | None = None, *, points: int = 30, noise: float = 3.0, curve_seed: int = 0
) -> Source[Examples]:
    """`points` random inputs to train on, and evenly spread ones to test on; the noise is Gaussian, its sd is `noise`.

    >>> len(cubic(points=20).train)
    20
    """
    if path is not None:
        raise DataError(f"path={str(path)!r}: the curve is computed; leave out path")
    if not isinstance(points, int) or points < 2 or not noise >= 0:
        raise DataError(f"points={points!r}, noise={noise!r}: expected at least 2 points, and a noise of at least 0")
    generator = torch.Generator().manual_seed(curve_seed)
    train = _points(END * (2 * torch.rand(points, 1, generator=generator) - 1), noise, generator)
    test = _points(torch.linspace(-END, END, TEST).unsqueeze(1), noise, generator)
    return example_source(train, None, test, ["y"], lambda train: learn_arrays(train, row_shape(train), True))


def _points(x: Tensor, noise: float, generator: torch.Generator) -> Examples:
    return TensorExamples(x, (x**3 + noise * torch.randn(x.shape, generator=generator)).double())
