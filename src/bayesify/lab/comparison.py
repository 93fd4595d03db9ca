"""Several models on the same data: one table, with means and standard deviations over seeds."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from textwrap import wrap
from typing import Any

from rich.table import Table
from rich.text import Text

from bayesify.errors import BayesifyError
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.methods import PlainPart
from bayesify.lab.runs import Run

SAME = ("name", "path", "validation", "test", "limit", "options")
"""What must be equal for recipes to have the same rows in the same splits; the rest of `data` is about training."""


class CompareError(BayesifyError):
    """Runs or recipes that can't be compared."""


@dataclass(frozen=True)
class Column:
    """One figure of the table: where it is in a run, how it is shown, and which value is the best."""

    key: str
    head: str
    where: tuple[str, ...]
    best: Any = None
    """`min`, `max` or None."""
    digits: int = 3
    scale: float = 1.0

    def show(self, value: float) -> str:
        """The value as the table has it."""
        return f"{self.scale * value:.{self.digits}f}"


CLASSES = (
    Column("accuracy", "accuracy %", ("accuracy",), max, 1, 100),
    Column("nll", "NLL", ("nll",), min),
    Column("ece", "ECE %", ("ece",), min, 1, 100),
    Column("noise_entropy", "noise AUROC entropy %", ("ood", "noise", "entropy"), max, 1, 100),
    Column("noise_epistemic", "noise AUROC epistemic %", ("ood", "noise", "epistemic"), max, 1, 100),
)
REALS = (
    Column("rmse", "RMSE", ("rmse",), min),
    Column("log_density", "log density", ("log_density",), max),
    Column("coverage", "in 90% interval %", ("coverage",), None, 1, 100),
    Column("noise_std", "noise AUROC total %", ("ood", "noise", "std"), max, 1, 100),
    Column("noise_epistemic_std", "noise AUROC epistemic %", ("ood", "noise", "epistemic_std"), max, 1, 100),
)
COSTS = (
    Column("overhead", "added %", ("overhead",), None, 1),
    Column("seconds", "time s", ("seconds",), None, 1),
)


@dataclass(frozen=True)
class Row:
    """One model: its runs, and each figure's value in every run that has it."""

    name: str
    runs: tuple[Run, ...]
    figures: Mapping[str, tuple[float, ...]]

    @property
    def is_plain(self) -> bool:
        """Whether it is an ordinary network."""
        return isinstance(self.runs[0].recipe.method, PlainPart)

    def mean(self, key: str) -> float | None:
        """The mean over the runs."""
        return fmean(self.figures[key]) if self.figures[key] else None

    def sd(self, key: str) -> float | None:
        """The standard deviation over the runs (of the sample, n - 1), where there are at least two."""
        return stdev(self.figures[key]) if len(self.figures[key]) > 1 else None

    def cell(self, column: Column) -> str:
        """Mean±sd as the table shows it."""
        mean, sd = self.mean(column.key), self.sd(column.key)
        if mean is None:
            return "–"
        spread = "" if sd is None or column in COSTS else f"±{column.show(sd)}"
        return f"{column.show(mean)}{spread}"

    def shown(self, column: Column) -> str:
        """The cell with its unit, for a sentence."""
        return f"{self.cell(column)}{'%' if column.head.endswith('%') else ''}"


@dataclass(frozen=True)
class Comparison:
    """Models in rows, figures of one split in columns."""

    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    split: str

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[Run]], split: str | None = None) -> Comparison:
        """What the evaluated runs of each model say, on the test split where there is one unless said."""
        if not any(runs.values()):
            raise CompareError("no run to compare; give at least one")
        every = [run for some in runs.values() for run in some]
        require_same_data({str(run.folder): run.recipe for run in every})
        _require_same_seeds(runs)
        known = [run.metrics for run in every]
        split = _common_split(known, split)
        columns = (*(CLASSES if "nll" in known[0][split] else REALS), *COSTS)
        return cls(tuple(_row(name, some, columns, split) for name, some in runs.items()), columns, split)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the first row's runs."""
        return [run.recipe.seed for run in self.rows[0].runs]

    def is_best(self, row: Row, column: Column) -> bool:
        """Whether no other mean is better, as far as the table shows it."""
        shown = {each.name: column.show(mean) for each in self.rows if (mean := each.mean(column.key)) is not None}
        if column.best is None or row.name not in shown or len(shown) < 2:
            return False
        return shown[row.name] == str(column.best(shown.values(), key=float))

    def table(self) -> Table:
        """For the terminal, with the best values in bold."""
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
        """What the figures are of."""
        n, times = self.rows[0].runs[0].metrics[self.split]["n"], len(self.rows[0].runs)
        spread = f"; mean±sd over {times} seeds" if times > 1 else ""
        return f"{self.split} split of {self.rows[0].runs[0].recipe.data.name}, {n:,} rows{spread}"

    def to_dict(self) -> dict[str, Any]:
        """Every figure with its mean, deviation and values, for JSON."""
        return {"split": self.split, "seeds": self.seeds, "rows": [_plain(row, self.columns) for row in self.rows]}

    def to_csv(self, path: str | Path) -> None:
        """A row per model, with a mean and a deviation per figure."""
        path = Path(path)
        head = ["model", "runs", *(f"{column.key}_{end}" for column in self.columns for end in ("mean", "sd"))]
        part = path.with_name(f"{path.name}.part")
        with part.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            for row in self.rows:
                pairs = [(row.mean(column.key), row.sd(column.key)) for column in self.columns]
                writer.writerow([row.name, len(row.runs), *(value for pair in pairs for value in pair)])
        os.replace(part, path)


def require_same_data(recipes: Mapping[str, Recipe]) -> None:
    """Refuse recipes of different data or splits, naming the first difference."""
    (first, model), *others = recipes.items()
    for name, other in others:
        for key in SAME:
            ours, theirs = getattr(model.data, key), getattr(other.data, key)
            if ours != theirs:
                raise CompareError(
                    f"{first} has data.{key}={ours!r}, {name} {theirs!r}: only models on the same data compare"
                )


def _common_split(metrics: Sequence[Mapping[str, Any]], wanted: str | None) -> str:
    """A split on which every run was evaluated."""
    for split in ("test", "validation") if wanted is None else (wanted,):
        if all(split in each for each in metrics):
            return split
    raise CompareError(f"not all runs were evaluated on {wanted or 'the same split'}; `bayesify evaluate` them so")


def _require_same_seeds(runs: Mapping[str, Sequence[Run]]) -> None:
    """Splits depend on the seed, so other seeds are other test rows."""
    (first, seeds), *others = ((name, sorted(run.recipe.seed for run in some)) for name, some in runs.items())
    for name, other in others:
        if other != seeds:
            raise CompareError(f"{first} has runs of the seeds {seeds}, {name} of {other}: they need the same splits")


def grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by the name of their model: the folder's, or that of the folder around `seed-0`, `seed-1`, …

    >>> list(grouped([Run(Path("demo/Rank1/seed-0")), Run(Path("demo/Rank1/seed-1")), Run(Path("mine"))]))
    ['Rank1', 'mine']
    """
    models: dict[str, list[Run]] = {}
    for run in runs:
        folder = run.folder.resolve()
        models.setdefault(folder.parent.name if folder.name.startswith("seed-") else folder.name, []).append(run)
    return models


def _row(name: str, runs: Sequence[Run], columns: Sequence[Column], split: str) -> Row:
    each = [_flat(run, split) for run in runs]
    found = {column.key: tuple(_at(values, column.where) for values in each) for column in columns}
    return Row(name, tuple(runs), {key: tuple(v for v in values if v is not None) for key, values in found.items()})


def _flat(run: Run, split: str) -> dict[str, Any]:
    metrics = run.metrics
    return {**metrics[split], "overhead": metrics["overhead"], "seconds": run.facts.get("seconds")}


def _at(values: Any, where: tuple[str, ...]) -> Any:
    for key in where:
        values = values[key]
    return values


def _plain(row: Row, columns: Sequence[Column]) -> dict[str, Any]:
    figures = {
        column.key: {"mean": row.mean(column.key), "sd": row.sd(column.key), "values": list(row.figures[column.key])}
        for column in columns
    }
    return {"name": row.name, "runs": [str(run.folder) for run in row.runs], **figures}
