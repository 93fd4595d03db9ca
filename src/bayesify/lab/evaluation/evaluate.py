"""How good a trained model is: `metrics.json` in its run's folder, and the rows behind it in `evaluation.npz`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.batches import run as output_of
from bayesify.errors import BayesifyError
from bayesify.lab.data import Arrays, Classes, Columns, Examples, Images, Inputs, Reals, TensorExamples, loader
from bayesify.lab.metrics import auroc, classification_metrics, quantile_of, regression_metrics, scores
from bayesify.lab.runs import Run, Trained, write_json
from bayesify.layers import bayesian_layers
from bayesify.likelihood import Likelihood
from bayesify.prediction import Classification, Prediction, Regression

SPLITS = ("validation", "test")
STRANGE = 1000
"""So many inputs of noise are set against each split."""
SPREAD = 3.0
"""Noise for tables and arrays is so many times as wide as the training data."""


class EvaluationError(BayesifyError):
    """A model that can't be evaluated."""


def predictive(
    trained: Trained, examples: Examples, *, samples: int | None = None, seed: int = 0, batch_size: int | None = None
) -> Prediction:
    """What a model predicts for raw examples, batch by batch, on the model's device; the result is on the CPU.

    A Bayesian model uses `samples` draws, or the recipe's number, or its own; a plain network is called once.
    """
    options = trained.recipe.evaluation
    batches = _prepared(trained, examples, batch_size or options.batch_size)
    if bayesian_layers(trained.model):
        draws = options.samples if samples is None else samples
        found: Prediction = by.predict(trained.model, batches, draws, seed=seed, likelihood=trained.likelihood)
    else:
        found = _plain(trained.model, trained.likelihood, batches)
    return _checked(_on_cpu(found), trained)


def evaluate(run: Run, *, splits: Sequence[str] = SPLITS, samples: int | None = None) -> dict[str, Any]:
    """Measure a run's model on each split that has rows, and write `metrics.json`.

    Each split has its number of rows, the metrics of its task, and under `ood` how well noise is told from it: the
    AUROC of total and of epistemic uncertainty (null for the latter where a single draw has none). `threshold` is the
    total uncertainty above which the recipe's `evaluation.abstain` share of the validation rows lies (of the test rows
    where there is no validation), for the abstain flag of predictions. `overhead` is what the method added, in percent.
    What is known of other splits stays, and the threshold with them unless validation rows are measured again.
    """
    trained, data = run.load(), run.data()
    chosen = {split: getattr(data, split) for split in _known(splits) if len(getattr(data, split))}
    if not chosen:
        raise EvaluationError(f"{run.folder}: no row in {' or '.join(splits)}; set data.validation or data.test")
    found = {split: predictive(trained, examples, samples=samples) for split, examples in chosen.items()}
    strange = predictive(trained, noise(trained.inputs, STRANGE), samples=samples)
    known = run.metrics if (run.folder / "metrics.json").exists() else {}
    metrics: dict[str, Any] = known | {
        split: {
            "n": len(chosen[split]),
            **measured(p, chosen[split].targets, trained),
            "ood": _ood(p, strange),
            "draws": p.samples,
        }
        for split, p in found.items()
    }
    limit = known.get("threshold")
    judge = next((split for split in SPLITS if split in found), next(iter(found)))
    if limit is None or judge == "validation" or judge == limit["split"]:
        limit = {**threshold(found[judge], trained.recipe.evaluation.abstain), "split": judge}
    summary = by.summary(trained.model)
    metrics |= {
        "draws": strange.samples,
        "overhead": summary.overhead,
        "parameters": {"base": summary.base, "added": summary.added},
        "threshold": limit,
    }
    _write_rows(rows_file(run), found, {split: each.targets for split, each in chosen.items()}, strange)
    write_json(run.folder / "metrics.json", metrics)
    return metrics


def measured(p: Prediction, y: Tensor, trained: Trained) -> dict[str, float]:
    """The metrics of the task that the model was trained for."""
    if isinstance(p, Classification) and isinstance(trained.targets, Classes):
        return classification_metrics(p, y)
    if isinstance(p, Regression) and isinstance(trained.targets, Reals):
        return regression_metrics(p, y, trained.targets)
    raise EvaluationError(f"{type(p).__name__} for targets that are {type(trained.targets).__name__}: no metrics fit")


def threshold(p: Prediction, share: float) -> dict[str, Any]:
    """The total uncertainty above which a share of the rows lies, and of which kind it is.

    >>> p = by.Categorical().predictive(torch.tensor([[[0.0, 0.0], [9.0, 0.0], [7.0, 0.0], [8.0, 0.0]]]))
    >>> found = threshold(p, 0.25)
    >>> found["by"], (p.entropy > found["value"]).tolist()
    ('entropy', [True, False, False, False])
    """
    kind, values = next(iter(scores(p).items()))
    falling = values.sort(descending=True).values
    above = int(share * len(values) + 1e-9)
    lowest = torch.nextafter(falling[-1], falling.new_tensor(-torch.inf))
    return {"by": kind, "value": float(torch.cat([falling, lowest[None]])[above]), "share": share}


def noise(inputs: Inputs, rows: int, seed: int = 0) -> Examples:
    """Inputs that mean nothing, raw like a data set's.

    Images are uniform noise over the whole range of pixels. Numbers of tables and arrays are Gaussian around the
    training mean with three times the training deviation; categories are uniform.

    >>> noise(Images((1, 2, 2), (0.5,), (0.2,)), 3).raw(torch.arange(3)).shape
    torch.Size([3, 1, 2, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(inputs, Images):
        x = torch.rand(rows, *inputs.shape, generator=generator)
    elif isinstance(inputs, Columns):  # whose raw numbers are standardised
        numbers = SPREAD * torch.randn(rows, len(inputs.numeric), generator=generator)
        sizes = [len(words) for words in inputs.categories]
        codes = [torch.randint(size, (rows, 1), generator=generator).float() for size in sizes]
        x = torch.cat([numbers, *codes], 1)
    elif isinstance(inputs, Arrays):
        wide = SPREAD * torch.randn(rows, *inputs.shape, generator=generator)
        x = wide * torch.tensor(inputs.std) + torch.tensor(inputs.mean)
    else:
        raise EvaluationError(f"no noise is defined for inputs that are {type(inputs).__name__}")
    return TensorExamples(x, torch.full((rows,), -1))


def rows_file(run: Run) -> Path:
    """Where `evaluate` leaves each row's uncertainty and whether it was right, for figures: `SPLIT_NAME` arrays."""
    return run.folder / "evaluation.npz"


def rows_of(run: Run) -> dict[str, np.ndarray]:
    """The arrays that `evaluate` left behind."""
    if not rows_file(run).is_file():
        raise EvaluationError(f"{run.folder}: not evaluated yet; `bayesify evaluate {run.folder}` does it")
    with np.load(rows_file(run), allow_pickle=False) as arrays:
        return dict(arrays)


def _prepared(trained: Trained, examples: Examples, batch_size: int) -> Iterator[Tensor]:
    tensor = next(trained.model.parameters(), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    for x, _ in loader(examples, batch_size, num_workers=trained.recipe.data.workers):
        yield trained.inputs.prepare(x.to(device))


def _plain(model: nn.Module, likelihood: Likelihood, batches: Iterator[Tensor]) -> Prediction:
    """The predictive of one network, whose draws all agree."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = [likelihood.predictive(output_of(model, x)[None], keep=likelihood.keeps_draws) for x in batches]
    finally:
        model.train(was_training)
    if not parts:
        raise EvaluationError("nothing to predict: there are no examples")
    return type(parts[0]).join(parts)


def _on_cpu(p: Prediction) -> Prediction:
    values = {field.name: getattr(p, field.name) for field in fields(p)}
    there: dict[str, Any] = {name: value.cpu() for name, value in values.items() if isinstance(value, Tensor)}
    return replace(p, **there)


def _checked(p: Prediction, trained: Trained) -> Prediction:
    for value in scores(p).values():
        if bad := int((~torch.isfinite(value)).sum()):
            raise EvaluationError(
                f"{trained.recipe.model.name}: {bad} of {len(value)} predictions are NaN or infinite; its training "
                "diverged (lower training.lr, or set training.clip) or these inputs are far outside of its range"
            )
    return p


def _known(splits: Sequence[str]) -> Sequence[str]:
    for split in splits:
        if split not in ("train", *SPLITS):
            raise EvaluationError(f"no split is called {split!r}; there are train, validation and test")
    return splits


def _ood(p: Prediction, strange: Prediction) -> dict[str, dict[str, float | None]]:
    """The AUROC of noise against a split, by each score that varies at all."""
    pairs = {kind: (values, scores(strange)[kind]) for kind, values in scores(p).items()}
    flat = {kind: p.samples == 1 and "epistemic" in kind for kind in pairs}
    return {"noise": {kind: None if flat[kind] else float(auroc(*pair)) for kind, pair in pairs.items()}}


def _write_rows(path: Path, found: dict[str, Prediction], targets: dict[str, Tensor], strange: Prediction) -> None:
    rows = {"noise": scores(strange)} | {split: {**scores(p), **_hits(p, targets[split])} for split, p in found.items()}
    arrays = {f"{split}_{name}": value.numpy() for split, values in rows.items() for name, value in values.items()}
    if path.is_file():
        with np.load(path, allow_pickle=False) as known:
            arrays = dict(known) | arrays
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # its stub takes any keyword for an option
    os.replace(part, path)


def _hits(p: Prediction, y: Tensor) -> dict[str, Tensor]:
    """How each row turned out."""
    if isinstance(p, Classification):
        return {"confidence": p.confidence, "correct": p.label == y}
    assert isinstance(p, Regression), "scores() has refused the others"
    return {"error": (p.mean - y).square().flatten(1).mean(1).sqrt(), "quantile": quantile_of(p, y)}
