"""Measures of what is shown of trials, and how they vary with rows and seeds.

Every measure is the lab's, a function of how often each row counts, so that thousands of resamples are quick. The same
resamples are used for all contestants, so that differences are paired; and for all seeds, whose rows are the same.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesify.familiarity.density import Ranks
from bayesify.lab.baselines import best_temperature
from bayesify.lab.metrics.calibration import Bins, top_confidence
from bayesify.lab.metrics.ood_detection import ACCEPTED, area_under_roc
from bayesify.lab.metrics.selective_prediction import area_under_risk
from bayesify.lab.metrics.weighted import Measure, mean
from bayesify.methods.distributions import entropy
from benchmarks.contest.data import HELD
from benchmarks.store import Rows

RESAMPLES = 400
SCORES = ("entropy", "mi", "doubt")
LEAST_LOG_PROB = -100.0
"""A true class of probability 0 counts as this."""
Counts = dict[str, Tensor]
"""For each kind of rows, how often each counts in each resample."""


@dataclass
class Shown:
    """What is shown of one group: logarithms of probabilities, labels, and the scores of each row."""

    log_probs: Tensor
    y: Tensor | None
    scores: dict[str, Tensor]


def temperature_of(rows: Rows, fold: int, is_scaled: bool) -> float:
    """The temperature that is best on the rows to choose by, or 1."""
    if not is_scaled:
        return 1.0
    some = rows[f"{HELD}/fold"] != fold
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where every row is right, it stays 1
        return best_temperature(*(torch.from_numpy(rows[f"{HELD}/{name}"][some]) for name in ("log_probs", "y")))


def loss_of(rows: Rows, fold: int, is_scaled: bool) -> float:
    """The NLL of the rows to choose by, with their best temperature if `is_scaled`."""
    some = rows[f"{HELD}/fold"] != fold
    log_probs = scaled(rows[f"{HELD}/log_probs"][some], temperature_of(rows, fold, is_scaled))
    return float(nll(log_probs, torch.from_numpy(rows[f"{HELD}/y"][some])).mean())


def scaled(log_probs: np.ndarray, temperature: float) -> Tensor:
    """The logarithms of the average's probabilities with a temperature."""
    return (torch.from_numpy(log_probs).double() / temperature).log_softmax(-1)


def nll(log_probs: Tensor, y: Tensor) -> Tensor:
    """The loss of each row."""
    return -log_probs.gather(1, y.unsqueeze(1)).squeeze(1).clamp_min(LEAST_LOG_PROB)


def shown(by_fold: list[Rows], is_scaled: bool) -> dict[str, Shown]:
    """What is shown of every group; fold k is that of the k-th trial, whose options were chosen on the other fold."""
    parts: dict[str, list[Shown]] = {}
    for fold, rows in enumerate(by_fold):
        temperature = temperature_of(rows, fold, is_scaled)
        held = scaled(rows[f"{HELD}/log_probs"][rows[f"{HELD}/fold"] != fold], temperature)
        usual = Ranks.of(entropy(held))
        for name in [name.removesuffix("/fold") for name in rows if name.endswith("/fold")]:
            own = rows[f"{name}/fold"] == fold
            log_probs = scaled(rows[f"{name}/log_probs"][own], temperature)
            uncertain = entropy(log_probs)
            unfamiliar = torch.from_numpy(rows[f"{name}/unfamiliar"][own])
            scores = {"entropy": uncertain, "doubt": usual.surprise(uncertain.float()) + unfamiliar}
            if rows[f"{HELD}/epistemic"].any():
                scores["mi"] = torch.from_numpy(rows[f"{name}/epistemic"][own])
            y = torch.from_numpy(rows[f"{name}/y"][own]) if f"{name}/y" in rows else None
            parts.setdefault(name, []).append(Shown(log_probs, y, scores))
    return {name: joined(some) for name, some in parts.items()}


def joined(parts: list[Shown]) -> Shown:
    """The rows of all folds."""
    labels = [part.y for part in parts if part.y is not None]
    scores = {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores}
    return Shown(torch.cat([part.log_probs for part in parts]), torch.cat(labels) if labels else None, scores)


def kind_of(group: str) -> str:
    """Groups of one kind have the same rows: an image is resampled together with its other severities.

    >>> kind_of("corrupted 3"), kind_of("near mnist")
    ('corrupted', 'near mnist')
    """
    return "corrupted" if group.startswith("corrupted") else group


def once(groups: dict[str, Shown]) -> Counts:
    """Every row once."""
    return {kind_of(name): torch.ones(1, len(each.log_probs), dtype=torch.float64) for name, each in groups.items()}


def resampled(groups: dict[str, Shown]) -> Counts:
    """How often each row counts in each of `RESAMPLES` resamples; the same for groups of the same sizes."""
    found: Counts = {}
    for name, each in groups.items():
        kind, rows = kind_of(name), len(each.log_probs)
        generator = torch.Generator().manual_seed(len(found))
        if kind not in found:
            drawn = torch.randint(rows, (RESAMPLES, rows), generator=generator)
            counts = torch.zeros(RESAMPLES, rows, dtype=torch.float64)
            found[kind] = counts.scatter_add_(1, drawn, torch.ones_like(counts))
    return found


def measures_of(groups: dict[str, Shown], counts: Counts) -> dict[str, np.ndarray]:
    """All measures, each for every resample.

    Corruptions: the mean over severities; other data: the mean over the near and over the far sets. The calibration
    error of a severity is that of all its kinds together.
    """
    found: dict[str, list[Tensor]] = {}
    held = groups[HELD]
    for name, each in groups.items():
        if each.y is not None:
            correct = "" if name == HELD else "c"
            for measure, function in labelled(each).items():
                found.setdefault(correct + measure, []).append(function(counts[kind_of(name)]))
        else:
            both = torch.cat([counts[HELD], counts[name]], 1)
            for score, values in each.scores.items():
                inside = held.scores[score]
                truth = torch.arange(both.shape[1]) >= len(inside)
                place = name.split()[0]
                rates = {
                    "auroc": area_under_roc(torch.cat([inside, values.to(inside)]), truth),
                    "fpr95": false_positives(inside, values),
                }
                for measure, function in rates.items():
                    found.setdefault(f"{measure} {place} {score}", []).append(function(both))
    return {name: torch.stack(values).mean(0).numpy() for name, values in found.items()}


def labelled(each: Shown) -> dict[str, Measure]:
    """The measures of rows with labels."""
    assert each.y is not None
    confidence, correct = top_confidence(each.log_probs.exp(), each.y)
    return {
        "accuracy": mean(correct),
        "nll": mean(nll(each.log_probs, each.y)),
        "ece": Bins(confidence, correct).expected,
        "aurc": area_under_risk(each.scores["entropy"], ~correct),
    }


def false_positives(inside: Tensor, other: Tensor) -> Measure:
    """FPR95: the share of other rows accepted where 95% of the first rows are, as a function of counts."""
    order, others = inside.sort(), other.to(inside).sort()
    below = torch.searchsorted(others.values, order.values, right=True)  # other rows accepted at each threshold

    def measure(counts: Tensor) -> Tensor:
        own, theirs = counts[:, : len(inside)][:, order.indices], counts[:, len(inside) :][:, others.indices]
        needed = torch.ceil(ACCEPTED * own.sum(1, keepdim=True) - 1e-9)
        place = torch.searchsorted(own.cumsum(1), needed).clamp_max(len(inside) - 1)
        accepted = torch.nn.functional.pad(theirs.cumsum(1), (1, 0)).gather(1, below[place.squeeze(1)].unsqueeze(1))
        return accepted.squeeze(1) / theirs.sum(1)

    return measure


@dataclass
class Measured:
    """The measures of a contestant: for each, the values by seed, and those of every resample by seed (seeds, R)."""

    values: dict[str, np.ndarray]
    resamples: dict[str, np.ndarray]

    @classmethod
    def of(cls, seeds: list[dict[str, Shown]]) -> Measured:
        """Measure what is shown for each seed."""
        values = [measures_of(groups, once(groups)) for groups in seeds]
        counts = resampled(seeds[0])
        resamples = [measures_of(groups, counts) for groups in seeds]
        return cls(
            {name: np.concatenate([each[name] for each in values]) for name in values[0]},
            {name: np.stack([each[name] for each in resamples]) for name in values[0]},
        )

    def mean(self, name: str) -> float | None:
        """The mean over seeds."""
        return float(self.values[name].mean()) if name in self.values else None


def difference(ours: Measured, theirs: Measured, name: str, other: str | None = None) -> tuple[float, float, float]:
    """The mean difference over seeds, and its 95% interval over rows and seeds, which are resampled together.

    Resampled means of few seeds vary too little, by √((S-1)/S), which is corrected.
    """
    other = name if other is None else other
    values = ours.values[name] - theirs.values[other]
    found = ours.resamples[name] - theirs.resamples[other]
    seeds, resamples = found.shape
    drawn = np.random.default_rng(0).integers(seeds, size=(seeds, resamples))
    means = found.mean(0)
    deviations = np.take_along_axis(found, drawn, 0).mean(0) - means
    factor = math.sqrt(seeds / (seeds - 1)) if seeds > 1 else 1.0
    low, high = np.quantile(means + factor * deviations, [0.025, 0.975])
    # Calibration errors grow when rows are resampled: intervals are around the difference, not around its resamples.
    shift = float(values.mean() - means.mean())
    return float(values.mean()), float(low) + shift, float(high) + shift
