"""What experiments measure of networks for classes: as they are and with a temperature, also on changed inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from torch import Tensor

import bayesify as by
from bayesify.lab.attacks import attack
from bayesify.lab.baselines.temperature import best_temperature
from bayesify.lab.comparison.columns import Column, percent
from bayesify.lab.data import Data, Examples
from bayesify.lab.data.examples import evenly_spread
from bayesify.lab.evaluation.ood_sets import load_ood_sets
from bayesify.lab.metrics import accuracy, accuracy_at, average_precision, ece, nll, normalised_disagreement, scores
from bayesify.lab.reproduction.experiment import Measured, Values
from bayesify.lab.shift import CORRUPTIONS, KINDS, shifted
from bayesify.lab.trained import Trained
from bayesify.prediction.results import Classification

SCALED = " + temperature"
FIT = (
    Column("nll", "NLL", ("nll",), min, 4),
    percent("error", "error", ["error"], min),
    percent("ece", "ECE", ["ece"], min),
)
"""The error is in percent, as in iBNN's tables; Rank-1's have the accuracy."""
CORRUPTED = (
    Column("cnll", "cNLL", ("cnll",), min, 3),
    percent("cerror", "error, corrupted", ["cerror"], min),
    percent("cece", "cECE", ["cece"], min),
)
DIVERSITY = Column("diversity", "diversity", ("diversity",), max, 3)
"""How often two draws differ, divided by their mean error (Rank-1, section 3.6 of v1)."""
REJECTION = percent("rejection", "error rejected", ["rejection"], max)
"""By how much the error falls if the fifth of the inputs with the most mutual information is rejected."""
RELATIVE = (
    Column("mce_plain", "mCE", ("mce_plain",), min, 1, 100),
    Column("rmce_plain", "rmCE", ("rmce_plain",), min, 1, 100),
)
"""Corruption errors relative to the plain network's (EMP, D.4)."""


def classes(trained: Trained, data: Data) -> Measured:
    """NLL, error and calibration of the test rows, and the same with the temperature that is best for validation.

    Of a network with draws also their diversity, and what rejection by mutual information is worth.
    """
    p, y, temperature = predicted(trained, data.test), data.test.targets, temperature_of(trained, data)
    found = {added: _fit(_scaled(p, t), y) for added, t in (("", 1.0), (SCALED, temperature))}
    if p.samples > 1:
        gain = found[""]["error"] - (1 - accuracy_at(p, y, "epistemic")["0.8"])
        found[""] |= {"diversity": float(normalised_disagreement(p, y)), "rejection": gain}
    return found


def corrupted_classes(trained: Trained, data: Data) -> Measured:
    """The same, and the means over all corruptions and severities, on the recipe's number of rows.

    The error of each corruption is there too, under "error fog" and so on.
    """
    ways = {"": 1.0, SCALED: temperature_of(trained, data)}
    few = evenly_spread(data.test, trained.recipe.evaluation.rows)
    cells: dict[str, list[tuple[str, Values]]] = {added: [] for added in ways}
    for kind in CORRUPTIONS:
        for level in KINDS[kind]:
            rows = shifted(few, kind, level, inputs=trained.inputs)
            p = predicted(trained, rows)
            for added, temperature in ways.items():
                cells[added].append((kind, _fit(_scaled(p, temperature), rows.targets)))
    found = classes(trained, data)
    for added, values in found.items():
        values |= {f"c{name}": fmean(cell[name] for _, cell in cells[added]) for name in cells[added][0][1]}
        for kind in CORRUPTIONS:
            values[f"error {kind}"] = fmean(cell["error"] for own, cell in cells[added] if own == kind)
    return found


def relative_errors(rows: Mapping[str, Values], plain: str) -> dict[str, Values]:
    """mCE and rmCE of each row with one seed, relative to the plain network's (EMP, D.4, by its table 8).

    >>> fog = {f"error {kind}": 0.4 for kind in CORRUPTIONS} | {"error": 0.2}
    >>> relative_errors({"plain": fog, "other": {**fog, "error": 0.3}}, "plain")["other"]
    {'mce_plain': 1.0, 'rmce_plain': 0.5}
    """
    reference = rows.get(plain, {})
    keys = [f"error {kind}" for kind in CORRUPTIONS]
    found = {}
    for row, values in rows.items():
        if not all(key in values and key in reference for key in keys):
            continue
        ratios = [values[key] / reference[key] for key in keys]
        relative = [(values[key] - values["error"]) / (reference[key] - reference["error"]) for key in keys]
        found[row] = {"mce_plain": fmean(ratios), "rmce_plain": round(fmean(relative), 9)}
    return found


def predicted(trained: Trained, rows: Examples) -> Classification:
    """The prediction of rows as the network was trained, without any temperature."""
    p = replace(trained, likelihood=by.Categorical()).predict(rows)
    assert isinstance(p, Classification)
    return p


def temperature_of(trained: Trained, data: Data) -> float:
    """The temperature of the mean probabilities that is best for the validation rows; 1 if there are none."""
    if not len(data.validation):
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where every row is right, it stays 1
        return best_temperature(predicted(trained, data.validation).log_probs, data.validation.targets)


def scaled(p: Classification, temperature: float) -> Classification:
    """The prediction of the mean probabilities with a temperature, as one draw."""
    found = by.Categorical().predictive(_scaled(p, temperature).unsqueeze(0))
    assert isinstance(found, Classification)
    return found


def _scaled(p: Classification, temperature: float) -> Tensor:
    return (p.log_probs / temperature).log_softmax(-1)


def _fit(log_probs: Tensor, y: Tensor) -> Values:
    probs = log_probs.exp()
    found = {"nll": nll(log_probs, y), "error": 1 - accuracy(probs, y), "ece": ece(probs, y)}
    return {name: float(value) for name, value in found.items()}


def detection(trained: Trained, data: Data, sets: Sequence[str]) -> Values:
    """Average precision of the mutual information against PGD and other data sets; of the entropy for one network.

    BayesAdapter's measure: the out-of-distribution inputs are the positive ones.
    """
    few = evenly_spread(data.test, trained.recipe.evaluation.rows)
    inside, found = predicted(trained, few), {}
    score = "epistemic" if inside.samples > 1 else "entropy"
    for name, rows in load_ood_sets(list(sets), trained.inputs).items():
        outside = predicted(trained, evenly_spread(rows, min(len(rows), len(few))))
        found[f"ap_{name}"] = float(average_precision(scores(inside)[score], scores(outside)[score]))
    part = trained.recipe.evaluation.attack
    if part is not None:
        against = attack(trained, few, **part.model_dump(exclude_none=True)).average_precision
        found["ap_pgd"] = float(against[score] or 0.0)
    return found


def noise_curve(trained: Trained, data: Data, kind: str, levels: Sequence[float]) -> Measured:
    """Mean entropy, and the epistemic share of it, at each intensity of a noise (iBNN, figure 8)."""
    few = evenly_spread(data.test, trained.recipe.evaluation.rows)
    found: dict[str, Values] = {}
    for level in levels:
        p = predicted(trained, shifted(few, kind, level, inputs=trained.inputs) if level else few)
        entropy, epistemic = float(p.entropy.mean()), float(p.epistemic.mean())
        found[f", {level:g}"] = {"entropy": entropy, "share": epistemic / entropy}
    return found


def draws_of(trained: Trained, data: Data, counts: Sequence[int]) -> Measured:
    """The fit with several numbers of draws."""
    found: dict[str, Values] = {}
    for count in counts:
        p = replace(trained, likelihood=by.Categorical()).predict(data.test, count)
        assert isinstance(p, Classification)
        found[f", {count} draws"] = _fit(p.log_probs, data.test.targets)
    return found
