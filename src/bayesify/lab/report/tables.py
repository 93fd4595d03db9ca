"""Tables of the page, which sort by any column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from bayesify.lab.comparison import Comparison
from bayesify.lab.measures import Column


@dataclass(frozen=True)
class Table:
    """Some columns of a comparison, with an id and a name of its own on the page."""

    key: str
    name: str
    columns: tuple[Column, ...]

    @property
    def spans(self) -> list[tuple[str, int]]:
        """The headings over columns, with the number of columns each is over; none where no column has one."""
        found = [(over, len(list(some))) for over, some in groupby(self.columns, lambda column: column.over)]
        return found if any(over for over, _ in found) else []


def table(comparison: Comparison, group: str, name: str) -> Table | None:
    """The table of a group, where runs have any of its figures."""
    columns = comparison.groups.get(group)
    return Table(group.replace(" ", "-"), name, columns) if columns else None


def direction(column: Column) -> str:
    """How a column is sorted first: the best value at the top, and where none is best, the smallest."""
    return "descending" if column.best is max else "ascending"


def any_intervals(comparison: Comparison, columns: Sequence[Column]) -> bool:
    """Whether cells of these columns have bootstrap intervals."""
    return any(row.interval(column) for row in comparison.rows for column in columns)


def breaks(text: str) -> Markup:
    """Text that may be broken where names have a joint, and before a deviation.

    >>> print(breaks("BatchEnsemble_2"), breaks("<b>"), breaks("0.31±0.02"))
    Batch<wbr>Ensemble_<wbr>2 &lt;b&gt; 0.31<wbr>±0.02
    """
    return Markup("<wbr>").join(re.split(r"(?<=[_/])|(?<=[a-z0-9])(?=[A-Z])|(?=±)", text))
