"""The rows behind the metrics: each one's uncertainty and outcome, and the most and least certain as they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data import Examples, Images, Reals
from bayesify.lab.evaluation.predictive import EvaluationError
from bayesify.lab.metrics import quantile_of, scores
from bayesify.lab.runs import Run, Trained
from bayesify.prediction import Classification, Prediction, Regression

ROWS, GALLERY = "evaluation.npz", "gallery.npz"
SHOWN = 12
"""So many of the least certain rows, and of the most certain, are in the gallery."""


def rows_of(run: Run) -> dict[str, np.ndarray]:
    """Each row's uncertainty and whether it was right: `SPLIT_NAME` arrays, and `SET_SCORE` of strange inputs."""
    return _read(run, ROWS)


def gallery_of(run: Run) -> dict[str, np.ndarray]:
    """The least certain rows of each split, then the most certain: `SPLIT_inputs`, `SPLIT_truth` and what is predicted.

    Inputs are raw: images from 0 to 1, tables standardised. Classes have `probs`, real targets `mean` and `std`, in
    their own units.
    """
    return _read(run, GALLERY)


def outcomes(p: Prediction, y: Tensor) -> dict[str, Tensor]:
    """The scores of each row, and how it turned out."""
    if isinstance(p, Classification):
        return {**scores(p), "aleatoric": p.aleatoric, "confidence": p.confidence, "correct": p.label == y}
    assert isinstance(p, Regression), "scores() has refused the others"
    error = (p.mean - y).square().flatten(1).mean(1).sqrt()
    return {**scores(p), "error": error, "quantile": quantile_of(p, y)}


def gallery(p: Prediction, examples: Examples, trained: Trained) -> dict[str, Tensor]:
    """The least certain rows, then the most certain."""
    total, epistemic = list(scores(p).items())[:2]
    order = total[1].argsort(descending=True, stable=True)
    few = min(SHOWN, len(order) // 2)
    rows = torch.cat([order[:few], order[len(order) - few :]])
    inputs = examples.raw(rows)
    if isinstance(trained.inputs, Images):
        inputs = trained.inputs.unit(inputs)
    found = {"row": rows, "inputs": inputs, **{name: values[rows] for name, values in (total, epistemic)}}
    if isinstance(p, Classification):
        return {**found, "probs": p.probs[rows], "truth": examples.targets[rows]}
    assert isinstance(p, Regression) and isinstance(trained.targets, Reals), "measured() has refused the others"
    mean, std = trained.targets.restore(p.mean[rows], p.std[rows])
    return {**found, "mean": mean, "std": std, "truth": trained.targets.restore(examples.targets[rows], std)[0]}


def keep(run: Run, name: str, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write arrays named `GROUP_KEY` into a run's file, beside those of other groups that are there."""
    path = run.folder / name
    arrays = {f"{group}_{key}": value.numpy() for group, values in groups.items() for key, value in values.items()}
    known = _read(run, name) if path.is_file() else {}
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **known | arrays)  # type: ignore[arg-type]  # its stub takes any keyword for an option
    os.replace(part, path)


def _read(run: Run, name: str) -> dict[str, np.ndarray]:
    path: Path = run.folder / name
    if not path.is_file():
        raise EvaluationError(f"{run.folder}: not evaluated yet; `bayesify evaluate {run.folder}` does it")
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
