"""Per-row results behind the metrics: uncertainty and outcome of each row, and the most and least certain inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.data import DataError, Examples, Images, Labels, Masks, Reals, Targets
from bayesify.lab.data.files import read_npz
from bayesify.lab.metrics import crps, quantile_of, scores
from bayesify.lab.metrics.classification import nlls
from bayesify.lab.metrics.regression import INTERVAL
from bayesify.lab.metrics.several_answers import row_mean, share_right
from bayesify.lab.run_files import open_new
from bayesify.lab.runs import Run
from bayesify.lab.trained import EvaluationError, Trained
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression

ROWS, GALLERY = "evaluation.npz", "gallery.npz"
SHOWN = 12
"""The gallery has this many of the least certain rows, and as many of the most certain."""


def rows_of(run: Run) -> dict[str, np.ndarray]:
    """Read the uncertainty and outcome of each evaluated row.

    Args:
        run: An evaluated run.

    Returns:
        Arrays named `SPLIT_NAME`, such as `test_entropy` and `test_correct`, and `SET_SCORE` for out-of-distribution
        sets, such as `noise_entropy`.
    """
    return _read(run, ROWS)


def rows_of_split(run: Run, split: str) -> dict[str, np.ndarray]:
    """Read the same arrays, and raise unless all that the report needs about a split are there, with all their rows."""
    arrays, known = rows_of(run), run.metrics[split]
    is_classes = "nll" in known
    names = ("entropy", "confidence", "correct") if is_classes else ("std", "error", "quantile")
    if f"{split}_truth" in arrays:  # runs of earlier versions lack these
        names = (*names, *(("label", "nll") if is_classes else ("residual", "log_density", "crps", "width")))
        require_arrays(run, ROWS, arrays, [f"{split}_truth"], known["n"])
    require_arrays(run, ROWS, arrays, [f"{split}_{name}" for name in names], known["n"])
    if split == "test":  # with other splits, only sets that were measured before have their rows
        for name, scores_of_set in known.get("ood", {}).items():
            if scores_of_set.get(names[0]):
                key = f"{name}_{names[0]}"
                require_arrays(run, ROWS, arrays, [key], max(1, len(arrays.get(key, ()))))
    return arrays


def gallery_of(run: Run) -> dict[str, np.ndarray]:
    """Read the least certain inputs of each split, followed by the most certain ones.

    Args:
        run: An evaluated run.

    Returns:
        Arrays `SPLIT_inputs`, `SPLIT_truth` and the predictions: `SPLIT_probs` for classes and labels, `SPLIT_label`
        for the classes of pixels, `SPLIT_mean` and `SPLIT_std` in their own units for real targets. Inputs are raw:
        images from 0 to 1, tables standardised.
    """
    return _read(run, GALLERY)


def outcomes(p: Prediction, y: Tensor, targets: Targets) -> dict[str, Tensor]:
    """The uncertainty scores of each row, its target and its predicted one, and by how much it was wrong.

    Of several labels, and of pixels, `confidence` is the mean and `correct` the share that is right. Of real targets
    `error` is standardised; `residual`, `log_density`, `crps` and `width` are in their own units.
    """
    if isinstance(targets, (Labels, Masks)):
        assert isinstance(p, (BinaryPrediction, Classification)), "scores() refuses anything else"
        means = {name: row_mean(getattr(p, name)) for name in ("aleatoric", "confidence")}
        return {**scores(p), **means, "correct": share_right(p, y)}
    if isinstance(p, Classification):
        found = {**scores(p), "aleatoric": p.aleatoric, "confidence": p.confidence, "correct": p.label == y}
        return {**found, "label": p.label, "truth": y, "nll": nlls(p.log_probs, y)}
    assert isinstance(p, Regression) and isinstance(targets, Reals), "scores() refuses anything else"
    scale = torch.tensor(targets.std, dtype=torch.float64)
    low, high = p.interval(INTERVAL)
    return {
        **scores(p),
        "error": (p.mean - y).square().flatten(1).mean(1).sqrt(),
        "quantile": quantile_of(p, y),
        "truth": y,
        "residual": (p.mean.double() - y.double()) * scale,
        "log_density": p.log_prob(y).double() - scale.log().sum(),
        "crps": (crps(p, y) * scale).mean(1),
        "width": ((high - low) * scale).mean(1),
    }


def gallery(p: Prediction, examples: Examples, trained: Trained) -> dict[str, Tensor]:
    """The least certain rows, followed by the most certain."""
    total, epistemic = list(scores(p).items())[:2]
    order = total[1].argsort(descending=True, stable=True)
    few = min(SHOWN, len(order) // 2)
    rows = torch.cat([order[:few], order[len(order) - few :]])
    inputs = examples.raw(rows)
    if isinstance(trained.inputs, Images):
        inputs = trained.inputs.unit(inputs)
    found = {"row": rows, "inputs": inputs, **{name: values[rows] for name, values in (total, epistemic)}}
    if isinstance(trained.targets, Masks):
        assert isinstance(p, Classification)
        return {**found, "label": p.label[rows].byte(), "truth": examples.targets[rows]}
    if isinstance(p, (Classification, BinaryPrediction)):
        return {**found, "probs": p.probs[rows], "truth": examples.targets[rows]}
    assert isinstance(p, Regression) and isinstance(trained.targets, Reals), "task_metrics() refuses anything else"
    mean, std = trained.targets.restore(p.mean[rows], p.std[rows])
    return {**found, "mean": mean, "std": std, "truth": trained.targets.restore(examples.targets[rows], std)[0]}


def add_arrays(run: Run, name: str, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write arrays named `GROUP_KEY` to a file of the run, keeping the arrays of other groups in it."""
    path = run.folder / name
    arrays = {f"{group}_{key}": value.numpy() for group, values in groups.items() for key, value in values.items()}
    known = _read(run, name) if path.is_file() else {}
    part = path.with_suffix(".part")
    with open_new(part) as file:
        np.savez_compressed(file, **known | arrays)  # type: ignore[arg-type]  # its stub takes any keyword for an option
    os.replace(part, path)


def _read(run: Run, name: str) -> dict[str, np.ndarray]:
    path: Path = run.folder / name
    if not path.is_file():
        raise EvaluationError(f"{run.folder}: not evaluated yet; run `bayesify evaluate {run.folder}`")
    try:
        arrays = read_npz(path)
    except DataError as error:
        raise damaged(run, name, str(error).removeprefix(f"{path} ")) from error
    for key, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise damaged(run, name, f"{key} has values of type {array.dtype}; expected numbers")
    return arrays


def require_arrays(run: Run, name: str, arrays: Mapping[str, np.ndarray], keys: Iterable[str], rows: int) -> None:
    """Raise unless a file has arrays of these names, each with this many rows."""
    for key in keys:
        found = arrays[key].shape if key in arrays else None
        if not found or found[0] != rows:
            what = "is missing" if found is None else f"has shape {found}"
            raise damaged(run, name, f"{key} {what}; expected {rows} rows, as in metrics.json")


def damaged(run: Run, name: str, what: str) -> EvaluationError:
    """The error about a file of an evaluation that can't be used."""
    return EvaluationError(
        f"{run.folder / name}: {what}. It was edited or damaged: delete it, then run `bayesify evaluate {run.folder}`"
    )
