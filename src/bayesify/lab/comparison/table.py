"""`Comparison`: the table of several models on the same data, with means and standard deviations over seeds."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.table import Table
from rich.text import Text

from bayesify.errors import BayesifyError
from bayesify.lab.comparison.chance import beats, interval
from bayesify.lab.comparison.columns import DRAW_METRICS, Column, groups, main_columns, rejection_rates
from bayesify.lab.comparison.corruption_errors import add_corruption_errors
from bayesify.lab.comparison.row import Row
from bayesify.lab.data.spreadsheets import safe_cell
from bayesify.lab.recipes import Recipe
from bayesify.lab.run_files import write_file
from bayesify.lab.runs import Run

SAME_KEYS = ("name", "path", "validation", "test", "calibration", "limit", "options")
"""The keys of `data` that decide which rows are in which split; recipes must agree on them to be compared."""


class CompareError(BayesifyError):
    """Runs or recipes that can't be compared."""


@dataclass(frozen=True)
class Comparison:
    """Models in rows, metrics of one split in columns.

    Attributes:
        rows: The models.
        columns: The main metrics and the costs.
        split: The split that the metrics are from.
        groups: Further metrics, by topic.
    """

    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    split: str
    groups: Mapping[str, tuple[Column, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[Run]], split: str | None = None) -> Comparison:
        """Compare evaluated runs.

        Args:
            runs: The runs of each model, by its name; all models need runs of the same seeds.
            split: The split to compare on; by default `test`, or `validation` if not all runs have test metrics.

        Returns:
            The comparison.

        Raises:
            CompareError: If the runs differ in data or seeds, or some are not evaluated on the split.
        """
        if not any(runs.values()):
            raise CompareError("no runs to compare; give at least one")
        runs = {name: sorted(some, key=lambda run: run.recipe.seed) for name, some in runs.items()}
        all_runs = [run for some in runs.values() for run in some]
        require_same_data({str(run.folder): run.recipe for run in all_runs})
        _require_same_seeds(runs)
        known = {run.folder: _metrics(run) for run in all_runs}
        split = _common_split(list(known.values()), split)
        flat = {run.folder: _flat(run, known[run.folder], split) for run in all_runs}
        add_corruption_errors(runs, flat)
        columns, others = main_columns(list(flat.values())), groups(list(flat.values()))
        every = _unique([*columns, *chain(*others.values())])
        rows = (_row(name, some, split, every, [flat[run.folder] for run in some]) for name, some in runs.items())
        return cls(tuple(rows), columns, split, others)

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """All columns, each once, the main ones first."""
        return _unique([*self.columns, *chain(*self.groups.values())])

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs, which all models share."""
        return [run.recipe.seed for run in self.rows[0].runs]

    def is_best(self, row: Row, column: Column) -> bool:
        """Whether it is better than every other model that has the metric, beyond chance."""
        others = [each for each in self.rows if each is not row and each.mean(column.key) is not None]
        if not others or interval(row, column) is None:
            return False
        return all(beats(row, other, column) for other in others)

    def table(self) -> Table:
        """The table for the terminal, with values in bold that are the best beyond chance."""
        table = Table(box=None, pad_edge=False, collapse_padding=True, caption=self.caption, caption_justify="left")
        table.add_column(
            "", overflow="fold", vertical="bottom", min_width=min(18, max(len(row.name) for row in self.rows))
        )
        for column in self.columns:
            head = "\n".join(wrap(column.head, 8, break_long_words=False))
            table.add_column(head, justify="right", vertical="bottom", no_wrap=True)
        for row in self.rows:
            cells = [(row.cell(column), self.is_best(row, column)) for column in self.columns]
            table.add_row(Text(row.name), *(Text(cell, "bold" if best else "") for cell, best in cells))
        return table

    @property
    def caption(self) -> str:
        """The split, the data set, the number of rows and of seeds."""
        n, times = self.rows[0].runs[0].metrics[self.split]["n"], len(self.rows[0].runs)
        spread = f"; mean±sd over {times} seeds" if times > 1 else ""
        return f"{self.split} split of {self.rows[0].runs[0].recipe.data.name}, {n:,} rows{spread}"

    def to_dict(self) -> dict[str, Any]:
        """Every metric with its mean, standard deviation and values, for JSON."""
        return {
            "split": self.split,
            "seeds": self.seeds,
            "rows": [_row_dict(row, self.all_columns) for row in self.rows],
        }

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file: a row per model, with the mean and the standard deviation of each metric."""
        write_file(Path(path), self.csv())

    def csv(self) -> str:
        """The text that `to_csv` writes."""
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow(
            [
                "model",
                "runs",
                *(safe_cell(f"{column.key}_{end}") for column in self.all_columns for end in ("mean", "sd")),
            ]
        )
        for row in self.rows:
            pairs = [(row.mean(column.key), row.sd(column.key)) for column in self.all_columns]
            writer.writerow([safe_cell(row.name), len(row.runs), *(value for pair in pairs for value in pair)])
        return file.getvalue()


def require_same_data(recipes: Mapping[str, Recipe]) -> None:
    """Raise if recipes have different data or splits, naming the first difference."""
    (first, model), *others = recipes.items()
    for name, other in others:
        for key in SAME_KEYS:
            ours, theirs = getattr(model.data, key), getattr(other.data, key)
            if ours != theirs:
                raise CompareError(
                    f"{first} has data.{key}={ours!r} and {name} has {theirs!r}; compare models on the same data"
                )


def _common_split(metrics: Sequence[Mapping[str, Any]], wanted: str | None) -> str:
    """A split on which every run was evaluated."""
    for split in ("test", "validation") if wanted is None else (wanted,):
        if all(split in each for each in metrics):
            return split
    raise CompareError(f"not all runs were evaluated on {wanted or 'the same split'}; run `bayesify evaluate` first")


def _require_same_seeds(runs: Mapping[str, Sequence[Run]]) -> None:
    """Raise if models have runs of different seeds, and so different test rows."""
    (first, seeds), *others = ((name, sorted(run.recipe.seed for run in some)) for name, some in runs.items())
    for name, other in others:
        if other != seeds:
            raise CompareError(
                f"{first} has runs with seeds {seeds}, {name} with {other}: give the same seeds, for the same splits"
            )


def _metrics(run: Run) -> dict[str, Any]:
    if not (run.folder / "metrics.json").exists():
        _require_rows(run)
        command = "evaluate" if run.model_file.exists() else "train --resume"
        state = "not evaluated yet" if run.model_file.exists() else "training has not finished"
        raise CompareError(f"{run.folder}: {state}; run `bayesify {command} {run.folder}`")
    return run.metrics


def _require_rows(run: Run) -> None:
    """Raise if a run can't be evaluated because its data have neither validation nor test rows."""
    rows = 1
    with suppress(BayesifyError, OSError):
        data = run.data()
        rows = len(data.validation) + len(data.test)
    if not rows:
        raise CompareError(
            f"{run.folder}: no validation or test rows to evaluate on; train with data.validation or data.test above 0"
        )


def _unique(columns: Iterable[Column]) -> tuple[Column, ...]:
    found: dict[str, Column] = {}
    for column in columns:
        found.setdefault(column.key, column)
    return tuple(found.values())


def _row(
    name: str, runs: Sequence[Run], split: str, columns: Sequence[Column], each: Sequence[Mapping[str, Any]]
) -> Row:
    found = {column.key: tuple(column.of(values) for values in each) for column in columns}
    ends = {column.key: column.interval_of(each[0]) for column in columns if len(each) == 1}
    return Row(name, tuple(runs), found, {key: pair for key, pair in ends.items() if pair is not None}, split)


def _flat(run: Run, metrics: Mapping[str, Any], split: str) -> dict[str, Any]:
    """The metrics of a run on a split together with what its model costs, without those that one draw does not have."""
    costs = {key: metrics[key] for key in ("overhead", "parameters", "draws") if key in metrics}
    rejection = rejection_rates(metrics[split].get("ood", {}))
    known = {**costs, **metrics[split], "rejected": rejection, "seconds": run.facts.get("seconds")}
    return {key: None if known.get("draws") == 1 and key in DRAW_METRICS else value for key, value in known.items()}


def _row_dict(row: Row, columns: Sequence[Column]) -> dict[str, Any]:
    figures = {
        column.key: {
            "mean": row.mean(column.key),
            "sd": row.sd(column.key),
            "values": list(row.measured_values[column.key]),
        }
        for column in columns
    }
    return {"name": row.name, "runs": [str(run.folder) for run in row.runs], **figures}
