"""The style of the analyses' figures, which is that of the report."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesify.lab.analyses.analysis import AnalysisError, Chart
from bayesify.lab.report.figures.style import INK, SERIES, SOFT, STYLE

WIDTH, HEIGHT = 3.1, 2.7
"""The size of one pair of axes in inches."""

__all__ = ["HEIGHT", "INK", "SOFT", "STYLE", "WIDTH", "add_legend", "axes_grid", "colour", "panels"]


def colour(i: int) -> str:
    """The colour of the i-th series; they repeat after eight."""
    return SERIES[i % len(SERIES)]


def axes_grid(rows: int, columns: int, *, share: bool = False) -> tuple[Figure, np.ndarray]:
    """A figure with rows × columns of axes."""
    figure = Figure(figsize=(WIDTH * columns + 0.6, HEIGHT * rows + 0.5), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)


def add_legend(figure: Figure, axes: Axes) -> None:
    """Put the legend of the axes above the figure."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = max(3, int(figure.get_size_inches()[0] / 1.7))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=9)


@matplotlib.rc_context(STYLE)
def panels(charts: Mapping[str, Chart], columns: int = 3) -> Figure:
    """Draw several charts side by side, on the same scales.

    Args:
        charts: The charts by title.
        columns: The most charts in a row.

    Returns:
        The figure.
    """
    if not charts:
        raise AnalysisError("no charts to draw; give at least one, by its title")
    columns = min(columns, len(charts))
    figure, grid = axes_grid(-(-len(charts) // columns), columns, share=True)
    if len(charts) == 1:
        figure.set_size_inches(1.5 * WIDTH, 1.4 * HEIGHT)
    for i, axes in enumerate(grid.flat):
        axes.set_visible(i < len(charts))
    for axes, (title, chart) in zip(grid.flat, charts.items(), strict=False):
        chart.draw(axes)
        axes.set_title(title, fontsize=10)
    first = next(iter(charts.values()))
    for axes in grid[-1]:
        axes.set_xlabel(first.axis_names[0])
    for axes in grid[:, 0]:
        axes.set_ylabel(first.axis_names[1])
    add_legend(figure, grid[0, 0])
    return figure
