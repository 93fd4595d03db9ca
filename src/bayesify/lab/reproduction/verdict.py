"""What the results say of a claim: paired tests of its expectations, and a verdict in one word."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from bayesify.lab.comparison.chance import paired_difference
from bayesify.lab.reproduction.experiment import EVERY, Exhibit, Expectation, Experiment, ScaleName, Values
from bayesify.lab.reproduction.records import Record

Outcome = Literal["holds", "contradicted", "not told apart", "too few", "not run"]
Verdict = Literal["reproduced", "partly", "not", "undecided"]
Cell = dict[int, float]
"""The values of a measure by seed."""


@dataclass(frozen=True)
class PairedTest:
    """An expectation in one setting, and its paired test: `difference` ± `margin` is better minus worse."""

    expectation: Expectation
    setting: str
    seeds: int
    difference: float
    margin: float
    outcome: Outcome


class Results:
    """The values of an experiment by setting, row, measure and seed."""

    def __init__(self, experiment: Experiment, scale: ScaleName, records: Sequence[Record]) -> None:
        self.experiment, self.scale, self.records = experiment, scale, tuple(records)
        self._cells: dict[tuple[str, str, str], Cell] = {}
        by_seed: dict[tuple[str, int], dict[str, Values]] = {}
        for record in records:
            rows = by_seed.setdefault((record.setting, record.seed), {})
            rows |= {record.row + added: values for added, values in record.measures.items()}
        for (setting, seed), rows in by_seed.items():
            self._keep(setting, seed, rows)
            if experiment.derive is not None:
                self._keep(setting, seed, experiment.derive(rows))

    def _keep(self, setting: str, seed: int, rows: Mapping[str, Values]) -> None:
        for row, values in rows.items():
            for measure, value in values.items():
                self._cells.setdefault((setting, row, measure), {})[seed] = value

    @property
    def settings(self) -> list[str]:
        """The settings with results, in the order of the experiment."""
        found = {record.setting for record in self.records}
        return [setting for setting in self.experiment.scale(self.scale).seeds if setting in found]

    def rows(self, setting: str) -> list[str]:
        """The rows of a setting in the order of the experiment, each followed by what was made of it."""
        found: list[str] = []
        for row in self.experiment.rows:
            own = [record for record in self.records if (record.setting, record.row) == (setting, row)]
            found += dict.fromkeys(row + added for record in own for added in record.measures)
        return found

    def cell(self, setting: str, row: str, measure: str) -> Cell:
        """The values by seed, none if it was not measured."""
        return self._cells.get((setting, row, measure), {})

    def tests(self, exhibit: Exhibit) -> Iterator[PairedTest]:
        """Every expectation of a table or figure in every setting that it is about, whether that was run or not."""
        for expectation in exhibit.expectations:
            every = list(self.experiment.scale(self.scale).seeds)
            for setting in every if expectation.setting == EVERY else [expectation.setting]:
                yield self._test(expectation, setting)

    def _test(self, expectation: Expectation, setting: str) -> PairedTest:
        ours = self.cell(setting, expectation.better, expectation.measure)
        theirs = (
            dict.fromkeys(ours, float(expectation.worse))
            if isinstance(expectation.worse, (int, float))
            else self.cell(setting, expectation.worse, expectation.measure)
        )
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            return PairedTest(expectation, setting, 0, math.nan, math.inf, "not run")
        mean, margin = paired_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
        margin *= math.sqrt(1 + len(seeds) * self.experiment.overlap)
        good = mean > 0 if self.experiment.column(expectation.measure).best is max else mean < 0
        if len(seeds) < self.experiment.least:
            outcome: Outcome = "too few"
        elif abs(mean) <= margin:
            outcome = "not told apart"
        else:
            outcome = "holds" if good else "contradicted"
        return PairedTest(expectation, setting, len(seeds), mean, margin, outcome)

    def verdict(self, exhibit: Exhibit) -> Verdict:
        """The verdict on a table or figure."""
        return verdict([test.outcome for test in self.tests(exhibit)])

    @property
    def overall(self) -> Verdict:
        """The verdict on all of them: that of each if they agree."""
        found = {self.verdict(exhibit) for exhibit in self.experiment.exhibits}
        return found.pop() if len(found) == 1 else "partly" if found & {"reproduced", "partly"} else "undecided"


def verdict(outcomes: Sequence[Outcome]) -> Verdict:
    """*reproduced* if every expectation holds, *partly* if some do, *not* if all were run and some are contradicted.

    >>> verdict(["holds", "holds"]), verdict(["holds", "not told apart"]), verdict(["contradicted", "not told apart"])
    ('reproduced', 'partly', 'not')
    >>> verdict(["not told apart", "too few"]), verdict(["holds", "not run"]), verdict(["contradicted", "not run"])
    ('undecided', 'partly', 'undecided')
    """
    if outcomes and all(outcome == "holds" for outcome in outcomes):
        return "reproduced"
    if "holds" in outcomes:
        return "partly"
    return "not" if "contradicted" in outcomes and "not run" not in outcomes else "undecided"


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and, if there are several, the standard deviation."""
    return fmean(values), stdev(values) if len(values) > 1 else None
