"""What the contest found: options chosen on rows to choose by, means, costs, and paired differences with intervals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.contest import trial as trials
from benchmarks.contest.contestants import CONTESTANTS, ENSEMBLE, MEMBERS, PLAIN, options_of
from benchmarks.contest.data import DATA
from benchmarks.contest.measures import Measured, difference, shown
from benchmarks.contest.trial import TUNING_SEED, Trial
from benchmarks.store import rounded

SCALED = " + temperature"
TEMPERATURE, LARGEST = PLAIN + SCALED, ENSEMBLE.format(max(MEMBERS)) + SCALED
"""Temperature scaling, and the largest deep ensemble: what others are compared with."""
COSTS = ("train", "predict")
Results = dict[str, Any]


def names() -> Iterator[tuple[str, str, bool]]:
    """Every row of the table: its name, the contestant, and whether it has a temperature."""
    for contestant in CONTESTANTS:
        yield contestant, contestant, False
        yield contestant + SCALED, contestant, True


def chosen_options(data: str, contestant: str, is_scaled: bool) -> list[str] | None:
    """For each fold the options with the lowest NLL on the rows to choose by; None unless all were tried."""
    done = trials.STORE.records()
    tried = [Trial.of(data, contestant, options, TUNING_SEED) for options in options_of(contestant, data)]
    if not all(each in done for each in tried):
        return None
    losses = {each.options: done[each]["losses"][is_scaled] for each in tried if "refused" not in done[each]}
    if not losses:
        return None
    return [min(losses, key=lambda options: losses[options][fold]) for fold in range(DATA[data].folds)]


def final_trials(data: str, contestant: str, seed: int) -> list[Trial]:
    """The trials to show, with what was chosen."""
    plain, scaled = (chosen_options(data, contestant, is_scaled) or [] for is_scaled in (False, True))
    return [Trial(data, contestant, options, seed) for options in dict.fromkeys(plain + scaled)]


def seeds_of(data: str) -> list[int]:
    """The seeds of which temperature scaling is finished; others are shown if they have all of these."""
    done, options = trials.STORE.records(), chosen_options(data, PLAIN, True)
    every = range(DATA[data].seeds) if options else range(0)
    return [seed for seed in every if all(Trial(data, PLAIN, each, seed) in done for each in options or [])]


def measured(data: str, contestant: str, is_scaled: bool) -> tuple[Measured, dict[str, Any]] | None:
    """The measures of a row of the table and its facts, if the trials of all seeds are finished and here."""
    options, done = chosen_options(data, contestant, is_scaled), trials.STORE.records()
    if options is None or not seeds_of(data):
        return None
    by_seed = []
    wanted = [[Trial(data, contestant, each, seed) for each in options] for seed in seeds_of(data)]
    for some in wanted:
        rows = [trials.STORE.rows_of(each) if each in done else None for each in some]
        if any(each is None for each in rows):
            return None
        by_seed.append(shown([each for each in rows if each is not None], is_scaled))
    records = [done[each] for some in wanted for each in some]
    facts = {"options": [json.loads(each) for each in options], "added": float(np.mean([r["added"] for r in records]))}
    for cost in COSTS:
        plain = "plain" if cost == "train" else f"plain_{cost}"
        ratios = [r[f"{cost}_cpu_seconds"] / r[f"{plain}_cpu_seconds"] for r in records if r[f"{plain}_cpu_seconds"]]
        facts[cost] = float(np.median(ratios)) if ratios else None
        facts[f"{cost}_seconds"] = float(np.median([r[f"{cost}_cpu_seconds"] for r in records]))
    return Measured.of(by_seed), facts


def results_of(data: str) -> Results | None:
    """Everything about a data set, as JSON can hold it; None unless temperature scaling has been measured."""
    found = {name: each for name, *which in names() if (each := measured(data, *which)) is not None}
    if TEMPERATURE not in found:
        return None
    rows: Results = {}
    for name, (ours, facts) in found.items():
        rows[name] = facts | {"means": {measure: ours.mean(measure) for measure in ours.values}, "against": {}}
        for reference in (TEMPERATURE, LARGEST):
            if reference in found and reference != name:
                rows[name]["against"][reference] = differences(ours, found[reference][0])
    losses = {name: tuning_loss(data, *which) for name, *which in names() if name in found}
    for name, loss in losses.items():
        rows[name]["tuning_loss"] = loss
    return {"title": DATA[data].title, "seeds": len(seeds_of(data)), "rows": rounded(rows)}


def differences(ours: Measured, theirs: Measured) -> dict[str, tuple[float, float, float]]:
    """All differences with intervals; where they have no mutual information, ours is compared with their entropy."""
    found = {}
    for measure in ours.values:
        other = measure if measure in theirs.values else measure.replace(" mi", " entropy")
        found[measure] = difference(ours, theirs, measure, other)
    return found


def tuning_loss(data: str, contestant: str, is_scaled: bool) -> float:
    """The mean over folds of the lowest NLL on the rows to choose by."""
    done, options = trials.STORE.records(), chosen_options(data, contestant, is_scaled) or []
    records = [done[Trial(data, contestant, each, TUNING_SEED)] for each in options]
    return float(np.mean([record["losses"][is_scaled][fold] for fold, record in enumerate(records)]))
