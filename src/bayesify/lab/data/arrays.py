"""Plain arrays of numbers, standardised along their last dimension."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.checks import require_finite, require_numbers, require_shape
from bayesify.lab.data.errors import DataError
from bayesify.lab.data.examples import Examples, TensorExamples, blocks
from bayesify.lab.data.files import input_array, is_idx
from bayesify.lab.data.inputs import Inputs, NamedExamples, moments, row_names


@dataclass(frozen=True)
class Arrays(Inputs):
    """Float arrays of one shape, with a mean and a standard deviation for each feature, the last dimension.

    >>> Arrays((2,), mean=(1.0, 0.0), std=(2.0, 1.0)).prepare(torch.tensor([[5.0, 5.0]]))
    tensor([[2., 5.]])
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        require_shape(self.shape)
        require_numbers("mean", self.mean, self.shape[-1])
        require_numbers("std", self.std, self.shape[-1], positive=True)

    def prepare(self, x: Tensor) -> Tensor:
        x = x.float()
        return (x - x.new_tensor(self.mean)) / x.new_tensor(self.std)

    def read_one(self, path: Path) -> NamedExamples:
        """The inputs in an .npz, .npy or idx file."""
        if not (is_idx(path) or path.suffix in (".npz", ".npy")):
            raise DataError(f"{path}: expected an .npz, .npy or idx file")
        x = as_floats(input_array(path), str(path))
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"{path} has rows of shape {tuple(x.shape[1:])}; expected {self.shape}")
        return TensorExamples(x, torch.full((len(x),), torch.nan)), row_names(path, len(x))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "arrays", "shape": list(self.shape), "mean": list(self.mean), "std": list(self.std)}


def as_floats(array: np.ndarray, what: str) -> Tensor:
    """Finite numbers as float32 (N, …); one number per row becomes (N, 1).

    >>> as_floats(np.arange(3), "x").shape
    torch.Size([3, 1])
    """
    if array.dtype.kind not in "buif" or array.ndim == 0:
        raise DataError(f"{what} has type {array.dtype} and shape {array.shape}; expected numbers, one row per example")
    x = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    require_finite(x, what)
    return x[:, None] if x.dim() == 1 else x


def learn_arrays(train: Examples, shape: tuple[int, ...], standardise: bool) -> Arrays:
    """Arrays with the mean and standard deviation of the training split; 0 and 1 if empty or not `standardise`."""
    if not standardise or not len(train):
        return Arrays(shape, (0.0,) * shape[-1], (1.0,) * shape[-1])
    return Arrays(shape, *moments(x.flatten(0, -2) if x.dim() > 2 else x for x in blocks(train)))
