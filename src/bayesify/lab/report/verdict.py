"""Whether the Bayesian models are better than the plain networks, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bayesify.lab.comparison import Comparison, Row
from bayesify.lab.comparison.chance import beats, difference
from bayesify.lab.comparison.columns import Column
from bayesify.lab.report.numbers import difference_words, value_with_unit
from bayesify.lab.runs import RunError

DECISIVE = ("nll", "ece", "log_density", "rmse")
"""The metrics by which Bayesian models are judged against plain networks."""


def verdict(comparison: Comparison) -> str:
    """Which Bayesian models beat the best plain network, by how much and how reliably; or that none does.

    A difference counts only if it is beyond chance: if its 95% interval, over seeds or over the rows, is without zero.
    """
    return " ".join(verdict_sentences(comparison))


def verdict_sentences(comparison: Comparison) -> list[str]:
    """The verdict sentence by sentence: the conclusion first, then the numbers behind it."""
    plain = [row for row in comparison.rows if row.is_plain]
    bayesian = [row for row in comparison.rows if row.is_bayesian]
    if not plain or not bayesian:
        missing = "plain network" if bayesian else "Bayesian model"
        return [_best_model(comparison), f"There is no {missing} to compare with."]
    duels = [_Duel(column, plain, bayesian) for column in decisive(comparison)]
    seeds = len(comparison.seeds)
    means = f" (means over {seeds} seeds)" if seeds > 1 else ""
    others = [row for row in comparison.rows if not row.is_plain and not row.is_bayesian]
    better = [words for row in others if (words := _beats_all_bayesian(row, duels))]
    return [f"{_who_wins(duels)}{_who_loses(duels)}{means}.", *(duel.details() for duel in duels), *better]


def best_row(comparison: Comparison) -> Row:
    """The best model by the first decisive metric, of those that no other is better than by any, if there are some."""
    columns = decisive(comparison)
    unbeaten = [
        row
        for row in comparison.rows
        if not any(beats(o, row, c) for o in comparison.rows if o is not row for c in columns)
    ]
    return _best(unbeaten or comparison.rows, columns[0])


def join_words(words: Sequence[str]) -> str:
    """A list in a sentence.

    >>> join_words(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# Bayesian models against plain networks


@dataclass(frozen=True)
class _Duel:
    """The Bayesian models against the best plain network, by one metric."""

    column: Column
    plain_rows: Sequence[Row]
    bayesian: Sequence[Row]

    @property
    def metric(self) -> str:
        return _metric(self.column)

    @property
    def plain(self) -> Row:
        return _best(self.plain_rows, self.column)

    @property
    def best(self) -> Row:
        return _best(self.bayesian, self.column)

    @property
    def winners(self) -> list[Row]:
        return [row for row in self.bayesian if beats(row, self.plain, self.column)]

    @property
    def losers(self) -> list[Row]:
        return [row for row in self.bayesian if beats(self.plain, row, self.column)]

    def details(self) -> str:
        """The values of the best Bayesian model and of the plain network."""
        pairs = self.best.pairs(self.plain, self.column.key)
        wins = sum(self.column.best(pair) == pair[0] != pair[1] for pair in pairs)
        seeds = f"; better in {wins} of {len(pairs)} seeds" if len(pairs) > 1 else ""
        chance = "" if self.best in (*self.winners, *self.losers) else "; may be due to chance"
        found = difference(self.best, self.plain, self.column)
        apart = "" if found is None else f", a difference of {difference_words(found, self.column)}"
        ours, theirs = (value_with_unit(row, self.column) for row in (self.best, self.plain))
        metric = f"{self.metric[0].upper()}{self.metric[1:]}"
        return f"{metric}: {self.best.name} {ours}, {self.plain.name} {theirs}{apart}{seeds}{chance}."


def _who_wins(duels: Sequence[_Duel]) -> str:
    """Who beats the plain network on all decisive metrics, who on some, who on none."""
    won = {row.name: tuple(duel.metric for duel in duels if row in duel.winners) for row in duels[0].bayesian}
    everything = tuple(duel.metric for duel in duels)
    plain = "the plain network" if len(duels[0].plain_rows) == 1 else "the best plain network"
    ahead = [name for name, metrics in won.items() if metrics == everything]
    metrics = join_words(everything)
    if len(ahead) == len(won) > 1:
        return f"{'Both' if len(won) == 2 else f'All {len(won)}'} Bayesian models beat {plain} on {metrics}"
    some = {part: [name for name in won if won[name] == part] for part in won.values() if part != everything}
    rest = "; ".join(
        f"{join_words(names)} on {f'{join_words(part)} only' if part else 'neither'}" for part, names in some.items()
    )
    if ahead:
        beat = "beats" if len(ahead) == 1 else "beat"
        return f"{join_words(ahead)} {beat} {plain} on {metrics}{f'; {rest}' if rest else ''}"
    return f"No Bayesian model beats {plain} on both {metrics}: {rest}"


def _who_loses(duels: Sequence[_Duel]) -> str:
    """Who is worse than the plain network, and by which metrics."""
    lost = {row.name: [duel.metric for duel in duels if row in duel.losers] for row in duels[0].bayesian}
    return "".join(f"; {name} is worse on {join_words(metrics)}" for name, metrics in lost.items() if metrics)


def _beats_all_bayesian(row: Row, duels: Sequence[_Duel]) -> str:
    """The metrics by which a model that is neither plain nor Bayesian is better than every Bayesian one."""
    won = [duel.column for duel in duels if all(beats(row, other, duel.column) for other in duel.bayesian)]
    return f"{row.name}, which is not Bayesian, has {_values(row, won)}." if won else ""


def _best_model(comparison: Comparison) -> str:
    """The best of models that are all plain or all Bayesian."""
    columns = decisive(comparison)
    best = _best(comparison.rows, columns[0])
    return f"{best.name} has {_values(best, columns)}{', the best of them' if len(comparison.rows) > 1 else ''}."


def _values(row: Row, columns: Sequence[Column]) -> str:
    return join_words([f"{_metric(column)} {value_with_unit(row, column)}" for column in columns])


def decisive(comparison: Comparison) -> list[Column]:
    """The columns by which models are judged, the first one before the others."""
    return [column for column in comparison.columns if column.key in DECISIVE]


def _metric(column: Column) -> str:
    return column.head.removesuffix(" %")


def _best(rows: Sequence[Row], column: Column) -> Row:
    best: Row = column.best(rows, key=lambda row: required_mean(row, column))
    return best


def required_mean(row: Row, column: Column) -> float:
    """The mean over runs of a metric that every evaluation has."""
    mean = row.mean(column.key)
    if mean is None:
        path = row.runs[0].folder / "metrics.json"
        raise RunError(
            f"{path}: no {column.key}, which every evaluation has; the file was edited or damaged: delete it, then run "
            f"`bayesify evaluate {path.parent}`"
        )
    return mean
