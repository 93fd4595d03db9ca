"""CSV and Parquet tables: a target column, numeric and categorical features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.columns import Columns, learn_columns, word_columns
from bayesify.lab.data.data import Source
from bayesify.lab.data.errors import DataError, choice, listed, nearest
from bayesify.lab.data.examples import TensorExamples
from bayesify.lab.data.frame import Frame, missing_rows, read_frame
from bayesify.lab.data.storage import existing, required

FEW = 20
"""Whole-number targets with at most so many different values are taken for classes."""


class TableRows:
    """The features of a table, not yet encoded, with the targets."""

    def __init__(self, frame: Frame, targets: Tensor) -> None:
        self.frame, self.targets = frame, targets

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Tensor) -> TableRows:
        """Some rows as a table of their own."""
        return TableRows(self.frame.take(rows), self.targets[rows])


def table(
    path: str | Path | None = None,
    *,
    target: str | Sequence[str] | None = None,
    categorical: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    task: str | None = None,
    test_path: str | Path | None = None,
    missing: str = "error",
    unseen: str = "error",
    na_values: str | Sequence[str] = (),
    delimiter: str | None = None,
) -> Source[TableRows]:
    """A table with a header; words are categories, numbers are numbers unless named in `categorical`.

    Targets that are words, true/false or at most 20 different whole numbers are classes, others real, unless `task`
    says otherwise; several target columns are real.
    """
    choice("task", task, (None, "classification", "regression"))
    file = required(path, "table", "a .csv, .tsv or .parquet file")
    names, categorical, drop, na_values = map(as_list, (target, categorical, drop, na_values))
    read = partial(read_frame, na_values=na_values, delimiter=delimiter)
    train = read(file, drop=drop, words=categorical)
    _check_columns(train, names, categorical)
    frames = {"train": train}
    if test_path is not None:
        # Columns are what they are in the training file, whatever the test file alone would suggest.
        frames["test"] = read(existing(test_path), keep=list(train.columns), words=word_columns(train, categorical))
    targets, classes = target_values(frames, names, task)
    options = {"missing": missing, "unseen": unseen, "na_values": na_values, "delimiter": delimiter}
    features = {split: without(frame, names) for split, frame in frames.items()}
    return frame_source(features, targets, classes, categorical, options)


def as_list(names: str | Sequence[str] | None) -> list[str]:
    """One name, several or none as a list.

    >>> as_list("age"), as_list(None)
    (['age'], [])
    """
    return [names] if isinstance(names, str) else list(names or ())


def frame_source(
    frames: Mapping[str, Frame],
    targets: Mapping[str, Tensor],
    names: tuple[str, ...],
    categorical: Sequence[str],
    options: Mapping[str, Any],
) -> Source[TableRows]:
    """A source of the features and targets of each split; gaps are refused here, where rows count as in the file."""
    choice("missing", options.get("missing", "error"), ("error", "mean"))
    choice("unseen", options.get("unseen", "error"), ("error", "zeros"))
    words = word_columns(frames["train"], categorical)
    numbers = [name for name in frames["train"].columns if name not in words]
    for frame in frames.values():
        _check_frame(frame, words, numbers, options.get("missing", "error"))
    rows = {split: TableRows(frame, targets[split]) for split, frame in frames.items()}
    learn = partial(_learn, categorical=tuple(categorical), options=options)
    return Source(rows["train"], rows.get("validation"), rows.get("test"), names, learn, encode)


def target_values(
    frames: Mapping[str, Frame], target: Sequence[str], task: str | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Labels (N,) with the names of the classes, or reals (N, K) with those of the columns, for each split."""
    if (task or guess_task(frames["train"], target)) == "classification":
        return _classes(frames, target)
    return {split: _reals(frame, target) for split, frame in frames.items()}, tuple(target)


def guess_task(frame: Frame, target: Sequence[str]) -> str:
    """Whether targets look like classes or like real numbers.

    >>> guess_task(Frame("t", {"y": np.array([1, 2, 1])}), ["y"])
    'classification'
    """
    if len(target) > 1:
        return "regression"
    values = frame[target[0]]
    if values.dtype == object or values.dtype == bool:
        return "classification"
    few = values.dtype.kind in "iu" and len(np.unique(values)) <= FEW
    return "classification" if few else "regression"


def encode(inputs: Columns, rows: TableRows) -> TensorExamples:
    """A table's rows as examples."""
    return TensorExamples(inputs.encode(rows.frame), rows.targets)


def _check_frame(frame: Frame, words: Sequence[str], numbers: Sequence[str], missing: str) -> None:
    for name in words:
        frame.check_words(name)
    for name in numbers:
        frame.check_numbers(name, missing)


def without(frame: Frame, names: Sequence[str]) -> Frame:
    """A frame with some columns less."""
    return Frame(frame.name, {name: column for name, column in frame.columns.items() if name not in names})


def _learn(train: TableRows, categorical: Sequence[str], options: Mapping[str, Any]) -> Columns:
    return learn_columns(train.frame, categorical, **options)


def _check_columns(frame: Frame, target: Sequence[str], categorical: Sequence[str]) -> None:
    if len(frame.columns) == 1 and set(next(iter(frame.columns))) & set(";\t|"):
        raise DataError(f"{frame.name} has one column, {next(iter(frame.columns))!r}; say delimiter=… to part it")
    if not target:
        raise DataError(f"target=None: say which column of {frame.name} to predict; it has {listed(frame.columns, 20)}")
    for option, names in (("target", target), ("categorical", categorical)):
        for name in names:
            if name not in frame.columns:
                raise DataError(f"{option}={name!r}: no such column in {frame.name}; {nearest(name, frame.columns)}")
    if not set(frame.columns) - set(target):
        raise DataError(f"{frame.name} has no column beside the target {listed(target)}; features are expected too")


def _classes(frames: Mapping[str, Frame], target: Sequence[str]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Labels, and the names of the classes in order: by number where all are whole numbers, else by letter."""
    if len(target) != 1:
        raise DataError(f"target={list(target)}: expected one column for classification; several are for regression")
    words = {split: _class_words(frame, target[0]) for split, frame in frames.items()}
    every = {word for some in words.values() for word in some}
    names = sorted(every, key=int) if all(word.lstrip("-").isdecimal() for word in every) else sorted(every)
    label = {name: i for i, name in enumerate(names)}
    return {split: torch.tensor([label[word] for word in some]) for split, some in words.items()}, tuple(names)


def _class_words(frame: Frame, name: str) -> np.ndarray:
    values = frame[name]
    if values.dtype.kind == "f":
        odd = values[np.isfinite(values) & (values % 1 != 0)]
        if len(odd):
            raise DataError(
                f"target {name!r} of {frame.name} has fractions, such as {odd[0]}; expected whole numbers or words "
                "for classes: did you mean task='regression'?"
            )
    return frame.words(name)


def _reals(frame: Frame, target: Sequence[str]) -> Tensor:
    for name in target:
        gaps = missing_rows(frame[name])
        if len(gaps):
            raise DataError(
                f"target {name!r} of {frame.name} is missing in {len(gaps)} rows (rows {listed(gaps)}); "
                "remove these rows"
            )
    return torch.from_numpy(np.stack([frame.numbers(name) for name in target], 1))
