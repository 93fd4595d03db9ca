"""The tables of the report, which can be sorted by any column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from bayesify.lab.comparison.columns import Column
from bayesify.lab.comparison.table import Comparison


@dataclass(frozen=True)
class Table:
    """Some columns of a comparison, with an id and a name on the page."""

    key: str
    name: str
    columns: tuple[Column, ...]

    @property
    def spans(self) -> list[tuple[str, int]]:
        """The shared headings, each with the number of columns it spans; none if no column has one."""
        found = [(over, len(list(some))) for over, some in groupby(self.columns, lambda column: column.over)]
        return found if any(over for over, _ in found) else []


def table(comparison: Comparison, group: str, name: str) -> Table | None:
    """The table of a group of metrics, if runs have any of them."""
    columns = comparison.groups.get(group)
    return Table(group.replace(" ", "-"), name, columns) if columns else None


def direction(column: Column) -> str:
    """The order of the first click on a heading: best value first, or ascending if no value is best."""
    return "descending" if column.best is max else "ascending"


def any_intervals(comparison: Comparison, columns: Sequence[Column]) -> bool:
    """Whether cells of these columns have bootstrap intervals."""
    return any(row.interval(column) for row in comparison.rows for column in columns)


def breaks(text: str) -> Markup:
    """Text with line-break opportunities inside camel-case or underscored names, and before ±.

    >>> print(breaks("BatchEnsemble_2"), breaks("<b>"), breaks("0.31±0.02"))
    Batch<wbr>Ensemble_<wbr>2 &lt;b&gt; 0.31<wbr>±0.02
    """
    return Markup("<wbr>").join(re.split(r"(?<=[_/])|(?<=[a-z0-9])(?=[A-Z])|(?=±)", text))
