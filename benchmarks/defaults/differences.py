"""Methods with default options beside what people do instead: differences by seed, from the committed lines alone.

Differences are paired by seed; their intervals are Student's, over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.defaults.candidates import METHODS
from benchmarks.defaults.tasks import TASKS
from benchmarks.defaults.trial import LONGER, LOOPS, PLAIN, Trial

SEEDS = 3
"""How many seeds a figure needs."""
TEMPERATURE = "temperature scaling"
NOMINAL = 0.9
"""The coverage that intervals of real targets should have."""
BETTER = {"nll": -1, "ece": -1, "auroc": 1}
"""Which sign of a difference is better; AUROC is by entropy (or standard deviation), which every network has."""
SHOWN = {"nll": (1, 3), "ece": (100, 1), "auroc": (1, 3), "mi": (1, 3)}
"""A factor and the number of digits."""
TITLES = {"nll": "NLL", "ece": "ECE", "auroc": "AUROC"}
STARTS = {"trained": "from trained weights", "scratch": "from scratch"}
Records = dict[Trial, dict[str, Any]]
Measures = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """A task, a start and a loop."""

    task: str
    start: str
    loop: str

    @classmethod
    def of(cls, trial: Trial) -> Setting:
        """The setting of a trial."""
        return cls(trial.task, trial.start, trial.loop)

    def __str__(self) -> str:
        return f"{self.task}, {STARTS[self.start]}, {self.loop}"

    @property
    def references(self) -> list[str]:
        """What a method is compared with: from scratch, the plain network has all epochs."""
        return [PLAIN, LONGER, TEMPERATURE] if self.start == "trained" else [PLAIN, TEMPERATURE]


@dataclass(frozen=True)
class Difference:
    """A mean over seeds and its 95% interval; infinite where something is not finite."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Difference:
        """Student's interval around the mean of some values.

        >>> Difference.of([1.0, 2.0, 3.0]).low  # 4.303 standard errors of 1 / √3 below 2
        -0.484...
        """
        mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
        half = float(student.ppf(0.975, len(values) - 1)) * error
        return cls(mean, mean - half, mean + half)

    @property
    def is_shown(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0

    def shown(self, measure: str) -> str:
        """The cell of a table, bold if the interval leaves out zero."""
        scale, digits = SHOWN[measure]
        mean, low, high = (f"{scale * each:+.{digits}f}" for each in (self.mean, self.low, self.high))
        return f"**{mean} ({low} to {high})**" if self.is_shown else f"{mean} ({low} to {high})"


def measures_of(record: dict[str, Any], part: str) -> Measures:
    """NLL, calibration and detection of a trial; for real targets the calibration error is that of 90% intervals.

    Wider intervals keep the order of rows, so that detection is as before (of which some lines have another value).
    """
    found = record[part]
    is_real = "coverage" in found
    ece = abs(found["coverage"] - NOMINAL) if is_real else found["ece"]
    auroc = record[part.removesuffix("_t") if is_real else part]["auroc_entropy"]
    return {"nll": found["nll"], "ece": ece, "auroc": auroc, "mi": found["auroc_mi"]}


class Results:
    """Finished trials by setting, method and seed."""

    def __init__(self, records: Records) -> None:
        self.records = {each: record for each, record in records.items() if "failed" not in record}
        self.failed = sorted((each for each in records if each not in self.records), key=str)
        self.rows: dict[tuple[Setting, str], dict[int, dict[str, Any]]] = {}
        for each, record in self.records.items():
            self.rows.setdefault((Setting.of(each), each.method), {})[each.seed] = record

    def settings(self) -> list[Setting]:
        """Those in which a method was run with its defaults and enough seeds, in the order of the tasks."""
        every = [Setting(task, start, loop) for task in TASKS for start in STARTS for loop in LOOPS]
        return [each for each in every if self.methods(each)]

    def is_complete(self) -> bool:
        """Whether every method was run in every setting; nothing is from scratch where weights were published."""
        every = [
            Setting(task, start, loop)
            for task in TASKS
            for start in STARTS
            for loop in LOOPS
            if start == "trained" or TASKS[task].epochs
        ]
        return all(len(self.methods(each)) == len(METHODS) for each in every)

    def methods(self, setting: Setting) -> list[str]:
        """The methods that were run there with enough seeds."""
        return [name for name in METHODS if len(self.rows.get((setting, f"{name}()"), ())) >= SEEDS]

    def by_seed(self, setting: Setting, row: str, part: str = "test") -> dict[int, Measures]:
        """The measures of each seed of a row: a method string, or what methods are compared with."""
        method, part = (PLAIN, f"{part}_t") if row == TEMPERATURE else (row, part)
        return {seed: measures_of(each, part) for seed, each in self.rows.get((setting, method), {}).items()}

    def mean(self, setting: Setting, row: str, measure: str) -> float:
        """The mean over seeds."""
        return float(np.mean([each[measure] for each in self.by_seed(setting, row).values()]))

    def difference(
        self, setting: Setting, row: str, reference: str, measure: str, part: str = "test"
    ) -> Difference | None:
        """A row minus another one, over the seeds that both have."""
        ours, theirs = self.by_seed(setting, row, part), self.by_seed(setting, reference, part)
        values = [ours[seed][measure] - theirs[seed][measure] for seed in sorted(ours.keys() & theirs.keys())]
        return Difference.of(values) if len(values) >= SEEDS else None

    def cells(self) -> Iterator[tuple[Setting, str, str, str, Difference]]:
        """Every difference of a method with defaults: setting, name, reference, measure."""
        for setting in self.settings():
            for name in self.methods(setting):
                for reference in setting.references:
                    for measure in BETTER:
                        if (found := self.difference(setting, f"{name}()", reference, measure)) is not None:
                            yield setting, name, reference, measure, found
