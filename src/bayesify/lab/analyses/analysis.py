"""`Analysis`, the base class: arrays that can be written as a table and drawn as a figure."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesify.errors import BayesifyError
from bayesify.lab.data.spreadsheets import safe_cell
from bayesify.lab.run_files import write_file


class AnalysisError(BayesifyError):
    """An analysis that can't be done with the given model, data or options."""


class Analysis:
    """The result of an analysis: `columns` is its table, `figure` its figure."""

    def columns(self) -> dict[str, np.ndarray]:
        """The arrays as columns of equal length."""
        raise NotImplementedError

    def figure(self) -> Figure:
        """The figure of the paper, ready for `savefig`."""
        raise NotImplementedError

    def to_csv(self, path: str | Path) -> None:
        """Write the table as CSV with a header."""
        text, table = io.StringIO(newline=""), self.columns()
        writer = csv.writer(text)
        writer.writerow(map(safe_cell, table))
        rows = zip(*(values.tolist() for values in table.values()), strict=True)
        writer.writerows(map(safe_cell, row) for row in rows)
        write_file(Path(path), text.getvalue())


class Chart(Analysis):
    """An analysis with a single pair of axes, so that several can be drawn side by side with `panels`."""

    @property
    def axis_names(self) -> tuple[str, str]:
        """The labels of the x and y axes."""
        raise NotImplementedError

    def draw(self, axes: Axes) -> None:
        """Draw into axes."""
        raise NotImplementedError

    def figure(self) -> Figure:
        from bayesify.lab.analyses.style import panels

        return panels({"": self})
