"""The figure of an experiment: every seed of every network, with means, and the paper's figures."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesify.lab.comparison.columns import Column
from bayesify.lab.report.figures.style import INK, SERIES, STYLE
from bayesify.lab.reproduction.verdict import Results
from bayesify.lab.run_files import write_file

MOST_COLUMNS = 3
"""The figure shows the first measures."""
WIDTH, LINE = 3.4, 0.24


@matplotlib.rc_context(STYLE)
def draw(results: Results, path: Path) -> None:
    """Write the figure as PNG: a panel for each setting and measure, a line for each network."""
    columns = results.experiment.columns[:MOST_COLUMNS]
    rows = {setting: results.rows(setting) for setting in results.settings}
    heights = [LINE * len(some) + 0.7 for some in rows.values()]
    figure = Figure(figsize=(WIDTH * len(columns) + 1.6, sum(heights) + 0.2), layout="constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row", height_ratios=heights)
    for across, (setting, names) in zip(grid, rows.items(), strict=True):
        for axes, column in zip(across, columns, strict=True):
            _panel(axes, results, setting, names, column)
        across[0].set_yticks(range(len(names)), names, fontsize=8)
        across[0].invert_yaxis()
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110)
    write_file(path, content.getvalue())


def _panel(axes: Axes, results: Results, setting: str, names: list[str], column: Column) -> None:
    for i, name in enumerate(names):
        values = [column.scale * value for value in results.cell(setting, name, column.key).values()]
        axes.plot(values, [i] * len(values), ".", color=SERIES[0], alpha=0.35, markersize=5)
        if values:
            axes.plot([fmean(values)], [i], "|", color=INK, markersize=9, markeredgewidth=1.5)
        for exhibit in results.experiment.exhibits:
            shown = exhibit.published.get(setting, {}).get(name, {}).get(column.key)
            if shown:
                axes.plot([float(shown.split()[0])], [i], "D", color=SERIES[1], markersize=4, markerfacecolor="none")
    axes.set_title(f"{setting}: {column.head}", fontsize=9)
