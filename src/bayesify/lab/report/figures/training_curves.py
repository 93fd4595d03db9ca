"""The training curves of a model: NLL on the training and validation rows by epoch, from the log of its first run."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bayesify.lab.comparison import Row
from bayesify.lab.metrics import Curve
from bayesify.lab.report.figures.draw import curves_figure
from bayesify.lab.report.figures.page_figure import PageFigure, slug
from bayesify.lab.runs import RunError

COLUMNS = {"training": "log_likelihood", "validation": "val_nll"}
"""Each curve with its column in the log; the log-likelihood is the negative NLL."""


def training_curves(index: int, row: Row) -> PageFigure | None:
    """The figure; None if nothing was trained, or its log is not there."""
    folder = row.runs[0].folder
    logs = [path for path in (folder / "metrics.csv", *sorted(folder.glob("*/metrics.csv"))) if path.is_file()]
    curves = read_log(logs[0]) if logs else {}
    if not any(len(at) > 1 for at, _ in curves.values()):
        return None
    ends = f"last epoch: {', '.join(f'{name} {nll[-1]:.2g}' for name, (_, nll) in curves.items())}"
    data: dict[str, Sequence[Any]] = {
        "curve": [name for name, (at, _) in curves.items() for _ in at],
        "epoch": [int(each) for at, _ in curves.values() for each in at],
        "nll": [float(each) for _, nll in curves.values() for each in nll],
    }
    key = slug("training", index + 1, row.name)
    figure = curves_figure(curves, "epoch", "NLL")
    return PageFigure.of(figure, key, data, alt=f"{row.name}: NLL by epoch: {ends}", title=row.name, caption=ends)


def read_log(path: Path) -> Mapping[str, Curve]:
    """The curves of a training log, each a mean over the steps of an epoch; epochs are counted from 1."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in COLUMNS}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, column in COLUMNS.items():
                    if row.get(column):
                        found[name].setdefault(int(row["epoch"]) + 1, []).append(float(row[column]))
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise RunError(f"{path}: not a training log ({error}); it was edited or damaged: remove it") from error
    sign = {"training": -1, "validation": 1}
    means = {name: {at: sign[name] * fmean(some) for at, some in epochs.items()} for name, epochs in found.items()}
    finite = {name: {at: nll for at, nll in some.items() if math.isfinite(nll)} for name, some in means.items()}
    return {name: (np.array([*some], float), np.array([*some.values()])) for name, some in finite.items() if some}
