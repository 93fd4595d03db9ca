"""Tables: numeric columns standardised, categorical columns one-hot, with what the training split taught."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.lab.data.errors import DataError, listed
from bayesify.lab.data.examples import TensorExamples
from bayesify.lab.data.frame import Frame, is_number, read_frame
from bayesify.lab.data.inputs import Inputs, Named, moments, row_names

MANY = 200
"""So many categories that a column of words is rather an identifier or free text, unless it is said to be one."""

FEW_NUMBERS = 20
"""With more different numbers than this beside it, a word is rather a mistake in a column of numbers."""


@dataclass(frozen=True)
class Columns(Inputs):
    """The columns of a table: the numeric ones first, then the categorical ones, each over its categories.

    A raw row, from `encode`, has the standardised numbers and the numbers of the categories (-1: unseen), so that
    float32 is fine enough; `prepare` spreads the categories out.

    >>> columns = Columns(("age",), mean=(40.0,), std=(10.0,), categorical=("sex",), categories=(("f", "m"),))
    >>> columns.prepare(columns.encode(Frame("t", {"age": np.array([50.0]), "sex": np.array(["m"], dtype=object)})))
    tensor([[1., 0., 1.]])
    >>> columns.names
    ('age', 'sex=f', 'sex=m')
    """

    numeric: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    categorical: tuple[str, ...] = ()
    categories: tuple[tuple[str, ...], ...] = ()
    missing: str = "error"
    unseen: str = "error"
    na_values: tuple[str, ...] = ()
    delimiter: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # it follows from the fields
        """As many numbers as there are names."""
        return (len(self.numeric) + sum(map(len, self.categories)),)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each number that the network sees."""
        pairs = zip(self.categorical, self.categories, strict=True)
        return (*self.numeric, *(f"{name}={word}" for name, words in pairs for word in words))

    def prepare(self, x: Tensor) -> Tensor:
        x = x.float()
        codes = x[:, len(self.numeric) :].long()
        # An unseen category, -1, is the first of one more than there are, and that one is cut off: all zeros.
        spread = [
            F.one_hot(codes[:, i] + 1, len(words) + 1)[:, 1:].to(x.dtype) for i, words in enumerate(self.categories)
        ]
        return torch.cat([x[:, : len(self.numeric)], *spread], 1)

    def encode(self, frame: Frame) -> Tensor:
        """A frame as raw rows (N, numeric + categorical)."""
        numbers = [
            (self._filled(frame, name, mean) - mean) / std
            for name, mean, std in zip(self.numeric, self.mean, self.std, strict=True)
        ]
        pairs = zip(self.categorical, self.categories, strict=True)
        codes = [self._codes(frame, name, words) for name, words in pairs]
        return torch.from_numpy(np.stack([*numbers, *codes], 1).astype(np.float32))

    def read_one(self, path: Path) -> Named:
        """The rows of a CSV or Parquet file, which may have other columns too."""
        wanted = [*self.numeric, *self.categorical]
        frame = read_frame(
            path, keep=wanted, words=self.categorical, na_values=self.na_values, delimiter=self.delimiter
        )
        return TensorExamples(self.encode(frame), torch.full((len(frame),), torch.nan)), row_names(path, len(frame))

    def to_dict(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("numeric", "mean", "std", "categorical", "na_values")}
        options = {name: getattr(self, name) for name in ("missing", "unseen", "delimiter")}
        return {"kind": "columns", **lists, "categories": [list(words) for words in self.categories], **options}

    def _filled(self, frame: Frame, name: str, mean: float) -> np.ndarray:
        frame.check_numbers(name, self.missing)
        values = frame.numbers(name)
        return np.where(np.isnan(values), mean, values)

    def _codes(self, frame: Frame, name: str, categories: Sequence[str]) -> np.ndarray:
        words = frame.words(name)
        code = {word: i for i, word in enumerate(categories)}
        strange = sorted(set(words) - set(code))
        if strange and self.unseen == "error":
            raise DataError(
                f"column {name!r} of {frame.name} has categories that the training split lacks: "
                f"{listed(map(repr, strange))}; it has {listed(map(repr, categories))}. Correct them, or load the "
                "training data with unseen='zeros'"
            )
        return np.array([code.get(word, -1) for word in words], dtype=np.float64)


def learn_columns(
    frame: Frame,
    categorical: Sequence[str],
    *,
    missing: str = "error",
    unseen: str = "error",
    na_values: Sequence[str] = (),
    delimiter: str | None = None,
) -> Columns:
    """The columns of a training split: columns of words, and those named, are categorical; the others numeric."""
    named = word_columns(frame, categorical)
    numeric = [name for name in frame.columns if name not in named]
    mean, std = _statistics(frame, numeric)
    categories = tuple(_categories(frame, name, name in categorical) for name in named)
    return Columns(tuple(numeric), mean, std, tuple(named), categories, missing, unseen, tuple(na_values), delimiter)


def word_columns(frame: Frame, categorical: Collection[str]) -> list[str]:
    """The columns of words, and those that are named."""
    return [name for name in frame.columns if name in categorical or frame[name].dtype == object]


def _statistics(frame: Frame, numeric: Sequence[str]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and deviation of each numeric column over the values it has."""
    found = []
    for name in numeric:
        values = frame.numbers(name)
        there = values[~np.isnan(values)]
        if not len(there):
            raise DataError(f"column {name!r} of {frame.name} has no value in the training split; drop=[{name!r}]")
        found.append(moments([torch.from_numpy(there)[:, None]]))
    return tuple(mean[0] for mean, _ in found), tuple(std[0] for _, std in found)


def _categories(frame: Frame, name: str, said: bool) -> tuple[str, ...]:
    """The categories of a training column in order; a column of words that isn't said to be one must look like it."""
    words = frame.words(name)
    categories = sorted(set(words))
    if said:
        return tuple(categories)
    odd = [word for word in categories if not is_number(word)]
    if odd and len(categories) - len(odd) > max(FEW_NUMBERS, len(odd)):
        raise DataError(
            f"column {name!r} of {frame.name} has numbers and also {listed(map(repr, odd))}; correct these, name them "
            f"in na_values=[…] if they stand for nothing, or say categorical=[{name!r}]"
        )
    if len(categories) > MANY:
        raise DataError(
            f"column {name!r} of {frame.name} has {len(categories)} different words, such as {categories[0]!r}: an "
            f"identifier or free text? Leave it out with drop=[{name!r}], or say categorical=[{name!r}]"
        )
    return tuple(categories)
