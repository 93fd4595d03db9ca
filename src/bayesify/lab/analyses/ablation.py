"""One option of a recipe at several values (Rank-1, figures 2 to 4; iBNN, figure 6)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesify.lab.analyses.analysis import Analysis, AnalysisError
from bayesify.lab.analyses.style import STYLE, add_legend, axes_grid, colour
from bayesify.lab.comparison.columns import Column
from bayesify.lab.comparison.compare_recipes import compare
from bayesify.lab.comparison.table import Comparison
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.recipe import apply_overrides

SHOWN = (
    *("accuracy", "nll", "ece", "corrupted_accuracy", "corrupted_nll", "corrupted_ece"),
    *("coverage", "log_density", "rmse"),
)
"""The metrics that a figure shows by default, if they were measured."""
WIDE = 3
ENOUGH = 3
"""The number of runs from which on a standard deviation is shown."""


@dataclass(frozen=True)
class Ablation(Analysis):
    """The comparison of a recipe with one option at several values."""

    key: str
    values: tuple[Any, ...]
    comparison: Comparison

    def columns(self) -> dict[str, np.ndarray]:
        """One row per run."""
        rows = self.comparison.rows
        named = [(value, run.recipe.seed) for value, row in zip(self.values, rows, strict=True) for run in row.runs]
        table = {
            self.key: np.array([_word(value) for value, _ in named]),
            "seed": np.array([seed for _, seed in named]),
        }
        figures = {
            c.key: [v for row in rows for v in row.measured_values.get(c.key, ())] for c in self.comparison.all_columns
        }
        return table | {key: np.array(found) for key, found in figures.items() if len(found) == len(named)}

    @matplotlib.rc_context(STYLE)
    def figure(self, keys: Sequence[str] | None = None) -> Figure:
        """Metrics against the option: mean and standard deviation over seeds, and every run as a dot."""
        known = {column.key: column for column in self.comparison.all_columns}
        columns = [known[key] for key in keys or SHOWN if key in known]
        if not columns or (keys and len(columns) < len(keys)):
            raise AnalysisError(f"keys={list(keys or SHOWN)}: expected some of {', '.join(known)}")
        figure, grid = axes_grid(-(-len(columns) // WIDE), min(WIDE, len(columns)))
        for i, axes in enumerate(grid.flat):
            axes.set_visible(i < len(columns))
        for axes, column in zip(grid.flat, columns, strict=False):
            self._draw(axes, column)
        add_legend(figure, grid[0, 0])
        return figure

    def _draw(self, axes: Axes, column: Column) -> None:
        at = np.array(self.values, float) if self._is_numeric else np.arange(len(self.values), dtype=float)
        rows = self.comparison.rows
        each = [
            (x, column.scale * v)
            for x, row in zip(at, rows, strict=True)
            for v in row.measured_values.get(column.key, ())
        ]
        axes.plot(*np.array(each).reshape(-1, 2).T, ".", ms=7, color=colour(1), alpha=0.6, label="each run")
        means = [column.scale * m if (m := row.mean(column.key)) is not None else np.nan for row in rows]
        enough = len(rows[0].runs) >= ENOUGH
        spread = [column.scale * (row.sd(column.key) or 0) for row in rows] if enough else None
        look = {"fmt": "o-", "ms": 5} if self._is_numeric else {"fmt": "_", "ms": 16, "mew": 2}
        label = "mean ± sd" if enough else "mean"
        axes.errorbar(at, means, spread, capsize=3, color=colour(0), label=label, **look)  # type: ignore[arg-type]
        if self._is_numeric and at.min() > 0 and at.max() >= 4 * at.min():
            axes.set_xscale("log", base=2)
        axes.set_xticks(at, [_word(value) for value in self.values])
        axes.minorticks_off()
        axes.margins(x=0.05 if self._is_numeric else 0.3)
        axes.set(xlabel=self.key, ylabel=column.head)

    @property
    def _is_numeric(self) -> bool:
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


def ablation(
    recipe: Recipe | Mapping[str, Any],
    key: str,
    values: Sequence[Any],
    folder: str | Path,
    *,
    seeds: int = 3,
    base: Recipe | Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Ablation:
    """Train and compare a recipe with one option at several values.

    The papers' ablations are of "method.components" (Rank-1, figure 3; iBNN, figure 6), of "method.factors" at "input",
    "output" and "both" (Rank-1, figure 2), and of "training.bound" at "average" and "mixture", with "training.mixture"
    at "replicate" (Rank-1, figure 4).

    Args:
        recipe: The recipe.
        key: The option, such as "method.components".
        values: Its values.
        folder: Where the runs are; as in `lab.compare`, finished ones are not trained again.
        seeds: How many times each value is trained.
        base: The recipe of a plain network to fine-tune, as in `lab.compare`.
        progress: Whether to show a progress bar.

    Returns:
        The comparison by value.

    Raises:
        AnalysisError: If there are no values, or some are repeated.
    """
    names = [f"{key.rpartition('.')[2]}={_word(value)}" for value in values]
    if not names or len(set(names)) < len(names):
        raise AnalysisError(f"values={list(values)}: expected at least one value, and no duplicates")
    variants = {name: _variant(recipe, f"{key}={json.dumps(value)}") for name, value in zip(names, values, strict=True)}
    found = compare(variants, folder, seeds=seeds, base=base, progress=progress)
    rows = {row.name: row for row in found.rows}
    return Ablation(key, tuple(values), replace(found, rows=tuple(rows[name] for name in names)))


def _variant(recipe: Recipe | Mapping[str, Any], override: str) -> Recipe | dict[str, Any]:
    if isinstance(recipe, Recipe):
        return Recipe.of(recipe.plain(), [override])
    return apply_overrides(recipe, [override])


def _word(value: Any) -> str:
    """A value as part of a name."""
    return "+".join(map(_word, value)) if isinstance(value, list | tuple) else str(value)
