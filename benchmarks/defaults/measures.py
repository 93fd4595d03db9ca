"""Measures of stored predictions, with and without temperature, and how they vary with rows and seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch

from bayesify.lab.baselines.temperature import best_temperature
from benchmarks.store import Rows

BINS, RESAMPLES = 15, 400


def with_temperature(rows: Rows) -> Rows:
    """The same predictions with the temperature that is best on validation rows, or intervals as much wider.

    The temperature divides the logarithm of the average over draws. For real targets, standard deviations are
    multiplied by the root mean square of the validation rows' standardised errors.
    """
    changed = dict(rows)
    if "validation/mean" in rows:
        errors = (rows["validation/y"] - rows["validation/mean"]) / rows["validation/std"]
        factor = float(np.sqrt((errors**2).mean()))
        for part in ("validation", "test"):
            std = rows[f"{part}/std"] * factor
            errors = (rows[f"{part}/y"] - rows[f"{part}/mean"]) / std
            changed[f"{part}/std"], changed[f"{part}/inside"] = std, np.abs(errors) <= 1.6449
            changed[f"{part}/nll"] = 0.5 * errors**2 + np.log(std) + 0.5 * np.log(2 * np.pi)
            if f"{part}/other/std" in rows:
                changed[f"{part}/other/std"] = rows[f"{part}/other/std"] * factor
        return changed
    temperature = temperature_of(rows)
    for name in [name for name in rows if name.endswith("log_probs")]:
        changed[name] = torch.from_numpy(rows[name] / temperature).log_softmax(-1).numpy()
    return changed


def temperature_of(rows: Rows) -> float:
    """The temperature that is best on validation rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where every row is right, it stays 1
        return best_temperature(*(torch.from_numpy(rows[f"validation/{name}"]) for name in ("log_probs", "y")))


def each_row(rows: Rows, part: str) -> Rows:
    """What the measures of a split need of each row and of each row of other data ("other_…")."""
    if f"{part}/mean" in rows:
        found = {name: rows[f"{part}/{name}"] for name in ("nll", "inside", "epistemic")}
        found |= {"squares": (rows[f"{part}/y"] - rows[f"{part}/mean"]) ** 2, "entropy": rows[f"{part}/std"]}
        if f"{part}/other/std" in rows:
            found |= {"other_entropy": rows[f"{part}/other/std"], "other_epistemic": rows[f"{part}/other/epistemic"]}
        return {name: value.astype(float) for name, value in found.items()}
    log_probs, y = rows[f"{part}/log_probs"].astype(float), rows[f"{part}/y"]
    found = {
        "nll": -log_probs[np.arange(len(y)), y],
        "right": (log_probs.argmax(1) == y).astype(float),
        "confidence": np.exp(log_probs.max(1)),
        "entropy": entropy(log_probs),
        "epistemic": rows[f"{part}/epistemic"].astype(float),
    }
    if f"{part}/other/log_probs" in rows:
        found["other_entropy"] = entropy(rows[f"{part}/other/log_probs"].astype(float))
        found["other_epistemic"] = rows[f"{part}/other/epistemic"].astype(float)
    return found


def entropy(log_probs: np.ndarray) -> np.ndarray:
    """The entropy of each row."""
    found: np.ndarray = -(np.exp(log_probs) * np.maximum(log_probs, -1e30)).sum(1)
    return found


def ece(confidence: np.ndarray, right: np.ndarray) -> float:
    """The expected calibration error in equal bins.

    >>> ece(np.array([0.9, 0.9, 0.6, 0.6]), np.array([1.0, 1.0, 1.0, 0.0]))  # 0.1 for either half
    0.1
    """
    place = np.clip(np.ceil(confidence * BINS) - 1, 0, BINS - 1).astype(int)
    gaps = np.bincount(place, right - confidence, BINS)
    return round(float(np.abs(gaps).sum() / len(right)), 12)


def auroc(inside: np.ndarray, other: np.ndarray) -> float:
    """The probability that a row of other data has the larger score; ties count half.

    >>> auroc(np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.4]))  # 4.5 of 6 pairs
    0.75
    """
    ordered = np.sort(inside)
    below, upto = np.searchsorted(ordered, other, "left"), np.searchsorted(ordered, other, "right")
    return float((below + upto).mean() / (2 * len(inside)))


def measures_of(values: Rows) -> dict[str, float]:
    """All measures of what `each_row` returned, or of a resample of it."""
    found = {"nll": float(values["nll"].mean()), "epistemic": float(values["epistemic"].mean())}
    if "squares" in values:
        found |= {"rmse": float(np.sqrt(values["squares"].mean())), "coverage": float(values["inside"].mean())}
    else:
        found |= {"accuracy": float(values["right"].mean()), "ece": ece(values["confidence"], values["right"])}
    if "other_entropy" in values:
        found["auroc_entropy"] = auroc(values["entropy"], values["other_entropy"])
        found["auroc_mi"] = auroc(values["epistemic"], values["other_epistemic"])
    return found


def resampled(values: Rows, rows: np.ndarray, others: np.ndarray) -> Rows:
    """Some rows, with repetition."""
    return {name: value[others if name.startswith("other_") else rows] for name, value in values.items()}


def with_entropy_only(values: Rows) -> Rows:
    """The rows of a single network, with its entropy (or standard deviation) as its only score."""
    kinds = [kind for kind in ("", "other_") if f"{kind}entropy" in values]
    return values | {f"{kind}epistemic": values[f"{kind}entropy"] for kind in kinds}


def paired(ours: list[Rows], theirs: list[Rows]) -> dict[str, tuple[float, float, float]]:
    """Mean differences of measures over seeds, each with a 95% bootstrap interval over seeds and rows.

    Rows are resampled in the same way for both of a pair, and anew for every seed. A single network has no mutual
    information: the AUROC by ours is compared with that by its entropy.
    """
    theirs = [each if each["epistemic"].any() else with_entropy_only(each) for each in theirs]
    generator = np.random.default_rng(0)
    names = measures_of(ours[0]).keys()
    table: Callable[[Rows], np.ndarray] = lambda values: np.array(list(measures_of(values).values()))  # noqa: E731
    means = np.mean([table(one) - table(other) for one, other in zip(ours, theirs, strict=True)], 0)
    found = []
    for _ in range(RESAMPLES):
        differences = []
        for seed in generator.integers(len(ours), size=len(ours)):
            count, others = len(ours[seed]["nll"]), len(ours[seed].get("other_entropy", ()))
            chosen = generator.integers(count, size=count), generator.integers(max(1, others), size=others)
            pair = (table(resampled(each[seed], *chosen)) for each in (ours, theirs))
            differences.append(next(pair) - next(pair))
        found.append(np.mean(differences, 0))
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    return {name: (float(m), float(a), float(b)) for name, m, a, b in zip(names, means, low, high, strict=True)}
