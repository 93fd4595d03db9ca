"""What all analyses share: arrays that are written as a table and drawn as a figure."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesify.errors import BayesifyError


class AnalysisError(BayesifyError):
    """An analysis that makes no sense for what it was given."""


class Analysis:
    """What an analysis found: `columns` is its table, `figure` its picture."""

    def columns(self) -> dict[str, np.ndarray]:
        """The arrays as columns of equal length."""
        raise NotImplementedError

    def figure(self) -> Figure:
        """The picture of the paper, ready for `savefig`."""
        raise NotImplementedError

    def to_csv(self, path: str | Path) -> None:
        """Write the table, with a line of names."""
        path, table = Path(path), self.columns()
        part = path.with_name(f"{path.name}.part")
        with part.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table)
            writer.writerows(zip(*(values.tolist() for values in table.values()), strict=True))
        os.replace(part, path)


class Chart(Analysis):
    """An analysis whose picture is one pair of axes, so that several can stand side by side (`panels`)."""

    @property
    def axis_names(self) -> tuple[str, str]:
        """What stands below and beside the axes."""
        raise NotImplementedError

    def draw(self, axes: Axes) -> None:
        """Draw into axes."""
        raise NotImplementedError

    def figure(self) -> Figure:
        from bayesify.lab.analyses.style import panels

        return panels({"": self})
