"""`Series`: time series with gaps, several variables measured at irregular times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.checks import require_numbers, require_shape
from bayesify.lab.data.errors import DataError
from bayesify.lab.data.examples import Examples, TensorExamples, blocks
from bayesify.lab.data.files import INPUT_KEYS, STATIC_KEYS, pick, read_npz
from bayesify.lab.data.inputs import Inputs, NamedExamples, moments, row_names

EXTREME = 0.01
"""Values beyond these quantiles of the training values, at either end, are clipped."""


@dataclass(frozen=True)
class Series(Inputs):
    """Series (time, variables) in which NaN stands for "not measured".

    The network sees two features per variable. The first half are the values: the last measured one, clipped to `low`
    and `high` and standardised; before the first measurement the mean, which is 0. The second half are 1 where a value
    was measured at that time, else 0. The last `static` variables are constant, and measured at the first time only.

    >>> series = Series(3, low=(0.0,), high=(9.0,), mean=(5.0,), std=(2.0,))
    >>> series.prepare(torch.tensor([[[torch.nan], [7.0], [torch.nan]]]))
    tensor([[[0., 0.],
             [1., 1.],
             [1., 0.]]])
    """

    steps: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    static: int = 0

    def __post_init__(self) -> None:
        variables = len(self.mean) if isinstance(self.mean, tuple) else 0
        require_shape((self.steps, variables), 2)
        for option in ("low", "high", "mean"):
            require_numbers(option, getattr(self, option), variables)
        require_numbers("std", self.std, variables, positive=True)
        if type(self.static) is not int or not 0 <= self.static <= variables:
            raise DataError(f"static={self.static!r}: expected an integer from 0 to {variables}")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # it follows from the fields
        """Time steps, and two features per variable."""
        return (self.steps, 2 * len(self.mean))

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Time steps and variables."""
        return (self.steps, len(self.mean))

    def prepare(self, x: Tensor) -> Tensor:
        x = x.float()
        low, high, mean, std = (x.new_tensor(values) for values in (self.low, self.high, self.mean, self.std))
        values = (carry_forward(x).clamp(low, high) - mean) / std
        return torch.cat([values.nan_to_num(0.0), (~x.isnan()).to(x.dtype)], -1)

    def read_one(self, path: Path) -> NamedExamples:
        """The series in an .npz or .npy file; if the training data had an array `static`, it must be there too."""
        if path.suffix not in (".npz", ".npy"):
            raise DataError(f"{path}: expected an .npz or .npy file")
        arrays = read_npz(path)
        series = arrays[pick(arrays, None, INPUT_KEYS, "inputs", path)]
        static = arrays[pick(arrays, None, STATIC_KEYS, "static variables", path)] if self.static else None
        x = as_series(series, static, str(path))
        if tuple(x.shape[1:]) != (self.steps, len(self.mean)):
            raise DataError(
                f"{path} has series of shape {tuple(x.shape[1:])}; expected {(self.steps, len(self.mean))}: times, and "
                f"variables of which the last {self.static} are static"
            )
        return TensorExamples(x, torch.full((len(x),), torch.nan)), row_names(path, len(x))

    def to_dict(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("low", "high", "mean", "std")}
        return {"kind": "series", "steps": self.steps, **lists, "static": self.static}


def carry_forward(x: Tensor) -> Tensor:
    """Series (N, time, variables) with each gap filled by the last value before it, if there is one.

    >>> carry_forward(torch.tensor([[[torch.nan], [2.0], [torch.nan]]])).flatten()
    tensor([nan, 2., 2.])
    """
    times = torch.arange(x.shape[1], device=x.device).view(1, -1, 1)
    # Before the first measurement this is time 0, whose value is NaN.
    last = torch.where(x.isnan(), 0, times).cummax(1).values
    return x.gather(1, last)


def as_series(array: np.ndarray, static: np.ndarray | None, what: str) -> Tensor:
    """Series (N, time, variables) as float32, with static variables (N, S) added at the first time."""
    _require_numbers(array, 3, f"{what} has series", "(N, time, variables)")
    if static is not None:
        _require_numbers(static, 2, f"{what} has static variables", "(N, variables)")
        if len(static) != len(array):
            raise DataError(f"{what} has {len(array)} series and {len(static)} rows of static variables")
        later = np.full((len(array), array.shape[1], static.shape[1]), np.nan, np.float32)
        later[:, :1] = static[:, None]
        array = np.concatenate([array, later], 2)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def learn_series(train: Examples, static: int) -> Series:
    """Learn the bounds, mean and standard deviation of each variable from its measured training values."""
    x = torch.cat(list(blocks(train))) if len(train) else train.raw(torch.arange(0))
    learnt = [_statistics(values[~values.isnan()]) for values in x.flatten(0, 1).unbind(1)]
    low, high, mean, std = (tuple(each) for each in zip(*learnt, strict=True))
    return Series(x.shape[1], low, high, mean, std, static)


def _statistics(values: Tensor) -> tuple[float, float, float, float]:
    """The bounds of a variable, and its mean and standard deviation after clipping."""
    if not len(values):
        return 0.0, 0.0, 0.0, 1.0
    low, high = np.quantile(values.numpy(), [EXTREME, 1 - EXTREME]).tolist()
    (mean,), (std,) = moments([values.clamp(low, high)[:, None]])
    return low, high, mean, std


def _require_numbers(array: np.ndarray, dims: int, what: str, shape: str) -> None:
    if array.dtype.kind not in "buif" or array.ndim != dims or 0 in array.shape[1:]:
        raise DataError(f"{what} of type {array.dtype} and shape {array.shape}; expected numbers {shape}")
    if np.isinf(array).any():
        row = int(np.isinf(array).reshape(len(array), -1).any(1).argmax())
        raise DataError(f"{what} with infinity, first in row {row}; use NaN for missing values")
