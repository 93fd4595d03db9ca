"""One model's evaluated rows, and the figures that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bayesify.lab.comparison import Row
from bayesify.lab.evaluation import rows_of
from bayesify.lab.measures import TOTALS
from bayesify.lab.metrics import Curve, calibration_bins, risk_coverage
from bayesify.lab.report.drawings import (
    histogram,
    quantile_figure,
    reliability_figure,
    risk_figure,
    uncertainty_figure,
)
from bayesify.lab.report.picture import Picture, slug

CLASS_LOSS = ("errors, %", "error_share", 100)
REAL_LOSS = ("root mean square error (standardised)", "rmse_standardised", 1)
"""The risk of selective prediction: its axis, its column in the file, and what makes the one of the other."""
POINTS = 400
"""A curve has at most so many points, which is more than a figure can show."""


@dataclass(frozen=True)
class Model:
    """One model of the page: its row of the table, and the rows of all its runs together."""

    index: int
    row: Row
    split: str

    @cached_property
    def each(self) -> list[dict[str, np.ndarray]]:
        """The evaluated rows of each run."""
        return [rows_of(run) for run in self.row.runs]

    @property
    def is_classes(self) -> bool:
        """Whether it predicts classes rather than real numbers."""
        return f"{self.split}_{TOTALS[0]}" in self.each[0]

    @property
    def total(self) -> str:
        """The score that is total uncertainty."""
        return TOTALS[not self.is_classes]

    @property
    def strange(self) -> list[str]:
        """The sets that every run was set against."""
        sets = self.row.runs[0].metrics[self.split].get("ood", {})
        return [name for name in sets if all(f"{name}_{self.total}" in rows for rows in self.each)]

    def of(self, name: str, group: str | None = None) -> np.ndarray:
        """An array of the split, or of a strange set, over all runs."""
        return np.concatenate([rows[f"{group or self.split}_{name}"] for rows in self.each])

    def calibration(self) -> Picture:
        """The reliability diagram, or the quantiles of real targets."""
        key = slug("calibration", self.index + 1, self.row.name)
        if not self.is_classes:
            return self._quantiles(key)
        confidence, correct = self.of("confidence"), self.of("correct")
        bins = calibration_bins(confidence, correct)
        words = f"{100 * confidence.mean():.1f}% sure on average, {100 * correct.mean():.1f}% right"
        pairs = zip(bins["confidence"], bins["accuracy"], bins["rows"], strict=True)
        told = (f"of {rows} rows at confidence {c:.2f}, {a:.2f} are right" for c, a, rows in pairs)
        alt = f"{self.row.name}: {words}; {'; '.join(told)}"
        data = {name: values.tolist() for name, values in bins.items()}
        return Picture.of(reliability_figure(bins), key, data, alt=alt, title=self.row.name, caption=words)

    def _quantiles(self, key: str) -> Picture:
        below = np.sort(self.of("quantile").ravel())
        share = float(((below > 0.05) & (below < 0.95)).mean())
        words = f"{100 * share:.1f}% of targets are in the 90% interval"
        quantile, so_many = thinned((below, np.linspace(0, 1, below.size)))
        alt = f"{self.row.name}: share of targets below each predicted quantile; {words}"
        data = {"quantile": quantile.tolist(), "share_below": so_many.tolist()}
        figure = quantile_figure(quantile, so_many)
        return Picture.of(figure, key, data, alt=alt, title=self.row.name, caption=words)

    def risk(self) -> Curve:
        """The error that is left against the share of inputs answered, the most certain first."""
        if self.is_classes:
            return thinned(risk_coverage(self.of("entropy"), 1.0 - self.of("correct")))
        coverage, squares = risk_coverage(self.of("std"), self.of("error") ** 2)
        return thinned((coverage, np.sqrt(squares)))

    def uncertainty(self) -> Picture:
        """Histograms of total uncertainty: the split's beside that of each strange set."""
        values = {self.split: self.of(self.total)} | {name: self.of(self.total, name) for name in self.strange}
        edges, shares = histogram(list(values.values()))
        score = "entropy, nats" if self.is_classes else "standard deviation (standardised)"
        medians = [f"{np.median(each):.2f} on {name}" for name, each in values.items()]
        words = f"median {', '.join(medians)}"
        figure = uncertainty_figure(edges, dict(zip(values, shares, strict=True)), score)
        named = {f"{name}_percent": share.tolist() for name, share in zip(values, shares, strict=True)}
        data = {"from": edges[:-1].tolist(), "to": edges[1:].tolist(), **named}
        key, alt = slug("uncertainty", self.index + 1, self.row.name), f"{self.row.name}: histogram of {score}; {words}"
        return Picture.of(figure, key, data, alt=alt, title=self.row.name, caption=words)


def risk_picture(models: Sequence[Model]) -> Picture:
    """Risk against coverage, one figure for all models, so that they can be told apart."""
    curves = {model.row.name: model.risk() for model in models}
    loss, column, scale = CLASS_LOSS if models[0].is_classes else REAL_LOSS
    found = {name: [scale * float(np.interp(share, *curve)) for share in (0.5, 1)] for name, curve in curves.items()}
    ends = (f"{name} {half:.2f} at half, {all_of_it:.2f} at all" for name, (half, all_of_it) in found.items())
    alt = f"{loss} of the most certain inputs against the share answered: {'; '.join(ends)}."
    named = [name for name, (coverage, _) in curves.items() for _ in coverage]
    coverage, risk = (np.concatenate(parts).tolist() for parts in zip(*curves.values(), strict=True))
    data = {"model": named, "coverage_share": coverage, column: risk}
    return Picture.of(risk_figure(curves, loss, scale), "risk", data, alt=alt, legend=False)


def thinned(curve: Curve, most: int = POINTS) -> Curve:
    """A curve with at most so many points, evenly spread, with its first and its last.

    >>> [each.tolist() for each in thinned((np.arange(5), np.arange(5) ** 2), 3)]
    [[0, 2, 4], [0, 4, 16]]
    """
    x, y = curve
    kept = np.unique(np.linspace(0, len(x) - 1, min(most, len(x))).round().astype(int))
    return x[kept], y[kept]
