"""Several models on the same data: one table, with means and standard deviations over seeds."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from textwrap import wrap
from typing import Any

from rich.table import Table
from rich.text import Text

from bayesify.errors import BayesifyError
from bayesify.lab.measures import COST, OF_DRAWS, Column, groups, main_columns, shares_rejected
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.methods import PlainPart, TemperaturePart
from bayesify.lab.runs import Run

SAME = ("name", "path", "validation", "test", "limit", "options")
"""What must be equal for recipes to have the same rows in the same splits; the rest of `data` is about training."""


class CompareError(BayesifyError):
    """Runs or recipes that can't be compared."""


@dataclass(frozen=True)
class Row:
    """One model: its runs in the order of their seeds, and each figure's value in every run, None where it has none."""

    name: str
    runs: tuple[Run, ...]
    values: Mapping[str, tuple[float | None, ...]]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of one run alone: the 95% bootstrap interval of each figure that has one."""

    @property
    def is_plain(self) -> bool:
        """Whether it is an ordinary network."""
        return isinstance(self.runs[0].recipe.method, PlainPart)

    @property
    def is_bayesian(self) -> bool:
        """Whether it is more than an ordinary network, perhaps with another temperature."""
        return not isinstance(self.runs[0].recipe.method, (PlainPart, TemperaturePart))

    @property
    def figures(self) -> dict[str, tuple[float, ...]]:
        """Each figure's value in every run that has it."""
        return {key: tuple(v for v in values if v is not None) for key, values in self.values.items()}

    def pairs(self, other: Row, key: str) -> list[tuple[float, float]]:
        """A figure of both models, for each seed for which both have it."""
        both = zip(self.values.get(key, ()), other.values.get(key, ()), strict=True)
        return [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]

    def mean(self, key: str) -> float | None:
        """The mean over the runs."""
        return fmean(values) if (values := self.figures.get(key)) else None

    def sd(self, key: str) -> float | None:
        """The standard deviation over the runs (of the sample, n - 1), where there are at least two."""
        return stdev(values) if len(values := self.figures.get(key, ())) > 1 else None

    def cell(self, column: Column) -> str:
        """Mean±sd as the table shows it."""
        mean, sd = self.mean(column.key), self.sd(column.key)
        if mean is None:
            return "–"
        spread = "" if sd is None or column in COST else f"±{column.show(sd)}"
        return f"{column.show(mean)}{spread}"

    def interval(self, column: Column) -> str:
        """Where one run is all there is: what its figure may be on other rows, from – to; else nothing."""
        ends = self.intervals.get(column.key) if self.figures.get(column.key) else None
        return "" if ends is None else " – ".join(map(column.show, ends))

    def shown(self, column: Column) -> str:
        """The cell with its unit, for a sentence."""
        return f"{self.cell(column)}{'%' if column.head.endswith('%') else ''}"


@dataclass(frozen=True)
class Comparison:
    """Models in rows, figures of one split in columns: the main ones, and others by what they are about."""

    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    split: str
    groups: Mapping[str, tuple[Column, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[Run]], split: str | None = None) -> Comparison:
        """What the evaluated runs of each model say, on the test split where there is one unless said."""
        if not any(runs.values()):
            raise CompareError("no run to compare; give at least one")
        runs = {name: sorted(some, key=lambda run: run.recipe.seed) for name, some in runs.items()}
        every = [run for some in runs.values() for run in some]
        require_same_data({str(run.folder): run.recipe for run in every})
        _require_same_seeds(runs)
        known = {run.folder: _metrics(run) for run in every}
        split = _common_split(list(known.values()), split)
        flat = {run.folder: _flat(run, known[run.folder], split) for run in every}
        _add_relative(runs, flat)
        columns, others = main_columns(list(flat.values())), groups(list(flat.values()))
        wanted = _once([*columns, *chain(*others.values())])
        rows = (_row(name, some, wanted, [flat[run.folder] for run in some]) for name, some in runs.items())
        return cls(tuple(rows), columns, split, others)

    @property
    def every(self) -> tuple[Column, ...]:
        """All columns, each once: the main ones first."""
        return _once([*self.columns, *chain(*self.groups.values())])

    @property
    def seeds(self) -> list[int]:
        """The seeds of the first row's runs."""
        return [run.recipe.seed for run in self.rows[0].runs]

    def is_best(self, row: Row, column: Column) -> bool:
        """Whether no other mean is better, as far as the table shows it."""
        shown = {each.name: column.show(mean) for each in self.rows if (mean := each.mean(column.key)) is not None}
        if column.best is None or row.name not in shown or len(set(shown.values())) < 2:
            return False
        return shown[row.name] == str(column.best(shown.values(), key=_number))

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
        return {"split": self.split, "seeds": self.seeds, "rows": [_plain(row, self.every) for row in self.rows]}

    def to_csv(self, path: str | Path) -> None:
        """A row per model, with a mean and a deviation per figure."""
        path = Path(path)
        part = path.with_name(f"{path.name}.part")
        part.write_text(self.csv(), newline="")
        os.replace(part, path)

    def csv(self) -> str:
        """What `to_csv` writes."""
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow(["model", "runs", *(f"{column.key}_{end}" for column in self.every for end in ("mean", "sd"))])
        for row in self.rows:
            pairs = [(row.mean(column.key), row.sd(column.key)) for column in self.every]
            writer.writerow([row.name, len(row.runs), *(value for pair in pairs for value in pair)])
        return file.getvalue()


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


def _metrics(run: Run) -> dict[str, Any]:
    if not (run.folder / "metrics.json").exists():
        _require_rows(run)
        do = "evaluate" if run.model_file.exists() else "train --resume"
        state = "not evaluated" if run.model_file.exists() else "not trained to the end"
        raise CompareError(f"{run.folder}: {state}; `bayesify {do} {run.folder}` does it")
    return run.metrics


def _require_rows(run: Run) -> None:
    """Refuse a run that no evaluation can measure, as far as its data is at hand."""
    rows = 1
    with suppress(BayesifyError, OSError):
        data = run.data()
        rows = len(data.validation) + len(data.test)
    if not rows:
        raise CompareError(
            f"{run.folder}: its data has neither validation nor test rows, so nothing can be measured; train with "
            "data.validation or data.test above 0"
        )


def _once(columns: Iterable[Column]) -> tuple[Column, ...]:
    found: dict[str, Column] = {}
    for column in columns:
        found.setdefault(column.key, column)
    return tuple(found.values())


def _row(name: str, runs: Sequence[Run], columns: Sequence[Column], each: Sequence[Mapping[str, Any]]) -> Row:
    found = {column.key: tuple(column.of(values) for values in each) for column in columns}
    ends = {column.key: column.interval_of(each[0]) for column in columns if len(each) == 1}
    return Row(name, tuple(runs), found, {key: pair for key, pair in ends.items() if pair is not None})


def _flat(run: Run, metrics: Mapping[str, Any], split: str) -> dict[str, Any]:
    """What is known of a run on a split, and what its model costs."""
    costs = {key: metrics[key] for key in ("overhead", "parameters", "draws") if key in metrics}
    noticed = shares_rejected(metrics[split].get("ood", {}))
    known = {**costs, **metrics[split], "rejected": noticed, "seconds": run.facts.get("seconds")}
    return {key: None if known.get("draws") == 1 and key in OF_DRAWS else value for key, value in known.items()}


def _number(shown: str) -> float:
    return float(shown.replace(",", ""))


def _add_relative(runs: Mapping[str, Sequence[Run]], flat: Mapping[Path, dict[str, Any]]) -> None:
    """Give each run its errors on corrupted inputs relative to those of the first plain network with its seed."""
    every = [run for some in runs.values() for run in some]
    plain = {run.recipe.seed: flat[run.folder] for run in reversed(every) if isinstance(run.recipe.method, PlainPart)}
    for run in every:
        ours, theirs = flat[run.folder], plain.get(run.recipe.seed, {})
        if "corrupted" in ours and "corrupted" in theirs and ours.get("shift_rows") == theirs.get("shift_rows"):
            ours["relative"] = _relative(ours, theirs)


def _relative(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, float]:
    """mCE and rmCE, each unless the plain network leaves nothing to be relative to."""
    from bayesify.lab.shift import ShiftError, mean_corruption_error, relative_mean_corruption_error

    shift, reference, found = ours["shift"], plain["shift"], {}
    with suppress(ShiftError):  # a plain network without error
        found["mce"] = mean_corruption_error(shift, reference)
    with suppress(ShiftError):  # one that some corruption does no harm
        found["rmce"] = relative_mean_corruption_error(shift, _unshifted(ours), reference, _unshifted(plain))
    return found


def _unshifted(found: Mapping[str, Any]) -> float:
    """The accuracy on the rows whose corruptions were measured, as they were."""
    clean: dict[str, float] = next(iter(found["shift"].values())).get("0", found)
    return clean["accuracy"]


def _plain(row: Row, columns: Sequence[Column]) -> dict[str, Any]:
    figures = {
        column.key: {"mean": row.mean(column.key), "sd": row.sd(column.key), "values": list(row.figures[column.key])}
        for column in columns
    }
    return {"name": row.name, "runs": [str(run.folder) for run in row.runs], **figures}
