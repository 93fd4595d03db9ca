"""The figures about shift: metrics of each model against the intensity of noise or the severity of corruptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from bayesify.lab.comparison.table import Comparison
from bayesify.lab.metrics import Curve
from bayesify.lab.report.figures.draw import curves_figure, shifts_figure
from bayesify.lab.report.figures.page_figure import PageFigure, slug

MEASURES = {
    "accuracy": ("accuracy, %", 100),
    "nll": ("NLL", 1),
    "ece": ("ECE, %", 100),
    "aleatoric": ("aleatoric entropy, nats", 1),
    "epistemic": ("epistemic entropy, nats", 1),
}
"""The metrics that are drawn, each with the label and the scale of its axis."""
NOISE_KINDS = ("mixing", "salt_and_pepper")
"""Kinds of noise, which have an intensity; all other kinds are corruptions, which have a severity."""
NO_CURVE: Curve = (np.empty(0), np.empty(0))


@dataclass(frozen=True)
class ShiftFigures:
    """The figures for all kinds of shift; each shows the models that were measured on it."""

    comparison: Comparison

    @cached_property
    def known(self) -> dict[str, list[dict[str, Any]]]:
        """The metrics of each model's runs on the split."""
        return {row.name: [run.metrics[self.comparison.split] for run in row.runs] for row in self.comparison.rows}

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of shift that all runs of some model have."""
        every = [_shift(run) for runs in self.known.values() for run in runs]
        return [kind for kind in dict.fromkeys(chain(*every)) if self._models([kind])]

    @property
    def corruptions(self) -> list[str]:
        """The kinds that are corruptions."""
        return [kind for kind in self.kinds if kind not in NOISE_KINDS]

    def parts(self) -> list[tuple[str, list[PageFigure]]]:
        """The figures by heading: for each kind of noise, and for the mean over corruptions."""
        found = [(_words(kind), self._row([kind], "intensity")) for kind in self.kinds if kind in NOISE_KINDS]
        several = len(self.corruptions)
        if self._models(self.corruptions):
            title = f"mean of {several} corruptions" if several > 1 else _words(self.corruptions[0])
            found.append((title, self._row(self.corruptions, "severity")))
        return found

    def every_corruption(self) -> list[PageFigure]:
        """One figure for each metric, with a panel for each corruption, if there are several."""
        if len(self.corruptions) < 2:
            return []
        each = {measure: {kind: self._curves([kind], measure) for kind in self.corruptions} for measure in MEASURES}
        return [
            self._panels(measure, curves) for measure, curves in each.items() if any(map(_has_points, curves.values()))
        ]

    def _row(self, kinds: Sequence[str], x: str) -> list[PageFigure]:
        each = {measure: self._curves(kinds, measure) for measure in MEASURES}
        return [self._figure(kinds, x, measure, curves) for measure, curves in each.items() if _has_points(curves)]

    def _figure(self, kinds: Sequence[str], x: str, measure: str, curves: Mapping[str, Curve]) -> PageFigure:
        y, scale = MEASURES[measure]
        name = slug("shift", "corruptions" if len(kinds) > 1 else kinds[0], measure)
        title = "" if len(kinds) > 1 else f" under {_words(kinds[0])}"
        drawn = {model: (at, scale * value) for model, (at, value) in curves.items()}
        alt = f"{y} against {x}{title}: {_ends(drawn)}"
        return PageFigure.of(curves_figure(drawn, x, y), name, _data(curves, measure), alt=alt, legend=False)

    def _panels(self, measure: str, curves: Mapping[str, Mapping[str, Curve]]) -> PageFigure:
        y, scale = MEASURES[measure]
        drawn = {
            _words(kind): {model: (at, scale * value) for model, (at, value) in some.items()}
            for kind, some in curves.items()
        }
        each = [{"corruption": kind, **row} for kind, some in curves.items() for row in _rows(_data(some, measure))]
        data = {key: [row[key] for row in each] for key in each[0]}
        alt = f"{y} against severity, by corruption: {'; '.join(f'{k}: {_ends(v)}' for k, v in drawn.items())}"
        return PageFigure.of(shifts_figure(drawn, y), slug("shift-each", measure), data, alt=alt)

    def _curves(self, kinds: Sequence[str], measure: str) -> dict[str, Curve]:
        """Each model's mean over runs and kinds of shift, by intensity; 0 is the unchanged split."""
        measured = self._models(kinds)
        return {
            name: _curve(runs, kinds, measure) if name in measured else NO_CURVE for name, runs in self.known.items()
        }

    def _models(self, kinds: Sequence[str]) -> list[str]:
        """The models of which every run was measured on all of these kinds."""
        return [name for name, runs in self.known.items() if kinds and all({*kinds} <= {*_shift(run)} for run in runs)]


def _curve(runs: Sequence[Mapping[str, Any]], kinds: Sequence[str], measure: str) -> Curve:
    levels = sorted(set.intersection(*({*run["shift"][kind]} for run in runs for kind in kinds)), key=float)
    values = [[_value(run["shift"][kind][level], measure, run) for run in runs for kind in kinds] for level in levels]
    clean = [[_value(run, measure, run) for run in runs]] if "0" not in levels else []
    points = [*zip([0.0] if clean else [], clean, strict=True), *zip(map(float, levels), values, strict=True)]
    kept = [(at, fmean(v for v in some if v is not None)) for at, some in points if None not in some]
    return np.array([at for at, _ in kept]), np.array([value for _, value in kept])


def _shift(run: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = run.get("shift", {})
    return found


def _has_points(curves: Mapping[str, Curve]) -> bool:
    return any(len(at) for at, _ in curves.values())


def _value(found: Mapping[str, Any], measure: str, run: Mapping[str, Any]) -> float | None:
    """The metric, or None for the epistemic uncertainty of a single network."""
    single = measure == "epistemic" and run.get("draws") == 1
    return None if single else found.get(measure)


def _data(curves: Mapping[str, Curve], measure: str) -> dict[str, list[Any]]:
    return {
        "model": [model for model, (at, _) in curves.items() for _ in at],
        "intensity": [float(each) for at, _ in curves.values() for each in at],
        measure: [float(each) for _, value in curves.values() for each in value],
    }


def _rows(data: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]


def _ends(curves: Mapping[str, Curve]) -> str:
    some = {model: curve for model, curve in curves.items() if len(curve[0])}
    return ", ".join(
        f"{model} from {v[0]:.3g} at {at[0]:g} to {v[-1]:.3g} at {at[-1]:g}" for model, (at, v) in some.items()
    )


def _words(kind: str) -> str:
    return kind.replace("_", " ")
