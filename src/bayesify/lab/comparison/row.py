"""`Row`: one model of a comparison, with the value of each metric in every run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev

from bayesify.lab.comparison.columns import COST, Column
from bayesify.lab.comparison.resampled_rows import ResampledRows
from bayesify.lab.recipes.methods import PlainPart, TemperaturePart
from bayesify.lab.runs import Run


@dataclass(frozen=True)
class Row:
    """One model: its runs in the order of their seeds, and the value of each metric in every run, None if missing."""

    name: str
    runs: tuple[Run, ...]
    values: Mapping[str, tuple[float | None, ...]]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """If there is only one run: the 95% bootstrap interval of each metric that has one."""
    split: str = "test"
    """The split that the metrics are from."""

    @cached_property
    def resampled(self) -> ResampledRows | None:
        """If there is only one run, and it has its evaluated rows: its metrics in resamples of them."""
        return ResampledRows.of(self.runs[0], self.split) if len(self.runs) == 1 else None

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain network."""
        return isinstance(self.runs[0].recipe.method, PlainPart)

    @property
    def is_bayesian(self) -> bool:
        """Whether it is neither a plain network nor one with temperature scaling."""
        return not isinstance(self.runs[0].recipe.method, (PlainPart, TemperaturePart))

    @property
    def measured_values(self) -> dict[str, tuple[float, ...]]:
        """The value of each metric in every run that has it."""
        return {key: tuple(v for v in values if v is not None) for key, values in self.values.items()}

    def pairs(self, other: Row, key: str) -> list[tuple[float, float]]:
        """The values of a metric for both models, for each seed where both have it."""
        both = zip(self.values.get(key, ()), other.values.get(key, ()), strict=True)
        return [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]

    def mean(self, key: str) -> float | None:
        """The mean over the runs."""
        return fmean(values) if (values := self.measured_values.get(key)) else None

    def sd(self, key: str) -> float | None:
        """The sample standard deviation (n - 1) over the runs, if there are at least two."""
        return stdev(values) if len(values := self.measured_values.get(key, ())) > 1 else None

    def cell(self, column: Column) -> str:
        """Mean±sd as the table shows it."""
        mean, sd = self.mean(column.key), self.sd(column.key)
        if mean is None:
            return "–"
        spread = "" if sd is None or column in COST else f"±{column.format(sd)}"
        return f"{column.format(mean)}{spread}"
