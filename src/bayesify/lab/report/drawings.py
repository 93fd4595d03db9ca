"""The figures of the page, from arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesify.lab.metrics import BINS, Curve
from bayesify.lab.report.figures import INK, SERIES, SOFT, STYLE, labelled, look, sized

SMALL = (2.9, 2.5)
"""Inches of a figure that stands beside others."""
HISTOGRAM = 25
"""Bins of a histogram."""


@matplotlib.rc_context(STYLE)
def reliability_figure(bins: Mapping[str, np.ndarray]) -> Figure:
    """Accuracy in bins of confidence, as `calibration_bins` has them; a calibrated model's bars end on the diagonal."""
    figure, axes = _square("confidence", "share that is right")
    faint = 0.35 + 0.65 * bins["rows"] / bins["rows"].max()
    for middle, accuracy, alpha in zip(bins["middle"], bins["accuracy"], faint, strict=True):
        axes.bar(middle, accuracy, 0.9 / BINS, color=SERIES[0], alpha=float(alpha))
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--")
    return figure


@matplotlib.rc_context(STYLE)
def quantile_figure(quantile: np.ndarray, share: np.ndarray) -> Figure:
    """The share of targets below each predicted quantile; a calibrated model's curve is the diagonal."""
    figure, axes = _square("predicted quantile", "share of targets below")
    axes.plot(quantile, share, color=SERIES[0], linewidth=2)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--")
    return figure


@matplotlib.rc_context(STYLE)
def risk_figure(curves: Mapping[str, Curve], loss: str, scale: float = 1) -> Figure:
    """Every model's risk, so many times as high, against coverage, from where there is any."""
    figure, axes = sized(4.4, 3.1)
    for i, (name, (coverage, risk)) in enumerate(curves.items()):
        axes.plot(100 * coverage, scale * risk, label=labelled(name), linewidth=1.8, **look(i))
    axes.set(xlabel="share of inputs answered, the most certain first, %", ylabel=loss, xlim=(_left(curves), 100))
    axes.set_ylim(bottom=0, top=1.1 * scale * max(float(risk[-1]) for _, risk in curves.values()) or 1)
    _legend(figure)
    return figure


def histogram(values: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Edges from 0 to the greatest value of all, and for each array the share of it between them, in percent."""
    edges = np.linspace(0, max(1e-9, *(float(each.max()) for each in values)), HISTOGRAM + 1)
    return edges, [100 * np.histogram(each, edges)[0] / len(each) for each in values]


@matplotlib.rc_context(STYLE)
def uncertainty_figure(edges: np.ndarray, shares: Mapping[str, np.ndarray], score: str) -> Figure:
    """How uncertain a model is of familiar inputs, which come first, and of each strange set, one below another."""
    (split, familiar), *strange = shares.items()
    figure = Figure(figsize=(SMALL[0], 1.1 + 1.15 * len(strange)), layout="constrained")
    for i, (name, share) in enumerate(strange):
        axes = figure.add_subplot(len(strange), 1, i + 1)
        axes.stairs(familiar, edges, fill=True, color=SERIES[0], alpha=0.65, label=labelled(split))
        strangers = "strange" if strange[1:] else labelled(name)
        axes.stairs(share, edges, fill=True, color=SERIES[1], alpha=0.65, label=strangers)
        if strange[1:]:
            axes.set_title(name, loc="left", fontsize=9, pad=2)
        axes.set(xlim=(0, float(edges[-1])), ylim=(0, None))
        axes.tick_params(labelbottom=i == len(strange) - 1)
    axes.set_xlabel(score)
    figure.supylabel("share of inputs, %", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9)
    return figure


@matplotlib.rc_context(STYLE)
def shift_figure(curves: Mapping[str, Curve], x: str, y: str) -> Figure:
    """A figure of every model against the intensity of a shift."""
    figure, axes = sized(*SMALL)
    _draw_shift(axes, curves)
    axes.set(xlabel=x, ylabel=y)
    _legend(figure)
    return figure


@matplotlib.rc_context(STYLE)
def shifts_figure(kinds: Mapping[str, Mapping[str, Curve]], y: str) -> Figure:
    """The same for many kinds of shift, side by side."""
    across, down, models = 3, -(-len(kinds) // 3), len(next(iter(kinds.values())))
    top, height = 0.3 + 0.2 * -(-models // 3), 1.5 * down
    figure = Figure(figsize=(6.6, top + height + 0.5))  # laid out by hand: for so many axes matplotlib takes seconds
    edges = {"right": 0.99, "bottom": 0.5 / (top + height + 0.5), "top": 1 - top / (top + height + 0.5)}
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (kind, curves) in zip(panels, kinds.items(), strict=False):
        _draw_shift(axes, curves)
        axes.set_title(kind, fontsize=9, color=SOFT, pad=3, y=1)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    figure.subplots_adjust(**edges, left=0.06 + _tick_width(panels[0]), wspace=0.08, hspace=0.25)
    figure.supylabel(y, fontsize=10, x=0.01)
    figure.supxlabel("severity", fontsize=10)
    lines = {line.get_label(): line for axes in panels for line in axes.lines}
    figure.legend(list(lines.values()), list(lines), loc="upper center", ncols=3, fontsize=9)
    return figure


@matplotlib.rc_context(STYLE)
def gallery_figure(pictures: Sequence[np.ndarray], titles: Sequence[str]) -> Figure:
    """Pictures (H, W) or (H, W, 3) from 0 to 1, with a title each: of half of them a model is least certain."""
    across, half = 6, len(pictures) // 2
    down = -(-half // across)
    figure, axes = sized(1.2 * across, 3.2 * down)
    for i, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        x, y = i % half % across, -1.4 * (i // half * down + i % half // across)
        axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=(x, x + 0.92, y, y + 0.92))
        axes.text(x, y + 0.95, title, fontsize=8, verticalalignment="bottom")
    for label, first in (("least certain", 0), ("most certain", down)):
        axes.text(-0.05, 0.92 - 1.4 * first, label, rotation=90, va="top", ha="right", fontsize=9)
    axes.set(xlim=(-0.2, across), ylim=(-1.4 * (2 * down - 1), 1.35), aspect="equal")
    axes.axis("off")
    return figure


def _draw_shift(axes: Axes, curves: Mapping[str, Curve]) -> None:
    for i, (name, (at, value)) in enumerate(curves.items()):
        if len(at):
            axes.plot(at, value, label=labelled(name), linewidth=1.6, marker="o", markersize=2.5, **look(i))


def _tick_width(axes: Axes) -> float:
    """How much of the figure's width the y axis' numbers take."""
    assert isinstance(axes.figure, Figure), "of a figure that is no part of another"
    box = axes.yaxis.get_tightbbox()
    return 0.0 if box is None else float(box.width / axes.figure.bbox.width)


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside upper center", ncols=2, fontsize=9)


def _left(curves: Mapping[str, Curve]) -> float:
    """The coverage in percent, at least 10, below which no model errs; of fewer rows a mean says little."""
    first = min(float(coverage[risk > 0].min(initial=1.0)) for coverage, risk in curves.values())
    return min(max(10.0, 10.0 * int(10 * first)), 90.0)


def _square(x: str, y: str) -> tuple[Figure, Axes]:
    figure, axes = sized(2.9, 2.8)
    axes.set(xlabel=x, ylabel=y, xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], aspect="equal")
    return figure, axes
