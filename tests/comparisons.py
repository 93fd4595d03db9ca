"""Comparisons for tests: what is trained quickly, what is made up, and what a longer evaluation would have found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bayesify as by
from bayesify.lab.comparison import Comparison
from bayesify.lab.data import Arrays, Classes
from bayesify.lab.evaluation import rows_of
from bayesify.lab.evaluation.rows import ROWS, add_arrays, outcomes
from bayesify.lab.metrics import classification_metrics, intervals, selective_metrics
from bayesify.lab.recipes import Recipe
from bayesify.lab.runs import Run, write_json
from bayesify.lab.shift import CORRUPTIONS

DATA = {"limit": 60, "batch_size": 30}
BASE = {
    "data": DATA,
    "model": {"options": {"channels": [4, 8]}},
    "training": {"epochs": 1},
    "evaluation": {"samples": 4},
}
SHORT = {"epochs": 1}
RECIPES: dict[str, Any] = {
    "Rank1": {"method": "Rank1", "training": SHORT},
    "BatchEnsemble": {"method": {"name": "BatchEnsemble", "components": 2}, "training": {**SHORT, "lr": 0.003}},
}
NOISE = {"noise": {"entropy": {"auroc": 0.9, "average_precision": 0.8, "fpr95": 0.4}, "epistemic": None}}


def fake(folder: Path, recipe: Recipe | None = None, **figures: Any) -> Run:
    """A run that says of itself what it is told to."""
    run = Run.create(folder, recipe or Recipe.of({}))
    values = {"n": 100, "accuracy": 0.9, "nll": 0.3, "ece": 0.02, "ood": NOISE}
    write_json(run.folder / "metrics.json", {"test": {**values, **figures}, "overhead": 2.0, "draws": 4})
    run.note(seconds=1.0)
    return run


def faked(folder: Path, **models: list[tuple[float, float]]) -> Comparison:
    """Models by name, those that begin with "plain" without a method, with NLL and ECE for each seed."""
    runs = {}
    for name, pairs in models.items():
        method = "none" if name.startswith("plain") else "Rank1"
        recipes = [Recipe.of({"method": method, "seed": seed}) for seed in range(len(pairs))]
        each = zip(recipes, pairs, strict=True)
        runs[name] = [fake(folder / name / f"seed-{r.seed}", r, nll=nll, ece=ece) for r, (nll, ece) in each]
    return Comparison.of(runs)


def fake_classifier(
    folder: Path, logits: torch.Tensor, truth: torch.Tensor, names: Sequence[str], recipe: Recipe | None = None
) -> Run:
    """A run with these logits on its test rows, measured as any other, without a network behind it."""
    run, p = Run.create(folder, recipe or Recipe.of({})), by.Categorical().predictive(logits[None])
    inputs, targets = Arrays((2,), (0.0, 0.0), (1.0, 1.0)), Classes(tuple(names))
    bounds = {key: list(ends) for key, ends in intervals(p, truth, resamples=40).items()}
    found = {"n": len(truth), **classification_metrics(p, truth), "interval": bounds, **selective_metrics(p, truth)}
    write_json(folder / "metrics.json", {"test": found, "overhead": 0.0, "draws": 1})
    write_json(folder / "preprocessing.json", {"inputs": inputs.to_dict(), "targets": targets.to_dict()})
    add_arrays(run, ROWS, {"test": outcomes(p, truth, targets)})
    run.note(seconds=1.0)
    return run


SCORES = ("entropy", "epistemic", "max_probability", "variance")


def enrich(run: Run, split: str = "test") -> None:
    """Make up what a long evaluation would have found, in the form it has; the same for the same run."""
    draw = np.random.default_rng(run.recipe.seed + 10 * len(run.name))
    metrics = run.metrics
    own = metrics[split]
    own["ood"]["letters"] = own["ood"]["noise"]
    own["shift"] = {
        "mixing": {f"{level / 10:g}": _worse(own, level / 10, draw) for level in range(1, 10)},
        "salt_and_pepper": {f"{level / 10:g}": _worse(own, level / 10, draw) for level in range(1, 6)},
        **{kind: {str(s): _worse(own, s / 6, draw) for s in range(1, 6)} for kind in CORRUPTIONS},
    }
    every = [own["shift"][kind][str(s)] for kind in CORRUPTIONS for s in range(1, 6)]
    own["corrupted"] = {key: float(np.mean([each[key] for each in every])) for key in ("accuracy", "nll", "ece")}
    own["attack"] = {"pgd": _attack(own)}
    write_json(run.folder / "metrics.json", metrics)
    rows = rows_of(run)
    more = {f"letters_{score}": draw.permutation(rows[f"{split}_{score}"]) * 1.5 for score in SCORES}
    np.savez_compressed(run.folder / ROWS, **rows | more)


def _worse(own: dict[str, Any], intensity: float, draw: np.random.Generator) -> dict[str, float]:
    lost = intensity * draw.uniform(0.4, 0.8)
    return {
        "accuracy": own["accuracy"] * (1 - lost),
        "nll": own["nll"] + 2 * lost,
        "ece": own["ece"] + 0.2 * lost,
        "entropy": own["entropy"] + lost,
        "aleatoric": own["aleatoric"] + 0.6 * lost,
        "epistemic": own["epistemic"] and own["epistemic"] + 0.4 * lost,
    }


def _attack(own: dict[str, Any]) -> dict[str, Any]:
    robust, ap = 0.3 * own["accuracy"], {"entropy": 0.7, "epistemic": 0.65 if own["epistemic"] else None}
    options = {"epsilon": 0.03, "steps": 40, "step_size": 0.002, "draws": own["draws"]}
    return {**options, "clean_accuracy": own["accuracy"], "robust_accuracy": robust, "average_precision": ap}
