"""The first paragraph of the report: which model to use, which cases to refer to a person, and on which evidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.comparison import Comparison, Row
from bayesify.lab.comparison.chance import LEVEL, beats, interval, paired_difference
from bayesify.lab.comparison.columns import CLASSES, REALS
from bayesify.lab.comparison.find_runs import PLAIN
from bayesify.lab.metrics import INTERVAL
from bayesify.lab.metrics.bootstrap import bootstrap
from bayesify.lab.metrics.weighted import Measure, unit_weights
from bayesify.lab.report.abstention import MOST_REFERRED, TARGETS, Referral, abstention_of, percent
from bayesify.lab.report.figures.model_figures import ModelFigures
from bayesify.lab.report.numbers import interval_words, share_words, value, value_with_unit
from bayesify.lab.report.verdict import best_row, decisive, join_words

REFERRED = 0.2
"""The share of cases with real targets whose referral is weighed."""
MOST_NAMED = 3
UNKNOWN = "the evidence does not suffice "


def recommendation(comparison: Comparison, model: ModelFigures, target: float | None = None) -> list[str]:
    """What to do in one sentence, and the sentences that say what it rests on.

    Every number in it is measured, and every claim holds at 95% confidence; where the evidence does not suffice, the
    sentence says so.

    Args:
        comparison: The models.
        model: The rows of the best of them (`best_row`).
        target: The accuracy to reach by referring cases; by default the first round one above the accuracy now.

    Returns:
        The sentences.
    """
    leaders = leading_rows(comparison)
    act, *basis = _act(comparison, model, target)
    which = _choice(leaders, comparison)
    several = f"with {_name(model.row)}, " if len(leaders) > 1 else ""
    if len(leaders) > 1 and act.startswith(UNKNOWN):
        first = f"{which}, nor {act.removeprefix(UNKNOWN)}"
    else:
        first = f"{which}; {several}{act}" if which else act
    return [f"{first[0].upper()}{first[1:]}.", *basis, *_caveats(leaders, comparison)]


def leading_rows(comparison: Comparison) -> list[Row]:
    """The best model, and those that it is not better than by the first decisive metric, beyond chance."""
    best, column = best_row(comparison), decisive(comparison)[0]
    return [best, *(row for row in comparison.rows if row is not best and not beats(best, row, column))]


def _name(row: Row) -> str:
    return f"the {row.name}" if row.name == PLAIN else row.name


def error_probability(comparison: Comparison) -> float:
    """The probability at which a claim about the best model may be wrong, as it is chosen from several."""
    return (1 - LEVEL) / len(comparison.rows)


def _choice(leaders: Sequence[Row], comparison: Comparison) -> str:
    if len(comparison.rows) == 1:
        return ""
    if len(leaders) == 1:
        return f"Use {_name(leaders[0])}"
    few = leaders[:MOST_NAMED]
    more = [f"{len(leaders) - len(few)} more"] if len(leaders) > len(few) else []
    names = join_words([*map(_name, few), *more])
    return f"{UNKNOWN}to choose between {names}"


def _caveats(leaders: Sequence[Row], comparison: Comparison) -> list[str]:
    """What speaks against the best model: a cheaper one that may be as good, or one that is more often right."""
    best, draws = leaders[0], {row.name: row.mean("draws") for row in leaders}
    cheap = [_name(row) for row in leaders if draws[row.name] == 1]
    found = []
    if cheap and _name(best) not in cheap:
        found.append(f"The cheapest of these is {cheap[0]}: it needs a single forward pass.")
    accuracy = CLASSES[0] if comparison.columns[0] == CLASSES[0] else REALS[2]
    better = [_name(row) for row in comparison.rows if row is not best and beats(row, best, accuracy)]
    if better:
        found.append(f"By {accuracy.head.removesuffix(' %')}, {join_words(better)} is better than {_name(best)}.")
    return found


def _act(comparison: Comparison, model: ModelFigures, target: float | None) -> list[str]:
    """What to refer, and the sentences that this rests on."""
    if model.has_one_answer:
        return _classes(comparison, model, target)
    return _several_answers(comparison, model) if model.is_classes else _reals(comparison, model)


def _subject(model: ModelFigures, comparison: Comparison) -> str:
    return "the model" if len(comparison.rows) == 1 else _name(model.row)


def _several_answers(comparison: Comparison, model: ModelFigures) -> list[str]:
    """How often labels or pixels are right; how many cases to refer is not known, as each has many of them."""
    right = f"{value_with_unit(model.row, CLASSES[0])} of labels or pixels"
    ends = interval_words(model.row, CLASSES[0])
    rows = f"On {model.rows_of_a_run:,} {comparison.split} rows{_seeds(model)}"
    return [
        f"{UNKNOWN}to say how many cases to refer to a person",
        f"{rows}, {_subject(model, comparison)} is right in {right}{f' (95% interval {ends})' if ends else ''}.",
    ]


def _classes(comparison: Comparison, model: ModelFigures, target: float | None) -> list[str]:
    """What to refer to be right in the target share of the other cases."""
    abstention, rows = abstention_of(model), f"{comparison.split} rows"
    found = abstention.best_promise(error_probability(comparison), target)
    now = abstention.at(0)
    accuracy = "{}% of cases (95% interval {})".format(*share_words(now.accuracy, *now.interval))
    measured = f"On {model.rows_of_a_run:,} {rows}{_seeds(model)}, {_subject(model, comparison)} is right in {accuracy}"
    if found is None:
        aim = percent(target or next((each for each in TARGETS if each > now.accuracy), TARGETS[-1]))
        return [
            f"{UNKNOWN}to say how many cases to refer to a person",
            f"{measured}{_rest(abstention.at(MOST_REFERRED))}. That does not show that it would be {aim}% right.",
        ]
    goal, referral = found
    if not referral.share:
        return [f"it is right in at least {percent(goal)}% of cases without a person", f"{measured}."]
    return [
        f"refer {_referred(referral)} of cases to a person to be {percent(goal)}% right on the rest",
        f"{measured}{_rest(referral)}. That it is right in at least {percent(goal)}% of these holds with {LEVEL:.0%} "
        f"confidence, for cases like the {rows}.",
    ]


def _referred(referral: Referral) -> str:
    return f"{100 * referral.share:.{int(referral.share < 0.0095)}f}%"


def _rest(referral: Referral) -> str:
    """How often the answers to the other cases are right; nothing if there are none."""
    if not min(referral.answered):
        return ""
    share, ends = referral.accuracy_words
    return f", and without the {_referred(referral)} that it is least certain of, in {share}% ({ends})"


def _reals(comparison: Comparison, model: ModelFigures) -> list[str]:
    """Whether referring the least certain cases lowers the error, and whether intervals hold what they promise."""
    row, (coverage, _, rmse) = model.row, REALS[:3]
    n, ends, cut = model.rows_of_a_run, interval(row, coverage), error_cut(model)
    held = f"its {INTERVAL:.0%} intervals hold {value_with_unit(row, coverage)} of targets"
    if ends is not None:
        low, high = ends
        fits = "as they should" if low <= INTERVAL <= high else "too few" if high < INTERVAL else "more than promised"
        held += f" (95% interval {interval_words(row, coverage)}), {fits}"
    basis = f"On {n:,} {comparison.split} rows{_seeds(model)} its RMSE is {value(row, rmse)}, and {held}."
    if cut is None:
        return [f"{UNKNOWN}to say that its uncertainty finds its errors", basis]
    words = "{}% (95% interval {})".format(*share_words(*cut))
    return [f"refer the {REFERRED:.0%} least certain cases to a person to cut the RMSE by {words}", basis]


def error_cut(model: ModelFigures) -> tuple[float, float, float] | None:
    """By which share the RMSE falls without the least certain cases, and its 95% interval; None if it may be chance."""
    cuts = [_cut(rows[f"{model.split}_std"], rows[f"{model.split}_error"]) for rows in model.rows_by_run]
    values = [float(cut(unit_weights(model.rows_of_a_run, torch.device("cpu")))) for cut in cuts]
    if len(cuts) > 1:
        mean, margin = paired_difference(values, [0.0] * len(values))
        low, high = mean - margin, mean + margin
    else:
        mean = values[0]
        low, high = bootstrap({"cut": cuts[0]}, model.rows_of_a_run, torch.device("cpu")).get("cut", (0.0, 0.0))
    return (mean, low, high) if low > 0 else None


def _cut(score: np.ndarray, error: np.ndarray) -> Measure:
    kept = torch.from_numpy(score <= np.sort(score)[max(0, len(score) - int(REFERRED * len(score)) - 1)]).double()
    squares = torch.from_numpy(error).double().square()

    def measure(counts: Tensor) -> Tensor:
        rest = (counts @ (kept * squares)) / (counts @ kept)
        return 1 - (rest / (counts @ squares / counts.sum(-1))).sqrt()

    return measure


def _seeds(model: ModelFigures) -> str:
    return f" and {len(model.row.runs)} seeds" if len(model.row.runs) > 1 else ""
