"""The errors of a classifier by class: the confusion matrix, and precision and recall of each class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bayesify.lab.data import Classes, targets_from_dict
from bayesify.lab.evaluation.rows import ROWS, damaged
from bayesify.lab.report.figures.model_figures import ModelFigures
from bayesify.lab.report.figures.page_figure import File, as_csv, slug
from bayesify.lab.report.numbers import proportion
from bayesify.lab.run_files import read_preprocessing

MOST_CLASSES = 20
"""With more classes, the most frequent errors are listed instead of the matrix."""
MOST_LISTED = 20
"""The most errors that are listed, and the most classes with their precision and recall."""


@dataclass(frozen=True)
class ClassErrors:
    """What a model takes for what, over the rows of all its runs."""

    name: str
    labels: tuple[str, ...]
    matrix: np.ndarray
    """How many rows of each true class (in rows) get each label (in columns)."""
    key: str
    runs: int = 1

    @classmethod
    def of(cls, model: ModelFigures) -> ClassErrors | None:
        """Those of a model; None unless it predicts one class for each row, and was evaluated by this version."""
        wanted = [f"{model.split}_{name}" for name in ("truth", "label")]
        if not all(name in rows for rows in model.rows_by_run for name in wanted):
            return None
        run = model.row.runs[0]
        targets = targets_from_dict(read_preprocessing(run.folder / "preprocessing.json")["targets"])
        if not isinstance(targets, Classes):
            return None
        labels = targets.names
        matrix = np.zeros((len(labels), len(labels)), dtype=np.int64)
        for rows in model.rows_by_run:
            truth, label = (rows[name] for name in wanted)
            if truth.shape != label.shape:
                raise damaged(run, ROWS, f"its labels have shape {label.shape}; expected {truth.shape}")
            if truth.ndim != 1:
                return None
            pairs = np.stack([truth, label])
            if not ((pairs >= 0) & (pairs < len(labels)) & (pairs % 1 == 0)).all():
                raise damaged(run, ROWS, f"its classes are not {len(labels)}, as in preprocessing.json")
            np.add.at(matrix, tuple(pairs.astype(np.int64)), 1)
        return cls(model.row.name, labels, matrix, slug(model.index + 1, model.row.name), len(model.rows_by_run))

    @property
    def has_matrix(self) -> bool:
        """Whether the classes are few enough for the matrix."""
        return len(self.labels) <= MOST_CLASSES

    @cached_property
    def shares(self) -> np.ndarray:
        """The matrix as shares of the rows of each true class."""
        many: np.ndarray = self.matrix / np.maximum(self.matrix.sum(1, keepdims=True), 1)
        return many

    @property
    def frequent_errors(self) -> list[tuple[str, str, int, float]]:
        """The most frequent errors: the true class, the predicted one, how often, and in which share of the class."""
        wrong = self.matrix - np.diag(np.diag(self.matrix))
        order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_LISTED]
        places = [(int(place // len(self.labels)), int(place % len(self.labels))) for place in order]
        return [(self.labels[i], self.labels[j], int(wrong[i, j]), self.shares[i, j]) for i, j in places if wrong[i, j]]

    @property
    def per_class(self) -> list[tuple[str, int, tuple[str, str], tuple[str, str]]]:
        """Each class with its rows, its precision and its recall; of many classes those with the lowest recall."""
        predicted, true, right = self.matrix.sum(0), self.matrix.sum(1), np.diag(self.matrix)
        lowest_first = np.argsort(np.where(true > 0, np.diag(self.shares), np.inf), kind="stable")
        order = range(len(self.labels)) if self.has_matrix else lowest_first[:MOST_LISTED].tolist()
        found = []
        for k in order:
            precision, recall = (proportion(int(right[k]), int(each[k]), self.runs) for each in (predicted, true))
            found.append((self.labels[k], int(true[k]), precision, recall))
        return found

    @property
    def files(self) -> tuple[File, ...]:
        """The matrix and each class's precision and recall as CSV."""
        predicted, true, right = (
            each.tolist() for each in (self.matrix.sum(0), self.matrix.sum(1), np.diag(self.matrix))
        )
        columns = {f"predicted {label}": self.matrix[:, k].tolist() for k, label in enumerate(self.labels)}
        each = {
            "class": self.labels,
            "rows": true,
            "predicted": predicted,
            "precision": [hit / many if many else None for hit, many in zip(right, predicted, strict=True)],
            "recall": [hit / many if many else None for hit, many in zip(right, true, strict=True)],
        }
        return (
            File(f"confusion-{self.key}.csv", as_csv({"true class": self.labels, **columns})),
            File(f"classes-{self.key}.csv", as_csv(each)),
        )
