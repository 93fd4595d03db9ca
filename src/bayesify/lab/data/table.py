"""CSV and Parquet tables: a target column, numeric and categorical features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data.columns import NO_WORD, Columns, learn_categories, learn_columns, word_columns
from bayesify.lab.data.dataset import Source
from bayesify.lab.data.errors import DataError, Problems, list_some, require_choice, suggest
from bayesify.lab.data.examples import TensorExamples
from bayesify.lab.data.files import existing_path, required_path
from bayesify.lab.data.frame import MISSING_VALUES, Frame, missing_rows, read_frame

FEW = 20
"""Integer targets with at most this many distinct values are taken for classes."""


class TableRows:
    """The features of a table before they are encoded, with the targets."""

    def __init__(self, frame: Frame, targets: Tensor) -> None:
        self.frame, self.targets = frame, targets

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Tensor) -> TableRows:
        """A selection of rows."""
        return TableRows(self.frame.take(rows), self.targets[rows])

    def missing(self) -> Counter[str]:
        """The number of missing values of each column that has some."""
        return +Counter({name: len(missing_rows(column)) for name, column in self.frame.columns.items()})


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
    missing_target: str = "error",
    na_values: str | Sequence[str] = (),
    delimiter: str | None = None,
) -> Source[TableRows]:
    """A table with a header; columns of words, and those named in `categorical`, are categories, others numbers.

    A target of words, of true/false or of at most 20 distinct integers is a class, others are real, unless `task` is
    given; several target columns are labels that are each yes or no if they only have 0 and 1, or true and false, and
    real otherwise. All that is wrong with the columns is one error.
    """
    require_choice("task", task, (None, "classification", "multilabel", "regression"))
    require_choice("missing_target", missing_target, ("error", "drop"))
    file = required_path(path, "table", "a .csv, .tsv or .parquet file")
    names, categorical, drop, na_values = map(as_list, (target, categorical, drop, na_values))
    read = partial(read_frame, na_values=na_values, delimiter=delimiter)
    problems = Problems()
    train = read(file, drop=drop, words=categorical, problems=problems)
    _check_columns(train, names, categorical, problems)
    frames = {"train": train}
    if test_path is not None:
        # Columns have the types of the training file, whatever the test file looks like.
        frames["test"] = read(
            existing_path(test_path), keep=list(train.columns), words=word_columns(train, categorical)
        )
    if missing_target == "drop":
        frames = {split: _with_target(frame, names) for split, frame in frames.items()}
    options = {"missing": missing, "unseen": unseen, "na_values": na_values, "delimiter": delimiter}
    features = {split: without(frame, names) for split, frame in frames.items()}
    with problems.noted():
        targets, classes = target_values(frames, names, task)
    for frame in features.values():
        problems.found += frame_problems(frame, categorical, missing)
    problems.raise_any()
    return frame_source(features, targets, classes, categorical, options)


def as_list(names: str | Sequence[str] | None) -> list[str]:
    """One name, several names or None as a list.

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
    """A source from the features and targets of each split; raises for missing values, with rows as in the file."""
    require_choice("missing", options.get("missing", "error"), MISSING_VALUES)
    require_choice("unseen", options.get("unseen", "error"), ("error", "zeros"))
    problems = Problems()
    words = word_columns(frames["train"], categorical)
    for frame in frames.values():
        problems.found += frame_problems(frame, words, options.get("missing", "error"))
    problems.raise_any()
    rows = {split: TableRows(frame, targets[split]) for split, frame in frames.items()}
    learn = partial(_learn, categorical=tuple(categorical), options=options)
    return Source(rows["train"], rows.get("validation"), rows.get("test"), names, learn, encode)


def target_values(
    frames: Mapping[str, Frame], target: Sequence[str], task: str | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Labels (N,) with the names of the classes, or labels (N, L) or reals (N, K) with those of the columns."""
    for frame in frames.values():
        _require_targets(frame, target)
    task = task or guess_task(frames["train"], target)
    if task == "classification":
        return _classes(frames, target)
    if task == "multilabel":
        return {split: _labels(frame, target) for split, frame in frames.items()}, tuple(target)
    return {split: _reals(frame, target) for split, frame in frames.items()}, tuple(target)


def guess_task(frame: Frame, target: Sequence[str]) -> str:
    """Whether targets look like classes or like real numbers.

    >>> guess_task(Frame("t", {"y": np.array([1, 2, 1])}), ["y"])
    'classification'
    """
    if len(target) > 1:
        return "multilabel" if all(_is_yes_or_no(frame[name]) for name in target) else "regression"
    values = frame[target[0]]
    if values.dtype == object or values.dtype == bool:
        return "classification"
    few = values.dtype.kind in "iu" and len(np.unique(values)) <= FEW
    return "classification" if few else "regression"


def encode(inputs: Columns, rows: TableRows) -> TensorExamples:
    """A table's rows as examples."""
    return TensorExamples(inputs.encode(rows.frame), rows.targets)


def frame_problems(frame: Frame, categorical: Sequence[str], missing: str) -> list[str]:
    """All that is wrong with columns: missing values that are not to be filled, infinity, identifiers."""
    problems = Problems()
    words = word_columns(frame, categorical)
    for name in frame.columns:
        with problems.noted():
            if name in words:
                frame.check_words(name, missing)
            else:
                frame.check_numbers(name, missing)
    if problems.found:  # beside these; without, the training split decides what a category is
        for name in words:
            with problems.noted():
                learn_categories(frame, name, name in categorical, NO_WORD)
    return problems.found


def _with_target(frame: Frame, target: Sequence[str]) -> Frame:
    """The rows that have all targets."""
    gaps = np.unique(np.concatenate([missing_rows(frame[name]) for name in target]))
    return frame.take(torch.from_numpy(np.setdiff1d(np.arange(len(frame)), gaps)))


def without(frame: Frame, names: Sequence[str]) -> Frame:
    """A frame without some of its columns."""
    return Frame(frame.name, {name: column for name, column in frame.columns.items() if name not in names})


def _learn(train: TableRows, categorical: Sequence[str], options: Mapping[str, Any]) -> Columns:
    return learn_columns(train.frame, categorical, **options)


def _check_columns(frame: Frame, target: Sequence[str], categorical: Sequence[str], problems: Problems) -> None:
    """Raise unless the columns that are named are there, with the problems noted so far."""
    if len(frame.columns) == 1 and set(next(iter(frame.columns))) & set(";\t|"):
        raise DataError(
            f"{frame.name} has one column, {next(iter(frame.columns))!r}; set delimiter=… to separate its columns"
        )
    named = [("target", name) for name in target] + [("categorical", name) for name in categorical]
    lacking = [(option, name) for option, name in named if name not in frame.columns]
    for option, name in lacking:
        problems.found.append(f"{option}={name!r}: no such column in {frame.name}; {suggest(name, frame.columns)}")
    if not target:
        columns = list_some(frame.columns, 20)
        problems.found.append(f"set target=… to the column of {frame.name} to predict; it has {columns}")
    if lacking or not target:
        problems.raise_any()
    if not set(frame.columns) - set(target):
        problems.raise_any()
        raise DataError(f"{frame.name} has no columns except the target {list_some(target)}; expected features too")


def _classes(frames: Mapping[str, Frame], target: Sequence[str]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Labels, and the sorted names of the classes: by number if all are integers, else alphabetically."""
    if len(target) != 1:
        raise DataError(f"target={list(target)}: expected one column for classification")
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
                f"target {name!r} of {frame.name} has fractions, such as {odd[0]}; expected integers or words "
                "for classes: did you mean task='regression'?"
            )
    return frame.words(name)


def _is_yes_or_no(values: np.ndarray) -> bool:
    return values.dtype == bool or (values.dtype.kind in "iuf" and bool(((values == 0) | (values == 1)).all()))


def _labels(frame: Frame, target: Sequence[str]) -> Tensor:
    """Several labels (N, L); raises for anything but 0 and 1, true and false."""
    for name in target:
        if not _is_yes_or_no(frame[name]):
            raise DataError(
                f"target {name!r} of {frame.name} has other values than 0 and 1, or true and false, such as "
                f"{list_some(sorted(set(map(str, frame[name]))), 5)}; expected these for task='multilabel'"
            )
    return torch.from_numpy(np.stack([frame[name].astype(np.uint8) for name in target], 1))


def _require_targets(frame: Frame, target: Sequence[str]) -> None:
    for name in target:
        gaps = missing_rows(frame[name])
        if len(gaps):
            raise DataError(
                f"target {name!r} of {frame.name} is missing in {len(gaps)} rows (rows {list_some(gaps)}); "
                "remove these rows, or leave them out with missing_target='drop'"
            )


def _reals(frame: Frame, target: Sequence[str]) -> Tensor:
    return torch.from_numpy(np.stack([frame.numbers(name) for name in target], 1))
