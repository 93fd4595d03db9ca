"""Figures from evaluated rows, as SVG whose colours are the page's, so that they suit light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesify.lab.metrics import BINS

INK, SOFT, LINE = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0404{i:02x}" for i in range(8))
"""Stand-ins for the page's colours, which `as_svg` puts in: matplotlib itself knows no CSS variable."""
VARIABLES = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)"} | {
    colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)
}
STYLES = ("-", "--", "-.", ":")
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
Curve = tuple[np.ndarray, np.ndarray]


def calibration_bins(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> dict[str, np.ndarray]:
    """For each bin of confidence that has rows: its middle, their number, mean confidence and accuracy."""
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    some = count > 0
    sums = {"confidence": confidence, "accuracy": correct.astype(float)}
    means = {name: np.bincount(place, values, bins)[some] / count[some] for name, values in sums.items()}
    return {"middle": (np.arange(bins)[some] + 0.5) / bins, "rows": count[some], **means}


def risk_coverage(uncertainty: np.ndarray, loss: np.ndarray) -> Curve:
    """The mean loss of the most certain rows, against the share of all that they are.

    >>> coverage, risk = risk_coverage(np.array([0.9, 0.1]), np.array([1.0, 0.0]))
    >>> coverage.tolist(), risk.tolist()
    ([0.5, 1.0], [0.0, 0.5])
    """
    order = np.argsort(uncertainty, kind="stable")
    many = np.arange(1, len(order) + 1)
    return many / len(order), np.cumsum(loss[order]) / many


@matplotlib.rc_context(STYLE)
def reliability_figure(confidence: np.ndarray, correct: np.ndarray) -> Figure:
    """Accuracy in bins of confidence; a calibrated model's bars end on the diagonal."""
    bins = calibration_bins(confidence, correct)
    figure, axes = _square("confidence", "share that is right")
    faint = 0.35 + 0.65 * bins["rows"] / bins["rows"].max()
    for middle, accuracy, alpha in zip(bins["middle"], bins["accuracy"], faint, strict=True):
        axes.bar(middle, accuracy, 0.9 / BINS, color=SERIES[0], alpha=float(alpha))
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--")
    return figure


@matplotlib.rc_context(STYLE)
def quantile_figure(quantile: np.ndarray) -> Figure:
    """The share of targets below each predicted quantile; a calibrated model's curve is the diagonal."""
    figure, axes = _square("predicted quantile", "share of targets below")
    axes.plot(np.sort(quantile.ravel()), np.linspace(0, 1, quantile.size), color=SERIES[0], linewidth=2)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--")
    return figure


@matplotlib.rc_context(STYLE)
def risk_figure(curves: Mapping[str, Curve], loss: str) -> Figure:
    """Every model's risk against coverage, from where there is any."""
    figure, axes = _figure(5.2, 3.9)
    for i, (name, (coverage, risk)) in enumerate(curves.items()):
        style = STYLES[i // 2 % len(STYLES)]
        axes.plot(100 * coverage, risk, style, color=SERIES[i % len(SERIES)], label=name, linewidth=1.8)
    axes.set(xlabel="share of inputs answered, the most certain first, %", ylabel=loss, xlim=(_left(curves), 100))
    axes.set_ylim(bottom=0, top=1.1 * max(float(risk[-1]) for _, risk in curves.values()) or 1)
    figure.legend(loc="outside upper center", ncols=2, fontsize=9)
    return figure


@matplotlib.rc_context(STYLE)
def uncertainty_figure(familiar: np.ndarray, strange: np.ndarray, score: str, split: str) -> Figure:
    """How uncertain a model is of familiar inputs, and of noise."""
    figure, axes = _figure(2.9, 2.5)
    edges = np.linspace(0, max(float(familiar.max()), float(strange.max()), 1e-9), 25).tolist()
    for values, colour, label in ((familiar, SERIES[0], split), (strange, SERIES[1], "noise")):
        share = np.full(len(values), 100 / len(values))
        axes.hist(values, edges, weights=share, color=colour, alpha=0.65, label=label)
    axes.set(xlabel=score, ylabel="share of inputs, %")
    figure.legend(loc="outside upper center", ncols=2, fontsize=9)
    return figure


def as_svg(figure: Figure, key: str, alt: str) -> str:
    """The figure as an element for a page; `key` makes its ids unique there, `alt` says what it shows."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", text)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)  # the page's own font
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, variable)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(alt, quote=True)}" ', 1)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _left(curves: Mapping[str, Curve]) -> float:
    """The coverage in percent, at least 10, below which no model errs; of fewer rows a mean says little."""
    first = min(float(coverage[risk > 0].min(initial=1.0)) for coverage, risk in curves.values())
    return min(max(10.0, 10.0 * int(10 * first)), 90.0)


def _square(x: str, y: str) -> tuple[Figure, Axes]:
    figure, axes = _figure(2.9, 2.8)
    axes.set(xlabel=x, ylabel=y, xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], aspect="equal")
    return figure, axes
