"""What each model is worth, in words: how right, how calibrated, and what it notices."""

from __future__ import annotations

from bayesify.lab.comparison import Comparison, Row
from bayesify.lab.measures import REALS, Column, rejected
from bayesify.lab.report.verdict import best_row, judge, listed


def claim(row: Row, comparison: Comparison, sets: list[str]) -> str:
    """One model in one sentence, by the means of its runs.

    Strange inputs are those less certain, by total uncertainty, than all but 5% of the split's.
    """
    return f"{row.name}: {_worth(row, comparison, sets)}."


def best_claim(comparison: Comparison, sets: list[str]) -> str:
    """The claim of the model with the best NLL, or RMSE, where there are several."""
    row = best_row(comparison)
    if len(comparison.rows) == 1:
        return claim(row, comparison, sets)
    return f"Best by {judge(comparison).head}: {row.name}, {_worth(row, comparison, sets)}."


def _worth(row: Row, comparison: Comparison, sets: list[str]) -> str:
    parts = _regression(row) if comparison.columns[0] in REALS else _classification(row, comparison)
    noticed = [f"{_share(row, rejected(name))} of {name}" for name in sets if row.mean(rejected(name).key) is not None]
    return f"{parts}; rejects {listed(noticed)} at 5% false alarms" if noticed else parts


def _classification(row: Row, comparison: Comparison) -> str:
    accuracy, _, ece = comparison.columns[:3]
    return f"{_share(row, accuracy)} right, calibrated to {_share(row, ece)}"


def _regression(row: Row) -> str:
    rmse, _, coverage = REALS[:3]
    mean = row.mean(rmse.key)
    assert mean is not None, "every run has it"
    return f"RMSE {rmse.show(mean)}, {_share(row, coverage)} of targets in the 90% interval"


def _share(row: Row, column: Column) -> str:
    mean = row.mean(column.key)
    assert mean is not None, "every run has it"
    return f"{column.show(mean)}%"
