"""What an experiment is: whose claim it tests, on which data, with which networks, by which measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bayesify.lab.comparison.columns import Column
from bayesify.lab.data import Data
from bayesify.lab.recipes import Recipe
from bayesify.lab.trained import Trained

Values = dict[str, float]
"""Measures by their key."""
Measured = Mapping[str, Values]
"""The measures of one network: as it was trained under "", and under what is added to its name, as it was changed."""
ScaleName = Literal["small", "paper"]
Published = Mapping[str, Mapping[str, Mapping[str, str]]]
"""The paper's figures as they are printed: setting → row → key of a measure."""
BASE = "the base's"
"""In a recipe's `model.weights`: those of the base of the same setting and seed."""
EVERY = ""
"""The setting of an expectation for each setting."""


@dataclass(frozen=True)
class Expectation:
    """One comparison that a claim stands on: a row is better than another, or than a number, by a measure."""

    measure: str
    better: str
    worse: str | float
    setting: str = EVERY


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of a paper, and what it claims.

    Attributes:
        paper: The paper's short name.
        place: Which table or figure of it.
        claim: What it claims, in a sentence.
        expectations: The comparisons that must all hold for it to be reproduced.
        published: The paper's own figures, for the tables.
    """

    paper: str
    place: str
    claim: str
    expectations: tuple[Expectation, ...]
    published: Published = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The paper and the place."""
        return f"{self.paper}, {self.place}"


@dataclass(frozen=True)
class Scale:
    """The settings of an experiment: as small as two cores allow, or those of the paper.

    Attributes:
        seeds: The number of seeds, or of splits, for each setting, which is a data set as a rule.
        recipe: The recipe of a setting, a row and a seed.
        words: What the settings are, and in what they differ from the paper's.
        minutes: About how long it takes, on the machine that it is made for.
        machine: That machine.
        together: Whether the seeds of a setting are trained side by side, as suits small networks.
        base: The recipe, by setting and seed, of the network from which recipes start whose weights are `BASE`.
    """

    seeds: Mapping[str, int]
    recipe: Callable[[str, str, int], Recipe]
    words: str
    minutes: int
    machine: str = "one core"
    together: bool = False
    base: Callable[[str, int], Recipe] | None = None


@dataclass(frozen=True)
class Experiment:
    """An experiment that can be run by its name.

    Attributes:
        name: Its name on the command line.
        exhibits: The tables and figures it reproduces.
        rows: The networks that are compared, as the tables name them.
        columns: The measures, with their digits and what is better.
        measure: Measures a trained network on its data.
        small: The settings for two cores.
        paper: Those of the paper.
        least: The fewest seeds or splits of a setting that a verdict can rest on.
        derive: Further measures of each row from the rows of one setting and seed, such as ratios to another row.
        overlap: Test rows divided by training rows, if seeds are splits of the same rows; 0 if seeds are independent.
    """

    name: str
    exhibits: tuple[Exhibit, ...]
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    measure: Callable[[Trained, Data], Measured]
    small: Scale
    paper: Scale
    least: int = 3
    overlap: float = 0.0
    derive: Callable[[Mapping[str, Values]], Mapping[str, Values]] | None = None

    def scale(self, name: ScaleName) -> Scale:
        """The settings by name."""
        return self.small if name == "small" else self.paper

    def column(self, measure: str) -> Column:
        """The column of a measure."""
        return next(column for column in self.columns if column.key == measure)
