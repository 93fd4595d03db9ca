"""Numbers of the report, with the digits that they deserve by their standard errors."""

from __future__ import annotations

from bayesify.lab.comparison import Row
from bayesify.lab.comparison.chance import Difference, interval, standard_error
from bayesify.lab.comparison.columns import Column
from bayesify.lab.metrics.proportions import exact_interval


def value(row: Row, column: Column) -> str:
    """The mean over runs, or a dash."""
    mean = row.mean(column.key)
    return "–" if mean is None else column.format(mean, standard_error(row, column)).replace("-", "−")


def value_with_unit(row: Row, column: Column) -> str:
    """The value with its unit, for use in a sentence."""
    return f"{value(row, column)}{'%' if column.head.endswith('%') else ''}"


def interval_words(row: Row, column: Column) -> str:
    """The 95% interval of the value; empty if it is not known, or a point."""
    ends, error = interval(row, column), standard_error(row, column)
    shown = [] if ends is None else [column.format(end, error).replace("-", "−") for end in ends]
    return " to ".join(shown) if len(set(shown)) > 1 else ""


def signed(column: Column, difference: float, error: float) -> str:
    """A difference with its sign.

    >>> signed(Column("nll", "NLL", ("nll",)), -0.0123, 0.002), signed(Column("nll", "NLL", ("nll",)), 0.5, 0.1)
    ('−0.0123', '+0.50')
    """
    shown = column.format(difference, error)
    return f"−{shown[1:]}" if shown.startswith("-") else f"+{shown}" if shown.strip("0.,") else shown


def difference_words(found: Difference, column: Column) -> str:
    """A difference with its 95% interval, for use in a sentence."""
    return f"{signed(column, found.mean, found.error)} ({difference_interval(found, column)})"


def difference_interval(found: Difference, column: Column) -> str:
    """The 95% interval of a difference."""
    return " to ".join(signed(column, end, found.error) for end in (found.low, found.high))


def proportion(successes: int, rows: int, runs: int = 1) -> tuple[str, str]:
    """A share in percent over all runs, and its exact 95% interval for as many rows as one of them has.

    Runs of several seeds may share their rows, so that together they are no better evidence than one.

    >>> proportion(97, 100), proportion(0, 0)
    (('97.0', '91.5 to 99.4'), ('–', ''))
    """
    if not rows:
        return "–", ""
    many = max(1, round(rows / runs))
    low, high = exact_interval(round(many * successes / rows), many)
    return share_words(successes / rows, low, high)


def share_words(share: float, low: float, high: float) -> tuple[str, str]:
    """A share in percent and its interval, with as many digits as the interval allows; all and nothing are exact.

    >>> share_words(1.0, 0.985, 1.0)
    ('100', '98.5 to 100')
    """
    column, error = Column("", "%", (), None, 1, 100), (high - low) / 4
    shown = [f"{100 * each:.0f}" if each in (0, 1) else column.format(each, error) for each in (share, low, high)]
    return shown[0], f"{shown[1]} to {shown[2]}"
