"""A model's metrics on corrupted inputs and under attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bayesify.lab.attacks.registry import find_attack, foolbox
from bayesify.lab.data import Classes, Examples, Images, Inputs, Targets
from bayesify.lab.data.errors import suggest
from bayesify.lab.evaluation.ood_sets import load_ood_sets
from bayesify.lab.metrics import ece, nll
from bayesify.lab.recipes import AttackPart, EvaluationPart
from bayesify.lab.shift import CORRUPTIONS, KINDS, alexnet_errors, corrupted_means, nearest_set, shifted
from bayesify.lab.trained import EvaluationError, Trained
from bayesify.prediction.results import Classification, Prediction

ALL_CORRUPTIONS = "corruptions"
"""In `evaluation.shift`, stands for every corruption."""
IMAGENET_CLASSES = 1000


def require_measurable(options: EvaluationPart, inputs: Inputs, targets: Targets) -> None:
    """Raise if the evaluation options don't fit the data, before anything is trained or measured."""
    kinds = shift_kinds(options.shift)
    images = isinstance(inputs, Images)
    if (kinds or options.attack) and not isinstance(targets, Classes):
        part = "shift" if kinds else "attack"
        raise EvaluationError(f"evaluation.{part} is for classification; this model predicts real numbers")
    for kind in kinds:
        if kind != "mixing" and not images:
            raise EvaluationError(f"evaluation.shift={kind!r} is for images; other inputs can use 'mixing'")
    if options.attack is not None:
        find_attack(options.attack.name)
        foolbox()
        if not images:
            raise EvaluationError("evaluation.attack is for images, whose pixels are bounded")
    load_ood_sets(options.ood, inputs)


def shift_metrics(trained: Trained, examples: Examples, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Accuracy, calibration and uncertainty by kind of shift and intensity; "0" is the unchanged rows."""
    clean = {"0": _basic_metrics(trained.predict(examples), examples)}
    return {kind: clean | _by_intensity(trained, examples, kind) for kind in shift_kinds(kinds)}


def shift_kinds(kinds: Sequence[str]) -> list[str]:
    """The kinds of shift, each once, with "corruptions" expanded to all of them.

    >>> shift_kinds(["mixing", "mixing", "fog"])
    ['mixing', 'fog']
    """
    for kind in kinds:
        if kind not in (*KINDS, ALL_CORRUPTIONS):
            raise EvaluationError(f"evaluation.shift={kind!r}: {suggest(kind, [ALL_CORRUPTIONS, *KINDS])}")
    every = [each for kind in kinds for each in (CORRUPTIONS if kind == ALL_CORRUPTIONS else [kind])]
    return list(dict.fromkeys(every))


def corruption_means(shift: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The means over all corruptions and severities, if all were measured."""
    return {"corrupted": corrupted_means(shift)} if set(CORRUPTIONS) <= set(shift) else {}


def imagenet_c_errors(split: Mapping[str, Any], inputs: Inputs, targets: Targets) -> dict[str, float]:
    """mCE and rmCE relative to AlexNet, if the images and classes can be ImageNet's and all corruptions were measured.

    (On others, AlexNet's errors mean nothing: comparisons divide by those of the plain network.)
    """
    is_imagenet = isinstance(inputs, Images) and nearest_set(*inputs.shape[1:]) == "ImageNet-C"
    if "corrupted" not in split or not is_imagenet or targets.count != IMAGENET_CLASSES:
        return {}
    clean = next(iter(split["shift"].values()))["0"]
    return alexnet_errors(split["shift"], clean["accuracy"])


def attack_metrics(trained: Trained, examples: Examples, part: AttackPart) -> dict[str, Any]:
    """A model's accuracy, and how well its uncertainty detects the attack on its posterior predictive."""
    from bayesify.lab.attacks import attack  # imported here because it imports foolbox

    return attack(trained, examples, **part.model_dump(exclude_none=True)).to_dict()


def _by_intensity(trained: Trained, examples: Examples, kind: str) -> dict[str, dict[str, float]]:
    found = {level: shifted(examples, kind, level, inputs=trained.inputs) for level in KINDS[kind]}
    return {f"{level:g}": _basic_metrics(trained.predict(each), each) for level, each in found.items()}


def _basic_metrics(p: Prediction, examples: Examples) -> dict[str, float]:
    assert isinstance(p, Classification), "require_measurable allows classes only"
    y = examples.targets
    values = {"accuracy": (p.label == y).double().mean(), "nll": nll(p.log_probs, y), "ece": ece(p.probs, y)}
    values |= {name: getattr(p, name).double().mean() for name in ("entropy", "aleatoric", "epistemic")}
    return {name: float(value) for name, value in values.items()}
