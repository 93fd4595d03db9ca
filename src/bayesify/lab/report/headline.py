"""What the report says in words: the headline about the best model, and whether the Bayesian models are better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bayesify.lab.comparison import Comparison, Row
from bayesify.lab.comparison.columns import REALS, Column, rejection_column
from bayesify.lab.runs import RunError

DECISIVE = ("nll", "ece", "log_density", "rmse")
"""The metrics by which Bayesian models are judged against plain networks."""


def headline(comparison: Comparison, ood_sets: Sequence[str]) -> str:
    """The quality of the model with the best NLL or log density, in one sentence."""
    row = best_row(comparison)
    if len(comparison.rows) == 1:
        return model_summary(row, comparison, ood_sets)
    return f"Best by {_first_decisive(comparison).head}: {row.name}, {_quality(row, comparison, ood_sets)}."


def model_summary(row: Row, comparison: Comparison, ood_sets: Sequence[str]) -> str:
    """The quality of one model in one sentence: means over its runs.

    An out-of-distribution input counts as detected if it is less certain, by total uncertainty, than all but 5% of the
    split's inputs.
    """
    return f"{row.name}: {_quality(row, comparison, ood_sets)}."


def verdict(comparison: Comparison) -> str:
    """Which Bayesian models beat the best plain network, by how much and how reliably; or that none does.

    A difference may be due to chance if not all seeds agree on its sign or, for single runs, if the bootstrap
    intervals overlap.
    """
    return " ".join(verdict_sentences(comparison))


def verdict_sentences(comparison: Comparison) -> list[str]:
    """The verdict sentence by sentence: the conclusion first, then the numbers behind it."""
    plain = [row for row in comparison.rows if row.is_plain]
    bayesian = [row for row in comparison.rows if row.is_bayesian]
    if not plain or not bayesian:
        missing = "plain network" if bayesian else "Bayesian model"
        return [_best_model(comparison), f"There is no {missing} to compare with."]
    duels = [_Duel(column, plain, bayesian) for column in comparison.columns if column.key in DECISIVE]
    seeds = len(comparison.seeds)
    means = f" (means over {seeds} seeds)" if seeds > 1 else ""
    others = [row for row in comparison.rows if not row.is_plain and not row.is_bayesian]
    better = [words for row in others if (words := _beats_all_bayesian(row, duels))]
    return [f"{_who_wins(duels)}{_caveat(duels)}{means}.", *(duel.details() for duel in duels), *better]


def best_row(comparison: Comparison) -> Row:
    """The best model by the first decisive metric."""
    return _best(comparison.rows, _first_decisive(comparison))


def join_words(words: Sequence[str]) -> str:
    """A list in a sentence.

    >>> join_words(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# The quality of one model


def _quality(row: Row, comparison: Comparison, ood_sets: Sequence[str]) -> str:
    words = _regression(row) if comparison.columns[0] in REALS else _classification(row, comparison)
    columns = {name: rejection_column(name) for name in ood_sets}
    detected = [f"{_percent(row, c)} of {name}" for name, c in columns.items() if row.mean(c.key) is not None]
    return f"{words}; detects {join_words(detected)} at 5% false alarms" if detected else words


def _classification(row: Row, comparison: Comparison) -> str:
    accuracy, _, ece = comparison.columns[:3]
    return f"{_percent(row, accuracy)} accuracy, {_percent(row, ece)} calibration error"


def _regression(row: Row) -> str:
    coverage, _, rmse = REALS[:3]
    return f"{_percent(row, coverage)} of targets in the 90% interval, RMSE {rmse.format(_mean(row, rmse))}"


def _percent(row: Row, column: Column) -> str:
    return f"{column.format(_mean(row, column))}%"


# Bayesian models against plain networks


@dataclass(frozen=True)
class _Duel:
    """The Bayesian models against the best plain network, by one metric."""

    column: Column
    plain_rows: Sequence[Row]
    bayesian: Sequence[Row]

    @property
    def metric(self) -> str:
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
        """The values of the best Bayesian model and of the plain network."""
        wins = self.wins_by_seed(self.best)
        seeds = f"; better in {sum(wins)} of {len(wins)} seeds" if len(wins) > 1 else ""
        ours, theirs = self.best.cell_with_unit(self.column), self.plain.cell_with_unit(self.column)
        return f"{self.metric}: {self.best.name} {ours}, {self.plain.name} {theirs}{seeds}."

    def wins_by_seed(self, row: Row) -> list[bool]:
        """Whether a model beats the plain network, for each seed."""
        return [self.beats(ours, theirs) for ours, theirs in row.pairs(self.plain, self.column.key)]

    def uncertain_wins(self) -> str:
        """The metric, if wins by it may be due to chance, with the names of the models if not all wins are."""
        names = [row.name for row in self.winners if self._may_be_chance(row)]
        return f"{self.metric}{f' ({join_words(names)})' if len(names) < len(self.winners) else ''}" if names else ""

    def _may_be_chance(self, row: Row) -> bool:
        if len(row.runs) > 1:  # if all differences have one sign, their mean is at least their standard error
            return not all(self.wins_by_seed(row))
        ours, theirs = (each.intervals.get(self.column.key) for each in (row, self.plain))
        return ours is not None and theirs is not None and ours[0] <= theirs[1] and theirs[0] <= ours[1]


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


def _caveat(duels: Sequence[_Duel]) -> str:
    """Which of the wins may be due to chance."""
    doubts = [doubt for duel in duels if (doubt := duel.uncertain_wins())]
    return f"; may be due to chance on {join_words(doubts)}" if doubts else ""


def _beats_all_bayesian(row: Row, duels: Sequence[_Duel]) -> str:
    """The metrics by which a model that is neither plain nor Bayesian is better than every Bayesian one."""
    won = [duel.column for duel in duels if duel.beats(_mean(row, duel.column), _mean(duel.best, duel.column))]
    return f"{row.name}, which is not Bayesian, has {_values(row, won)}." if won else ""


def _best_model(comparison: Comparison) -> str:
    """The best of models that are all plain or all Bayesian."""
    decisive = [column for column in comparison.columns if column.key in DECISIVE]
    best = _best(comparison.rows, decisive[0])
    return f"{best.name} has {_values(best, decisive)}{', the best of them' if len(comparison.rows) > 1 else ''}."


def _values(row: Row, columns: Sequence[Column]) -> str:
    return join_words([f"{column.head.removesuffix(' %')} {row.cell_with_unit(column)}" for column in columns])


def _first_decisive(comparison: Comparison) -> Column:
    return next(column for column in comparison.columns if column.key in DECISIVE)


def _best(rows: Sequence[Row], column: Column) -> Row:
    best: Row = column.best(rows, key=lambda row: _mean(row, column))
    return best


def _mean(row: Row, column: Column) -> float:
    mean = row.mean(column.key)
    if mean is None:
        path = row.runs[0].folder / "metrics.json"
        raise RunError(
            f"{path}: no {column.key}, which every evaluation has; the file was edited or damaged: delete it, then run "
            f"`bayesify evaluate {path.parent}`"
        )
    return mean
