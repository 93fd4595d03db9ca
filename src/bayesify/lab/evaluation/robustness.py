"""What is left of a model's quality on corrupted and on attacked inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bayesify.lab.attacks.known import attack_called, foolbox
from bayesify.lab.data import Classes, Examples, Images, Inputs, Targets
from bayesify.lab.data.errors import nearest
from bayesify.lab.evaluation.predictive import EvaluationError, predictive
from bayesify.lab.evaluation.strange import other_sets
from bayesify.lab.metrics import ece, nll
from bayesify.lab.recipes import AttackPart, EvaluationPart
from bayesify.lab.runs import Trained
from bayesify.lab.shift import CORRUPTIONS, KINDS, corrupted_means, shifted
from bayesify.prediction import Classification, Prediction

ALL = "corruptions"
"""Stands for every corruption."""


def require_measurable(options: EvaluationPart, inputs: Inputs, targets: Targets) -> None:
    """Raise where a recipe's evaluation asks for what can't be, before anything is measured or trained."""
    kinds = named_kinds(options.shift)
    images = isinstance(inputs, Images)
    if (kinds or options.attack) and not isinstance(targets, Classes):
        part = "shift" if kinds else "attack"
        raise EvaluationError(f"evaluation.{part} is measured for classes; this model predicts real numbers")
    for kind in kinds:
        if kind != "mixing" and not images:
            raise EvaluationError(f"evaluation.shift={kind!r} is for images; for these inputs there is 'mixing'")
    if options.attack is not None:
        attack_called(options.attack.name)
        foolbox()
        if not images:
            raise EvaluationError("evaluation.attack is for images, whose pixels have bounds to stay in")
    other_sets(options.ood, inputs)


def shifted_metrics(trained: Trained, examples: Examples, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Accuracy, calibration and uncertainty by kind of shift and its intensity, from 0 for the rows as they are."""
    clean = {"0": _short(predictive(trained, examples), examples)}
    return {kind: clean | _by_intensity(trained, examples, kind) for kind in named_kinds(kinds)}


def named_kinds(kinds: Sequence[str]) -> list[str]:
    """The kinds of shift, each once, with those that "corruptions" stands for.

    >>> named_kinds(["mixing", "mixing", "fog"])
    ['mixing', 'fog']
    """
    for kind in kinds:
        if kind not in (*KINDS, ALL):
            raise EvaluationError(f"evaluation.shift={kind!r}: {nearest(kind, [ALL, *KINDS])}")
    every = [each for kind in kinds for each in (CORRUPTIONS if kind == ALL else [kind])]
    return list(dict.fromkeys(every))


def corrupted(shift: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The means over all corruptions and severities, where all were measured."""
    return {"corrupted": corrupted_means(shift)} if set(CORRUPTIONS) <= set(shift) else {}


def attacked(trained: Trained, examples: Examples, part: AttackPart) -> dict[str, Any]:
    """How a model does under an attack on its posterior predictive."""
    from bayesify.lab.attacks import attack  # which itself predicts

    return attack(trained, examples, **part.model_dump(exclude_none=True)).to_dict()


def _by_intensity(trained: Trained, examples: Examples, kind: str) -> dict[str, dict[str, float]]:
    found = {level: shifted(examples, kind, level, inputs=trained.inputs) for level in KINDS[kind]}
    return {f"{level:g}": _short(predictive(trained, those), those) for level, those in found.items()}


def _short(p: Prediction, examples: Examples) -> dict[str, float]:
    assert isinstance(p, Classification), "its targets are classes"
    y = examples.targets
    values = {"accuracy": (p.label == y).double().mean(), "nll": nll(p.log_probs, y), "ece": ece(p.probs, y)}
    values |= {name: getattr(p, name).double().mean() for name in ("entropy", "aleatoric", "epistemic")}
    return {name: float(value) for name, value in values.items()}
