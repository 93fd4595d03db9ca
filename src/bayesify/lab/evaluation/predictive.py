"""What a trained model predicts for raw examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.batches import run as output_of
from bayesify.errors import BayesifyError
from bayesify.lab.data import Examples, loader
from bayesify.lab.metrics import scores
from bayesify.lab.recipes import AdaptivePart
from bayesify.lab.runs import Trained
from bayesify.layers import bayesian_layers
from bayesify.likelihood import Likelihood
from bayesify.prediction import Prediction


class EvaluationError(BayesifyError):
    """A model that can't be evaluated."""


def predictive(
    trained: Trained, examples: Examples, *, samples: int | None = None, seed: int = 0, batch_size: int | None = None
) -> Prediction:
    """What a model predicts for raw examples, batch by batch, on the model's device; the result is on the CPU.

    A Bayesian model uses `samples` draws, or the recipe's number or rule, or its own; a plain network is called once.
    """
    options = trained.recipe.evaluation
    batches = _prepared(trained, examples, batch_size or options.batch_size)
    if bayesian_layers(trained.model):
        own = options.samples.rule() if isinstance(options.samples, AdaptivePart) else options.samples
        draws = own if samples is None else samples
        found: Prediction = by.predict(trained.model, batches, draws, seed=seed, likelihood=trained.likelihood)
    else:
        found = _plain(trained.model, trained.likelihood, batches)
    return _checked(_on_cpu(found), trained)


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
