"""`Columns`: the inputs of a table, with numeric columns standardised and categorical columns one-hot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.lab.data.checks import require_numbers, require_words
from bayesify.lab.data.errors import DataError, Problems, list_some, require_choice
from bayesify.lab.data.examples import TensorExamples
from bayesify.lab.data.frame import MISSING_VALUES, Frame, is_number, missing_rows, read_frame
from bayesify.lab.data.inputs import Inputs, NamedExamples, moments, row_names

MANY = 200
"""A column of words with more categories than this is taken for an identifier or free text, unless it is named."""

MISSING, UNSEEN = -2, -1
"""The codes of a category that is missing, and of one that the training split lacks."""
NO_WORD = "(missing)"
"""The category of missing words, where the training split has some."""

FEW_NUMBERS = 20
"""With more distinct numbers than this in the same column, a word is taken for a mistake."""


@dataclass(frozen=True)
class Columns(Inputs):
    """The columns of a table: the numeric ones first, then the categorical ones, each over its categories.

    A raw row, from `encode`, has the standardised numbers, for which float32 is precise enough and NaN means missing,
    and the codes of the categories (-1: unseen, -2: missing). `prepare` replaces NaN by the mean, which is 0, adds an
    input for each of `gaps`, which is 1 where that number is missing, and makes categories one-hot.

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
    gaps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in ("numeric", "categorical", "na_values", "gaps"):
            require_words(option, getattr(self, option))
        require_numbers("mean", self.mean, len(self.numeric))
        require_numbers("std", self.std, len(self.numeric), positive=True)
        if not isinstance(self.categories, tuple) or len(self.categories) != len(self.categorical):
            raise DataError(f"categories={str(self.categories)[:80]}: expected {len(self.categorical)} lists of words")
        for words in self.categories:
            require_words("categories", words)
        if unknown := set(self.gaps) - set(self.numeric):
            raise DataError(f"gaps={list(self.gaps)[:8]}: {min(unknown)!r} is none of the numeric columns")
        require_choice("missing", self.missing, MISSING_VALUES)
        require_choice("unseen", self.unseen, ("error", "zeros"))
        if not isinstance(self.delimiter, str | None):
            raise DataError(f"delimiter={self.delimiter!r}: expected a character")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # it follows from the fields
        """One number for each of `names`."""
        return (len(self.numeric) + len(self.gaps) + sum(map(len, self.categories)),)

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """One number for each column, as `encode` returns them."""
        return (len(self.numeric) + len(self.categorical),)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each number that the network sees."""
        pairs = zip(self.categorical, self.categories, strict=True)
        gaps = (f"{name} is missing" for name in self.gaps)
        return (*self.numeric, *gaps, *(f"{name}={word}" for name, words in pairs for word in words))

    def prepare(self, x: Tensor) -> Tensor:
        x = x.float()
        codes = x[:, len(self.numeric) :].long()
        # An unseen category, -1, becomes code 0 of one more category, whose column is dropped: all zeros.
        spread = [
            F.one_hot(codes[:, i].clamp_min(UNSEEN) + 1, len(words) + 1)[:, 1:].to(x.dtype)
            for i, words in enumerate(self.categories)
        ]
        numbers = x[:, : len(self.numeric)]
        gaps = numbers[:, [self.numeric.index(name) for name in self.gaps]].isnan().to(x.dtype)
        return torch.cat([torch.where(numbers.isnan(), 0.0, numbers), gaps, *spread], 1)

    def encode(self, frame: Frame, *, is_new: bool = False) -> Tensor:
        """A frame as raw rows (N, numeric + categorical).

        In rows of the training data, categories and missing values raise as `unseen` and `missing` say. In new rows
        they never do, and numbers that can't be read are missing: `remarks` says in which rows.
        """
        numbers = [
            (self._filled(frame.readable_numbers(name) if is_new else frame.numbers(name), mean) - mean) / std
            for name, mean, std in zip(self.numeric, self.mean, self.std, strict=True)
        ]
        pairs = zip(self.categorical, self.categories, strict=True)
        codes = [self._codes(frame, name, words, is_new) for name, words in pairs]
        return torch.from_numpy(np.stack([*numbers, *codes], 1).astype(np.float32))

    def encode_new(self, frame: Frame) -> TensorExamples:
        """The rows of a frame to predict."""
        return TensorExamples(self.encode(frame, is_new=True), torch.full((len(frame),), torch.nan))

    def read_one(self, path: Path) -> NamedExamples:
        """The rows of a CSV or Parquet file; other columns are ignored."""
        wanted = [*self.numeric, *self.categorical]
        frame = read_frame(
            path, keep=wanted, words=self.categorical, na_values=self.na_values, delimiter=self.delimiter
        )
        return self.encode_new(frame), row_names(path, len(frame))

    def remarks(self, x: Tensor) -> list[list[str]]:
        """What is made up in each raw row: numbers and categories of which the training data say nothing.

        >>> Columns(("age",), (0.0,), (1.0,), ("sex",), (("f", "m"),)).remarks(
        ...     torch.tensor([[0.0, 1], [torch.nan, -1]])
        ... )
        [[], ['column age has no number', 'column sex has an unknown category']]
        """
        found: list[list[str]] = [[] for _ in range(len(x))]
        for i, name in enumerate(self.numeric):
            if name not in self.gaps:
                for row in x[:, i].isnan().nonzero().flatten().tolist():
                    found[row].append(f"column {name} has no number")
        for i, name in enumerate(self.categorical, len(self.numeric)):
            for row in (x[:, i] < 0).nonzero().flatten().tolist():
                what = "is missing" if x[row, i] == MISSING else "has an unknown category"
                found[row].append(f"column {name} {what}")
        return found

    def to_dict(self) -> dict[str, Any]:
        names = ("numeric", "mean", "std", "categorical", "na_values", "gaps")
        lists = {name: list(getattr(self, name)) for name in names}
        options = {name: getattr(self, name) for name in ("missing", "unseen", "delimiter")}
        return {"kind": "columns", **lists, "categories": [list(words) for words in self.categories], **options}

    def _filled(self, values: np.ndarray, mean: float) -> np.ndarray:
        return np.where(np.isnan(values), mean, values) if self.missing == "mean" else values

    def _codes(self, frame: Frame, name: str, categories: Sequence[str], is_new: bool) -> np.ndarray:
        words = frame.words(name, missing=NO_WORD if is_new or self.missing == "indicator" else None)
        code = {NO_WORD: MISSING, **{word: i for i, word in enumerate(categories)}}
        unseen = sorted(set(words) - set(code))
        if unseen and self.unseen == "error" and not is_new:
            raise DataError(
                f"column {name!r} of {frame.name} has categories that the training split lacks: "
                f"{list_some(map(repr, unseen))}; it has {list_some(map(repr, categories))}. Correct them, or load "
                "the training data with unseen='zeros'"
            )
        return np.array([code.get(word, UNSEEN) for word in words], dtype=np.float64)


def learn_columns(
    frame: Frame,
    categorical: Sequence[str],
    *,
    missing: str = "error",
    unseen: str = "error",
    na_values: Sequence[str] = (),
    delimiter: str | None = None,
) -> Columns:
    """Learn the columns of a training split: those of words, and those named, are categorical, others numeric."""
    named = word_columns(frame, categorical)
    numeric = [name for name in frame.columns if name not in named]
    has_own = missing == "indicator"
    gaps = tuple(name for name in numeric if has_own and len(missing_rows(frame[name])))
    problems = Problems()
    with problems.noted():
        mean, std = _statistics(frame, numeric)
    categories = []
    for name in named:
        with problems.noted():
            categories.append(learn_categories(frame, name, name in categorical, NO_WORD if has_own else None))
    problems.raise_any()
    lists = (tuple(numeric), mean, std, tuple(named), tuple(categories))
    return Columns(*lists, missing, unseen, tuple(na_values), delimiter, gaps)


def word_columns(frame: Frame, categorical: Collection[str]) -> list[str]:
    """The columns of words, and those that are named."""
    return [name for name in frame.columns if name in categorical or frame[name].dtype == object]


def _statistics(frame: Frame, numeric: Sequence[str]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and standard deviation of each numeric column, over the values that are not missing."""
    found = []
    for name in numeric:
        values = frame.numbers(name)
        there = values[~np.isnan(values)]
        if not len(there):
            raise DataError(
                f"column {name!r} of {frame.name} has no training values; leave it out with drop=[{name!r}]"
            )
        found.append(moments([torch.from_numpy(there)[:, None]]))
    return tuple(mean[0] for mean, _ in found), tuple(std[0] for _, std in found)


def learn_categories(frame: Frame, name: str, is_named: bool, missing: str | None = None) -> tuple[str, ...]:
    """The sorted categories of a column; raises if it does not look categorical and is not named."""
    words = frame.words(name, missing=missing)
    categories = sorted(set(words))
    if is_named:
        return tuple(categories)
    odd = [word for word in categories if not is_number(word) and word != missing]
    if odd and len(categories) - len(odd) > max(FEW_NUMBERS, len(odd)):
        raise DataError(
            f"column {name!r} of {frame.name} has numbers and also {list_some(map(repr, odd))}; correct these, list "
            f"them in na_values=[…] if they mean missing, or set categorical=[{name!r}]"
        )
    if len(categories) > MANY:
        raise DataError(
            f"column {name!r} of {frame.name} has {len(categories)} distinct words, such as {categories[0]!r}: an "
            f"identifier or free text? Leave it out with drop=[{name!r}], or set categorical=[{name!r}]"
        )
    return tuple(categories)
