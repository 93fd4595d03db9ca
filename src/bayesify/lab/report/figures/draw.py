"""Draw each figure of the report from arrays, with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesify.lab.metrics import BINS, Curve
from bayesify.lab.report.figures.style import (
    INK,
    SERIES,
    SOFT,
    STYLE,
    HoverFigure,
    legend_label,
    line_style,
    new_figure,
)

SMALL = (2.9, 2.5)
"""The size in inches of a figure that stands beside others."""
HISTOGRAM_BINS = 25
BIN_NAMES = ("middle", "confidence", "accuracy", "rows")
MOST_POINTS = 400
"""The most points of a curve, more than a figure can resolve."""
MOST_HOVERS = 40
"""The most points of a curve that show their values."""


@matplotlib.rc_context(STYLE)
def reliability_figure(bins: Mapping[str, np.ndarray]) -> Figure:
    """Accuracy in bins of confidence, from `calibration_bins`; the bars of a calibrated model end on the diagonal."""
    figure, axes = _square("confidence", "accuracy")
    opacity = 0.35 + 0.65 * bins["rows"] / bins["rows"].max()
    for middle, accuracy, alpha in zip(bins["middle"], bins["accuracy"], opacity, strict=True):
        axes.bar(middle, accuracy, 0.9 / BINS, color=SERIES[0], alpha=float(alpha))
    for middle, confidence, accuracy, rows in zip(*(bins[name] for name in BIN_NAMES), strict=True):
        text = f"mean confidence {100 * confidence:.1f}%: accuracy {100 * accuracy:.1f}% of {rows:,} rows"
        figure.add_hover(axes, (middle - 0.5 / BINS, 0.0), (middle + 0.5 / BINS, 1.0), text)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--")
    return figure


@matplotlib.rc_context(STYLE)
def quantile_figure(quantile: np.ndarray, share: np.ndarray) -> Figure:
    """The share of targets below each predicted quantile; the curve of a calibrated model is the diagonal."""
    figure, axes = _square("predicted quantile", "share of targets below")
    axes.plot(quantile, share, color=SERIES[0], linewidth=2)
    _tell_values(figure, axes, {"": (quantile, 100 * share)}, lambda at: f"targets below the quantile {at:.2f}, %")
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--")
    return figure


@matplotlib.rc_context(STYLE)
def risk_figure(curves: Mapping[str, Curve], loss: str, scale: float = 1) -> Figure:
    """The risk-coverage curve of every model, the risk multiplied by `scale`."""
    figure, axes = new_figure(4.4, 3.1)
    lowest, largest, visible = _lowest_coverage(curves), 0.0, dict[str, Curve]()
    for i, (name, (coverage, risk)) in enumerate(curves.items()):
        x, y = 100 * coverage, scale * risk
        axes.plot(x, y, label=legend_label(name), linewidth=1.8, **line_style(i))
        visible[name] = x[x >= lowest], y[x >= lowest]
        largest = max(largest, float(visible[name][1].max()))
    axes.set(xlabel="coverage, % of inputs, most certain first", ylabel=loss, xlim=(lowest, 100))
    axes.set_ylim(bottom=0, top=1.1 * largest or 1)
    _tell_values(figure, axes, visible, lambda at: f"{loss}, at {at:.0f}% coverage")
    _legend(figure)
    return figure


def histogram(values: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Bin edges from 0 to the largest value of all arrays, and the percentage of each array in each bin."""
    edges = np.linspace(0, max(1e-9, *(float(each.max()) for each in values)), HISTOGRAM_BINS + 1)
    return edges, [100 * np.histogram(each, edges)[0] / len(each) for each in values]


@matplotlib.rc_context(STYLE)
def uncertainty_figure(edges: np.ndarray, shares: Mapping[str, np.ndarray], score: str) -> Figure:
    """Histograms of uncertainty: the split, which comes first in `shares`, against each out-of-distribution set."""
    (split, in_dist), *ood_sets = shares.items()
    figure = HoverFigure(SMALL[0], 1.1 + 1.15 * len(ood_sets))
    for i, (name, share) in enumerate(ood_sets):
        axes = figure.add_subplot(len(ood_sets), 1, i + 1)
        axes.stairs(in_dist, edges, fill=True, color=SERIES[0], alpha=0.65, label=legend_label(split))
        ood_label = "out of distribution" if ood_sets[1:] else legend_label(name)
        axes.stairs(share, edges, fill=True, color=SERIES[1], alpha=0.65, label=ood_label)
        if ood_sets[1:]:
            axes.set_title(name, loc="left", fontsize=9, pad=2)
        axes.set(xlim=(0, float(edges[-1])), ylim=(0, None))
        axes.tick_params(labelbottom=i == len(ood_sets) - 1)
        for low, high, own, other in zip(edges[:-1], edges[1:], in_dist, share, strict=True):
            text = f"{score} {low:.2f} to {high:.2f}: {own:.1f}% of {split}, {other:.1f}% of {name}"
            figure.add_hover(axes, (float(low), 0.0), (float(high), float(axes.get_ylim()[1])), text)
    axes.set_xlabel(score)
    figure.supylabel("share of inputs, %", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9)
    return figure


@matplotlib.rc_context(STYLE)
def curves_figure(curves: Mapping[str, Curve], x: str, y: str) -> Figure:
    """A metric against epochs or the intensity of a shift, as a curve for every model."""
    figure, axes = new_figure(*SMALL)
    _draw_curves(axes, curves)
    axes.set(xlabel=x, ylabel=y)
    _tell_values(figure, axes, curves, lambda at: f"{y}, at {x} {at:g}")
    _legend(figure)
    return figure


@matplotlib.rc_context(STYLE)
def shifts_figure(kinds: Mapping[str, Mapping[str, Curve]], y: str) -> Figure:
    """A metric of every model against severity, with a panel for each kind of shift."""
    across, down, models = 3, -(-len(kinds) // 3), len(next(iter(kinds.values())))
    top, height = 0.3 + 0.2 * -(-models // 3), 1.5 * down
    figure = HoverFigure(6.6, top + height + 0.5, layout=None)  # a layout engine takes seconds for so many axes
    edges = {"right": 0.99, "bottom": 0.5 / (top + height + 0.5), "top": 1 - top / (top + height + 0.5)}
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (kind, curves) in zip(panels, kinds.items(), strict=False):
        _draw_curves(axes, curves)
        axes.set_title(kind, fontsize=9, color=SOFT, pad=3, y=1)
    for axes, (kind, curves) in zip(panels, kinds.items(), strict=False):  # whose limits all panels have changed
        _tell_values(figure, axes, curves, partial("{1}, {0}, at severity {2:g}".format, kind, y))
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    figure.subplots_adjust(**edges, left=0.06 + _tick_width(panels[0]), wspace=0.08, hspace=0.25)
    figure.supylabel(y, fontsize=10, x=0.01)
    figure.supxlabel("severity", fontsize=10)
    lines = {line.get_label(): line for axes in panels for line in axes.lines}
    figure.legend(list(lines.values()), list(lines), loc="upper center", ncols=3, fontsize=9)
    return figure


@matplotlib.rc_context(STYLE)
def gallery_figure(images: Sequence[np.ndarray], titles: Sequence[str]) -> Figure:
    """Images (H, W) or (H, W, 3) from 0 to 1, with titles: first the least certain half, then the most certain."""
    across, half = 6, len(images) // 2
    down = -(-half // across)
    figure, axes = new_figure(1.2 * across, 3.2 * down)
    for i, (image, title) in enumerate(zip(images, titles, strict=True)):
        x, y = i % half % across, -1.4 * (i // half * down + i % half // across)
        axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=(x, x + 0.92, y, y + 0.92))
        axes.text(x, y + 0.95, title, fontsize=8, verticalalignment="bottom")
    for label, first in (("least certain", 0), ("most certain", down)):
        axes.text(-0.05, 0.92 - 1.4 * first, label, rotation=90, va="top", ha="right", fontsize=9)
    axes.set(xlim=(-0.2, across), ylim=(-1.4 * (2 * down - 1), 1.35), aspect="equal")
    axes.axis("off")
    return figure


def thin_out(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """A curve reduced to at most this many points, evenly spread, including the first and the last.

    >>> [each.tolist() for each in thin_out((np.arange(5), np.arange(5) ** 2), 3)]
    [[0, 2, 4], [0, 4, 16]]
    """
    x, y = curve
    kept = np.unique(np.linspace(0, len(x) - 1, min(most, len(x))).round().astype(int))
    return x[kept], y[kept]


def _draw_curves(axes: Axes, curves: Mapping[str, Curve]) -> None:
    for i, (name, (at, value)) in enumerate(curves.items()):
        if len(at):
            axes.plot(at, value, label=legend_label(name), linewidth=1.6, marker="o", markersize=2.5, **line_style(i))


def _tell_values(figure: HoverFigure, axes: Axes, curves: Mapping[str, Curve], heading: Callable[[float], str]) -> None:
    """Show the values of all curves over a strip around each of their places; many places are thinned out."""
    thin = {name: thin_out(curve, MOST_HOVERS) for name, curve in curves.items() if len(curve[0])}
    known = {name: dict(zip(at.tolist(), value.tolist(), strict=True)) for name, (at, value) in thin.items()}
    places = sorted({at for values in known.values() for at in values})
    if not places:
        return
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    ends = [left, *((a + b) / 2 for a, b in pairwise(places)), right]
    for at, (start, end) in zip(places, pairwise(ends), strict=True):
        values = ", ".join(f"{name} {some[at]:.3g}".strip() for name, some in known.items() if at in some)
        figure.add_hover(axes, (start, bottom), (end, top), f"{heading(at)}: {values}")


def _tick_width(axes: Axes) -> float:
    """The share of the figure's width that the tick labels of the y axis take."""
    assert isinstance(axes.figure, Figure), "there are no subfigures"
    box = axes.yaxis.get_tightbbox()
    return 0.0 if box is None else float(box.width / axes.figure.bbox.width)


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside upper center", ncols=2, fontsize=9)


def _lowest_coverage(curves: Mapping[str, Curve]) -> float:
    """Where the curves start, in percent: below this coverage no model errs, or rows are too few for a mean."""
    first = min(float(coverage[risk > 0].min(initial=1.0)) for coverage, risk in curves.values())
    return min(max(10.0, 10.0 * int(10 * first)), 90.0)


def _square(x: str, y: str) -> tuple[HoverFigure, Axes]:
    figure, axes = new_figure(2.9, 2.8)
    axes.set(xlabel=x, ylabel=y, xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], aspect="equal")
    return figure, axes
