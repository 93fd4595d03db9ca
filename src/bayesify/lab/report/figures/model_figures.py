"""The figures about each model: calibration, risk against coverage, and uncertainty of out-of-distribution inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bayesify.lab.comparison.columns import TOTAL_SCORES
from bayesify.lab.comparison.row import Row
from bayesify.lab.evaluation.rows import rows_of_split
from bayesify.lab.metrics import Curve, calibration_bins, risk_coverage
from bayesify.lab.metrics.regression import TAIL
from bayesify.lab.report.figures.draw import (
    histogram,
    quantile_figure,
    reliability_figure,
    risk_figure,
    thin_out,
    uncertainty_figure,
)
from bayesify.lab.report.figures.page_figure import PageFigure, slug

CLASS_LOSS = ("error rate, %", "error_share", 100)
REAL_LOSS = ("root mean square error (standardised)", "rmse_standardised", 1)
"""The risk in selective prediction: the label of its axis, its column in the CSV file, and the factor between them."""


@dataclass(frozen=True)
class ModelFigures:
    """The figures of one model, from the evaluated rows of all its runs."""

    index: int
    row: Row
    split: str

    @cached_property
    def rows_by_run(self) -> list[dict[str, np.ndarray]]:
        """The arrays of evaluated rows, for each run."""
        return [rows_of_split(run, self.split) for run in self.row.runs]

    @property
    def rows_of_a_run(self) -> int:
        """The number of rows of the split."""
        return int(self.row.runs[0].metrics[self.split]["n"])

    @property
    def is_classes(self) -> bool:
        """Whether it predicts classes rather than real numbers."""
        return f"{self.split}_{TOTAL_SCORES[0]}" in self.rows_by_run[0]

    @property
    def has_one_answer(self) -> bool:
        """Whether it predicts one class for each row, which is right or wrong, rather than several labels or pixels."""
        return self.is_classes and all(rows[f"{self.split}_correct"].dtype == bool for rows in self.rows_by_run)

    @property
    def total(self) -> str:
        """The score of total uncertainty."""
        return TOTAL_SCORES[not self.is_classes]

    @property
    def ood_sets(self) -> list[str]:
        """The out-of-distribution sets that every run was evaluated on."""
        sets = self.row.runs[0].metrics[self.split].get("ood", {})
        return [name for name in sets if all(f"{name}_{self.total}" in rows for rows in self.rows_by_run)]

    def array(self, name: str, group: str | None = None) -> np.ndarray:
        """An array of the split, or of an out-of-distribution set, over all runs."""
        return np.concatenate([rows[f"{group or self.split}_{name}"] for rows in self.rows_by_run])

    def calibration(self) -> PageFigure:
        """The reliability diagram; for real targets, the calibration of quantiles."""
        key = slug("calibration", self.index + 1, self.row.name)
        if not self.is_classes:
            return self._quantiles(key)
        confidence, correct = self.array("confidence"), self.array("correct")
        bins = calibration_bins(confidence, correct)
        words = f"mean confidence {100 * confidence.mean():.1f}%, accuracy {100 * correct.mean():.1f}%"
        pairs = zip(bins["confidence"], bins["accuracy"], bins["rows"], strict=True)
        bin_words = (f"accuracy {a:.2f} at confidence {c:.2f} ({rows} rows)" for c, a, rows in pairs)
        alt = f"{self.row.name}: {words}; {'; '.join(bin_words)}"
        data = {name: values.tolist() for name, values in bins.items()}
        return PageFigure.of(reliability_figure(bins), key, data, alt=alt, title=self.row.name, caption=words)

    def _quantiles(self, key: str) -> PageFigure:
        below = np.sort(self.array("quantile").ravel())
        share = float(((below > TAIL) & (below < 1 - TAIL)).mean())
        words = f"{100 * share:.1f}% of targets are in the 90% interval"
        quantile, below_share = thin_out((below, np.linspace(0, 1, below.size)))
        alt = f"{self.row.name}: share of targets below each predicted quantile; {words}"
        data = {"quantile": quantile.tolist(), "share_below": below_share.tolist()}
        figure = quantile_figure(quantile, below_share)
        return PageFigure.of(figure, key, data, alt=alt, title=self.row.name, caption=words)

    def risk(self) -> Curve:
        """The risk-coverage curve: the error on the most certain inputs, against their share."""
        if self.is_classes:
            return thin_out(risk_coverage(self.array("entropy"), 1.0 - self.array("correct")))
        coverage, squares = risk_coverage(self.array("std"), self.array("error") ** 2)
        return thin_out((coverage, np.sqrt(squares)))

    def uncertainty(self) -> PageFigure:
        """Histograms of total uncertainty: the split against each out-of-distribution set."""
        values = {self.split: self.array(self.total)} | {name: self.array(self.total, name) for name in self.ood_sets}
        edges, shares = histogram(list(values.values()))
        score = "entropy, nats" if self.is_classes else "standard deviation (standardised)"
        medians = [f"{np.median(each):.2f} on {name}" for name, each in values.items()]
        words = f"median {', '.join(medians)}"
        figure = uncertainty_figure(edges, dict(zip(values, shares, strict=True)), score)
        named = {f"{name}_percent": share.tolist() for name, share in zip(values, shares, strict=True)}
        data = {"from": edges[:-1].tolist(), "to": edges[1:].tolist(), **named}
        key, alt = slug("uncertainty", self.index + 1, self.row.name), f"{self.row.name}: histogram of {score}; {words}"
        return PageFigure.of(figure, key, data, alt=alt, title=self.row.name, caption=words)


def risk_figure_of(models: Sequence[ModelFigures]) -> PageFigure:
    """The risk-coverage curves of all models in one figure."""
    curves = {model.row.name: model.risk() for model in models}
    loss, column, scale = CLASS_LOSS if models[0].is_classes else REAL_LOSS
    found = {name: [scale * float(np.interp(share, *curve)) for share in (0.5, 1)] for name, curve in curves.items()}
    ends = (f"{name} {half:.2f} at 50%, {full:.2f} at 100%" for name, (half, full) in found.items())
    alt = f"{loss} against coverage, most certain inputs first: {'; '.join(ends)}."
    named = [name for name, (coverage, _) in curves.items() for _ in coverage]
    coverage, risk = (np.concatenate(parts).tolist() for parts in zip(*curves.values(), strict=True))
    data = {"model": named, "coverage_share": coverage, column: risk}
    return PageFigure.of(risk_figure(curves, loss, scale), "risk", data, alt=alt, legend=False)
