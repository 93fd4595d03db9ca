"""The tables of the report, which can be sorted by any column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from bayesify.lab.comparison.chance import difference
from bayesify.lab.comparison.columns import COST, Column
from bayesify.lab.comparison.row import Row
from bayesify.lab.comparison.table import Comparison
from bayesify.lab.report.numbers import difference_interval, interval_words, signed, value


@dataclass(frozen=True)
class Cell:
    """A number with what is below it: its interval, or the difference from the reference with its interval."""

    text: str
    sorts_by: float | None
    below: tuple[str, ...] = ()
    is_best: bool = False


@dataclass(frozen=True)
class Table:
    """Some columns of a comparison, with an id and a name on the page."""

    key: str
    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    caption: str

    @classmethod
    def of(cls, comparison: Comparison, key: str, name: str, columns: Sequence[Column]) -> Table:
        """The table, whose values are compared with those of the best plain network, or of the first model."""
        reference = reference_row(comparison)
        rows = [
            (row.name, tuple(_cell(comparison, row, reference, column) for column in columns))
            for row in comparison.rows
        ]
        return cls(key, name, tuple(columns), tuple(rows), _caption(comparison, reference, rows))

    @property
    def spans(self) -> list[tuple[str, int]]:
        """The shared headings, each with the number of columns it spans; none if no column has one."""
        found = [(over, len(list(some))) for over, some in groupby(self.columns, lambda column: column.over)]
        return found if any(over for over, _ in found) else []


def table(comparison: Comparison, group: str, name: str) -> Table | None:
    """The table of a group of metrics, if runs have any of them."""
    columns = comparison.groups.get(group)
    return Table.of(comparison, group.replace(" ", "-"), name, columns) if columns else None


def reference_row(comparison: Comparison) -> Row:
    """The model that others are compared with: the first plain network, or the first model."""
    return next((row for row in comparison.rows if row.is_plain), comparison.rows[0])


def _cell(comparison: Comparison, row: Row, reference: Row, column: Column) -> Cell:
    found = None if row is reference or column.best is None else difference(row, reference, column)
    if found is None:
        below = () if column in COST else tuple(filter(None, [interval_words(row, column)]))
    else:
        below = f"Δ {signed(column, found.mean, found.error)}", difference_interval(found, column)
    return Cell(value(row, column), row.mean(column.key), below, comparison.is_best(row, column))


def _caption(comparison: Comparison, reference: Row, rows: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    below = [words for _, cells in rows for cell in cells for words in cell.below]
    if not below:
        return ""
    over = f" over {len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else ""
    if not any(words.startswith("Δ") for words in below):
        return f", with 95% intervals{over}"
    return f", with the difference Δ from {reference.name} and 95% intervals{over}"


def direction(column: Column) -> str:
    """The order of the first click on a heading: best value first, or ascending if no value is best."""
    return "descending" if column.best is max else "ascending"


def breaks(text: str) -> Markup:
    """Text with line-break opportunities inside camel-case or underscored names.

    >>> print(breaks("BatchEnsemble_2"), breaks("<b>"))
    Batch<wbr>Ensemble_<wbr>2 &lt;b&gt;
    """
    return Markup("<wbr>").join(re.split(r"(?<=[_/])|(?<=[a-z0-9])(?=[A-Z])", text))
