"""One page about one or more runs, in a single file that needs no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

import bayesify as by
from bayesify.lab.comparison import Comparison, Row, grouped
from bayesify.lab.evaluation import rows_of
from bayesify.lab.figures import (
    as_svg,
    calibration_bins,
    quantile_figure,
    reliability_figure,
    risk_coverage,
    risk_figure,
    uncertainty_figure,
)
from bayesify.lab.runs import Run
from bayesify.lab.verdict import sentences


@dataclass(frozen=True)
class Picture:
    """A figure with its caption."""

    svg: str
    caption: str


def write_report(models: Comparison | Sequence[Run], path: str | Path) -> None:
    """Write a page that says in words, numbers and figures how good the models are.

    Runs in folders `NAME/seed-0`, `NAME/seed-1`, … are one model; figures have the rows of all its runs.
    """
    comparison = models if isinstance(models, Comparison) else Comparison.of(grouped(models))
    page = Environment(
        loader=PackageLoader("bayesify.lab", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    text = page.get_template("report.html.jinja").render(_contents(comparison))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _contents(comparison: Comparison) -> dict[str, Any]:
    headline, *details = sentences(comparison)
    models = [_Model(i, row, comparison.split) for i, row in enumerate(comparison.rows)]
    return {
        "title": f"{comparison.rows[0].runs[0].recipe.data.name}: {', '.join(row.name for row in comparison.rows)}",
        "headline": headline,
        "details": details,
        "comparison": comparison,
        "is_classes": models[0].is_classes,
        "calibration": [model.calibration() for model in models],
        "risk": _risk(models),
        "uncertainty": [model.uncertainty() for model in models],
        "about": [_about(row) for row in comparison.rows],
        "version": by.__version__,
    }


def _risk(models: Sequence[_Model]) -> Picture:
    """One figure for all models, so that they can be told apart."""
    curves = {model.row.name: model.risk() for model in models}
    loss = "errors, %" if models[0].is_classes else "root mean square error (standardised)"
    ends = (f"{name} {_at(curve, 0.5):.2f} at half, {_at(curve, 1.0):.2f} at all" for name, curve in curves.items())
    alt = f"{loss} of the most certain inputs against the share answered: {'; '.join(ends)}."
    return Picture(as_svg(risk_figure(curves, loss), "risk", alt), "")


def _at(curve: tuple[np.ndarray, np.ndarray], coverage: float) -> float:
    return float(np.interp(coverage, *curve))


@dataclass(frozen=True)
class _Model:
    """One model's evaluated rows, those of all its runs together."""

    index: int
    row: Row
    split: str

    @cached_property
    def rows(self) -> dict[str, np.ndarray]:
        each = [rows_of(run) for run in self.row.runs]
        return {name: np.concatenate([rows[name] for rows in each]) for name in each[0]}

    @property
    def is_classes(self) -> bool:
        return f"{self.split}_entropy" in self.rows

    @property
    def total(self) -> str:
        return "entropy" if self.is_classes else "std"

    def of(self, name: str) -> np.ndarray:
        return self.rows[f"{self.split}_{name}"]

    def calibration(self) -> Picture:
        if not self.is_classes:
            below = self.of("quantile")
            share = float(((below > 0.05) & (below < 0.95)).mean())
            words = f"{100 * share:.1f}% of targets are in the 90% interval"
            figure = quantile_figure(below)
        else:
            confidence, correct = self.of("confidence"), self.of("correct")
            figure = reliability_figure(confidence, correct)
            words = f"{100 * confidence.mean():.1f}% sure on average, {100 * correct.mean():.1f}% right"
        return Picture(as_svg(figure, f"calibration-{self.index}", f"{self.row.name}: {self._alt(words)}"), words)

    def _alt(self, words: str) -> str:
        if not self.is_classes:
            return f"share of targets below each predicted quantile; {words}"
        bins = calibration_bins(self.of("confidence"), self.of("correct"))
        pairs = zip(bins["confidence"], bins["accuracy"], bins["rows"], strict=True)
        told = (f"of {rows} rows at confidence {c:.2f}, {a:.2f} are right" for c, a, rows in pairs)
        return f"{words}; {'; '.join(told)}"

    def risk(self) -> tuple[np.ndarray, np.ndarray]:
        if self.is_classes:
            return risk_coverage(self.of("entropy"), 100.0 * ~self.of("correct"))
        coverage, squares = risk_coverage(self.of("std"), self.of("error") ** 2)
        return coverage, np.sqrt(squares)

    def uncertainty(self) -> Picture:
        familiar, strange = self.of(self.total), self.rows[f"noise_{self.total}"]
        score = "entropy, nats" if self.is_classes else "standard deviation (standardised)"
        words = f"median {np.median(familiar):.2f} on the {self.split} split, {np.median(strange):.2f} on noise"
        figure = uncertainty_figure(familiar, strange, score, self.split)
        alt = f"{self.row.name}: histogram of {score}; {words}"
        return Picture(as_svg(figure, f"uncertainty-{self.index}", alt), words)


def _about(row: Row) -> dict[str, str]:
    """A model's first run: its recipe and what was converted."""
    run = row.runs[0]
    recipe = yaml.safe_dump(run.recipe.plain(), sort_keys=False, allow_unicode=True)
    conversion = "" if row.is_plain else str(by.summary(run.load().model))
    return {"name": row.name, "folder": str(run.folder), "recipe": recipe, "conversion": conversion}
