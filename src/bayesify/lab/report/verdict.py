"""What a comparison says, in words, whichever way it turned out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bayesify.lab.comparison import Comparison, Row
from bayesify.lab.measures import Column

JUDGED = ("nll", "ece", "rmse", "log_density")
"""The figures that say whether being Bayesian paid."""


def in_words(comparison: Comparison) -> str:
    """Which Bayesian models beat the best plain network, by how much and how reliably; or that none does.

    A difference is within chance that not all seeds have, or of single runs, where bootstrap intervals overlap.
    """
    return " ".join(sentences(comparison))


def sentences(comparison: Comparison) -> list[str]:
    """The words one by one: first what it comes to, then the figures for it."""
    plain = [row for row in comparison.rows if row.is_plain]
    bayesian = [row for row in comparison.rows if row.is_bayesian]
    if not plain or not bayesian:
        missing = "plain network" if bayesian else "Bayesian model"
        where = "among them" if len(comparison.rows) > 1 else "beside it"
        return [_leading(comparison), f"No {missing} is {where}, so this says nothing about being Bayesian."]
    duels = [_Duel(column, plain, bayesian) for column in comparison.columns if column.key in JUDGED]
    seeds = len(comparison.seeds)
    means = f" (means of {seeds} seeds)" if seeds > 1 else ""
    others = [row for row in comparison.rows if not row.is_plain and not row.is_bayesian]
    better = [words for row in others if (words := _better(row, duels))]
    return [f"{_headline(duels)}{_hedge(duels)}{means}.", *(duel.details() for duel in duels), *better]


@dataclass(frozen=True)
class _Duel:
    """Bayesian rows against the best plain one, by one figure."""

    column: Column
    plain_rows: Sequence[Row]
    bayesian: Sequence[Row]

    @property
    def name(self) -> str:
        return self.column.head.removesuffix(" %")

    @property
    def plain(self) -> Row:
        return _best(self.plain_rows, self.column)

    @property
    def best(self) -> Row:
        return _best(self.bayesian, self.column)

    @property
    def winners(self) -> list[Row]:
        return [row for row in self.bayesian if self.beats(_mean(row, self.column), _mean(self.plain, self.column))]

    @property
    def beats(self) -> Callable[[float, float], bool]:
        return float.__lt__ if self.column.best is min else float.__gt__

    def details(self) -> str:
        won = self.won(self.best)
        seeds = f"; better in {sum(won)} of {len(won)} seeds" if len(won) > 1 else ""
        ours, theirs = self.best.shown(self.column), self.plain.shown(self.column)
        return f"{self.name}: {self.best.name} {ours}, {self.plain.name} {theirs}{seeds}."

    def won(self, row: Row) -> list[bool]:
        """Whether a row beats the plain one, for each seed."""
        return [self.beats(ours, theirs) for ours, theirs in row.pairs(self.plain, self.column.key)]

    def in_doubt(self) -> str:
        """The figure, if those who win it may do so by chance, with their names where not all do."""
        names = [row.name for row in self.winners if self._may_be_chance(row)]
        return f"{self.name}{f' ({listed(names)})' if len(names) < len(self.winners) else ''}" if names else ""

    def _may_be_chance(self, row: Row) -> bool:
        if len(row.runs) > 1:  # a mean of differences that are all positive is never below its standard error
            return not all(self.won(row))
        ours, theirs = (each.intervals.get(self.column.key) for each in (row, self.plain))
        return ours is not None and theirs is not None and ours[0] <= theirs[1] and theirs[0] <= ours[1]


def _headline(duels: Sequence[_Duel]) -> str:
    """Who beats the plain network on everything that is judged, who on some of it, who on nothing."""
    won = {row.name: tuple(duel.name for duel in duels if row in duel.winners) for row in duels[0].bayesian}
    everything = tuple(duel.name for duel in duels)
    plain = "the plain network" if len(duels[0].plain_rows) == 1 else "the best plain network"
    ahead = [name for name, figures in won.items() if figures == everything]
    figures = listed(everything)
    if len(ahead) == len(won) > 1:
        return f"{'Both' if len(won) == 2 else f'All {len(won)}'} Bayesian models beat {plain} on {figures}"
    some = {part: [name for name in won if won[name] == part] for part in won.values() if part != everything}
    rest = "; ".join(
        f"{listed(names)} on {f'{listed(part)} only' if part else 'neither'}" for part, names in some.items()
    )
    if ahead:
        beat = "beats" if len(ahead) == 1 else "beat"
        return f"{listed(ahead)} {beat} {plain} on {figures}{f'; {rest}' if rest else ''}"
    return f"No Bayesian model beats {plain} on both {figures}: {rest}"


def _hedge(duels: Sequence[_Duel]) -> str:
    """What of the headline may be chance."""
    doubts = [doubt for duel in duels if (doubt := duel.in_doubt())]
    return f"; within chance on {listed(doubts)}" if doubts else ""


def _better(row: Row, duels: Sequence[_Duel]) -> str:
    """By what a model that is neither plain nor Bayesian is better than all that are Bayesian."""
    won = [duel.column for duel in duels if duel.beats(_mean(row, duel.column), _mean(duel.best, duel.column))]
    return f"{row.name}, which is not Bayesian, has {_figures(row, won)}." if won else ""


def _figures(row: Row, columns: Sequence[Column]) -> str:
    return listed([f"{column.head.removesuffix(' %')} {row.shown(column)}" for column in columns])


def _leading(comparison: Comparison) -> str:
    """The best of models that are all plain or all Bayesian."""
    judged = [column for column in comparison.columns if column.key in JUDGED]
    best = _best(comparison.rows, judged[0])
    return f"{best.name} has {_figures(best, judged)}{', the best of them' if len(comparison.rows) > 1 else ''}."


def best_row(comparison: Comparison) -> Row:
    """The best model by the first figure that is judged."""
    return _best(comparison.rows, judge(comparison))


def judge(comparison: Comparison) -> Column:
    """The first figure that is judged."""
    return next(column for column in comparison.columns if column.key in JUDGED)


def _best(rows: Sequence[Row], column: Column) -> Row:
    best: Row = column.best(rows, key=lambda row: _mean(row, column))
    return best


def _mean(row: Row, column: Column) -> float:
    mean = row.mean(column.key)
    assert mean is not None, "every run has what is judged"
    return mean


def listed(names: Sequence[str]) -> str:
    """Names in words.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
