"""Which cases to refer to a person: the least certain ones, by coverage, by the accuracy that is wanted, or by cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

import numpy as np

from bayesify.lab.comparison.chance import LEVEL, paired_difference
from bayesify.lab.metrics.proportions import exact_interval, tail_probability
from bayesify.lab.report.figures.model_figures import ModelFigures
from bayesify.lab.report.figures.page_figure import File, as_csv, slug
from bayesify.lab.report.numbers import share_words
from bayesify.prediction.results import student_quantile

MOST_REFERRED = 0.3
"""The largest share of cases that is referred to reach a target accuracy."""
STEP = 0.01
"""The shares that are tried are this far apart."""
TARGETS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
"""The accuracies that are tried, unless one is asked for."""
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5)
COSTS = (5.0, 20.0, 100.0)
"""The costs of an error, in units of the cost of referring a case, unless others are given."""


@dataclass(frozen=True)
class Referral:
    """What happens if the cases with scores above a threshold are referred to a person, in each run."""

    rows: tuple[int, ...]
    answered: tuple[int, ...]
    correct: tuple[int, ...]
    thresholds: tuple[float, ...]

    @property
    def share(self) -> float:
        """The share of cases that is referred."""
        return 1 - sum(self.answered) / sum(self.rows)

    @cached_property
    def accuracies(self) -> list[float]:
        """The share of correct answers in each run."""
        return [right / many if many else math.nan for right, many in zip(self.correct, self.answered, strict=True)]

    @property
    def accuracy(self) -> float:
        """The share of correct answers, as a mean over runs."""
        return fmean(self.accuracies)

    @property
    def errors(self) -> float:
        """The errors among all cases, as a share of them."""
        return (sum(self.answered) - sum(self.correct)) / sum(self.rows)

    @property
    def counted(self) -> tuple[int, int]:
        """The correct answers and all answers of one run on average, rounded to the model's disadvantage.

        Seeds may share rows, so that several runs count no more than one.
        """
        many = round(fmean(self.answered))
        return math.floor(many * self.accuracy + 1e-9), many

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The exact 95% interval of the accuracy; the wider bounds of it and of Student's over several runs."""
        if not min(self.answered):
            return 0.0, 1.0
        low, high = exact_interval(*self.counted)
        if len(self.rows) == 1:
            return low, high
        mean, margin = paired_difference(self.accuracies, [0.0] * len(self.accuracies))
        return max(0.0, min(low, mean - margin)), min(1.0, max(high, mean + margin))

    @property
    def accuracy_words(self) -> tuple[str, str]:
        """The accuracy in percent and its interval."""
        return ("–", "") if not min(self.answered) else share_words(self.accuracy, *self.interval)

    @property
    def threshold_words(self) -> str:
        """The score above which cases are referred, for a single run."""
        return "" if len(self.thresholds) > 1 or not self.share else f"{self.thresholds[0]:.3g}"

    def promises(self, target: float, error_probability: float) -> bool:
        """Whether the accuracy is beyond chance at least the target: whether it is by each of the interval's tests."""
        if (
            not min(self.answered)
            or self.accuracy < target
            or tail_probability(*self.counted, target) > error_probability
        ):
            return False
        if len(self.rows) == 1:
            return True
        error = stdev(self.accuracies) / math.sqrt(len(self.rows))
        return self.accuracy - target >= error * student_quantile(1 - error_probability, len(self.rows) - 1)


class Abstention:
    """The accuracy of a model that refers its least certain cases to a person.

    Args:
        scores: The uncertainty of each row, for each run.
        correct: Whether the row's predicted class is the true one, for each run.
    """

    def __init__(self, scores: Sequence[np.ndarray], correct: Sequence[np.ndarray]) -> None:
        orders = [np.argsort(score, kind="stable") for score in scores]
        self._sorted = [score[order] for score, order in zip(scores, orders, strict=True)]
        self._right = [right[order].astype(np.int64).cumsum() for right, order in zip(correct, orders, strict=True)]

    def at(self, share: float) -> Referral:
        """Refer at most this share, the least certain; equally certain cases are answered together."""
        rows = [len(score) for score in self._sorted]
        last = [max(0, n - int(share * n + 1e-9) - 1) for n in rows]
        thresholds = [float(score[i]) if share < 1 else -math.inf for score, i in zip(self._sorted, last, strict=True)]
        pairs = zip(self._sorted, thresholds, strict=True)
        answered = [int(np.searchsorted(score, threshold, "right")) for score, threshold in pairs]
        right = [int(sums[many - 1]) if many else 0 for sums, many in zip(self._right, answered, strict=True)]
        return Referral(tuple(rows), tuple(answered), tuple(right), tuple(thresholds))

    @cached_property
    def by_step(self) -> list[Referral]:
        """Referring 0%, 1%, … 100% of the cases."""
        return [self.at(i * STEP) for i in range(round(1 / STEP) + 1)]

    def reaching(self, target: float, error_probability: float = 1 - LEVEL) -> Referral | None:
        """The fewest referrals for which the accuracy of the answers is beyond chance at least the target.

        Shares are tested from the largest one downwards, each at the same level, until one fails: so the probability of
        promising too much is at most `error_probability` (fixed-sequence testing; Angelopoulos et al. 2021, Learn then
        Test).
        """
        found = None
        for referral in self.by_step[round(MOST_REFERRED / STEP) :: -1]:
            if not referral.promises(target, error_probability):
                break
            found = referral
        return found

    def cheapest(self, cost: float) -> Referral:
        """The referrals of the lowest cost, if an error costs `cost` times as much as a referral."""
        return min(self.by_step, key=lambda referral: cost * referral.errors + referral.share)

    def best_promise(self, error_probability: float, target: float | None = None) -> tuple[float, Referral] | None:
        """The target accuracy to recommend with its referrals: the one asked for, or the highest that makes sense.

        That is at most the first of `TARGETS` above the accuracy without referrals.
        """
        if target is not None:
            found = self.reaching(target, error_probability)
            return None if found is None else (target, found)
        now = self.at(0)
        above = [each for each in TARGETS if each > now.accuracy][:1]
        for each in [*above, *(each for each in reversed(TARGETS) if each <= now.accuracy)]:
            if (found := self.reaching(each, error_probability)) is not None:
                return each, found
        return None


def abstention_of(model: ModelFigures) -> Abstention:
    """The abstention of a classifier by total uncertainty, as it was evaluated."""
    scores, correct = ([rows[f"{model.split}_{name}"] for rows in model.rows_by_run] for name in ("entropy", "correct"))
    return Abstention(scores, correct)


@dataclass(frozen=True)
class Thresholds:
    """A model's table of thresholds: what decides, and what then happens."""

    name: str
    key: str
    lines: tuple[tuple[str, Referral | None, str], ...]
    """The rule, its referrals, and a note."""

    @classmethod
    def of(
        cls, model: ModelFigures, target: float | None, costs: Sequence[float], error_probability: float
    ) -> Thresholds:
        """The table by coverage, by target accuracy and by cost."""
        abstention = abstention_of(model)
        now = abstention.at(0)
        lines: list[tuple[str, Referral | None, str]]
        lines = [(f"refer {share:.0%}", abstention.at(share), "") for share in SHARES]
        for goal in _goals(now.accuracy, target):
            found = abstention.reaching(goal, error_probability)
            lines.append((f"be {percent(goal)}% right", found, "" if found else "not shown by these rows"))
        for cost in costs or COSTS:
            cheapest = abstention.cheapest(cost)
            own, without = (100 * (cost * each.errors + each.share) for each in (cheapest, now))
            note = f"{_cost(own)} referrals per 100 cases; {_cost(without)} if none is referred"
            lines.append((f"an error costs {cost:g} referrals", cheapest, note))
        return cls(model.row.name, slug("thresholds", model.index + 1, model.row.name), tuple(lines))

    @property
    def cells(self) -> list[tuple[str, str, tuple[str, str], str, str]]:
        """The lines as the page shows them: the share, the accuracy with its interval, the threshold."""
        return [
            (rule, "–", ("–", ""), "–", note)
            if found is None
            else (rule, f"{100 * found.share:.1f}", found.accuracy_words, found.threshold_words, note)
            for rule, found, note in self.lines
        ]

    @property
    def files(self) -> tuple[File, ...]:
        """The table as CSV."""
        known = [(rule, found, note) for rule, found, note in self.lines if found is not None]
        columns: dict[str, Sequence[Any]] = {
            "rule": [rule for rule, _, _ in known],
            "referred": [found.share for _, found, _ in known],
            "accuracy": [found.accuracy if min(found.answered) else None for _, found, _ in known],
            "low": [found.interval[0] for _, found, _ in known],
            "high": [found.interval[1] for _, found, _ in known],
            "threshold": [fmean(found.thresholds) for _, found, _ in known],
            "note": [note for _, _, note in known],
        }
        return (File(f"{self.key}.csv", as_csv(columns)),)


def _cost(referrals: float) -> str:
    return f"{referrals:,.1f}" if referrals < 10 else f"{referrals:,.0f}"


def _goals(now: float, asked: float | None) -> list[float]:
    """The target accuracies of the table: one below the accuracy now, some above, and the one asked for."""
    above = [target for target in TARGETS if target > now][:3]
    return sorted({*[target for target in TARGETS if target <= now][-1:], *above, *([] if asked is None else [asked])})


def percent(share: float) -> str:
    """A share in percent, without more digits than it has.

    >>> percent(0.995), percent(0.98)
    ('99.5', '98')
    """
    return f"{100 * share:.6g}"
