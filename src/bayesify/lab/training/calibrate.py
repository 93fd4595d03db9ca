"""What is set by the validation rows after training: the noise of real targets, the temperature of classes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import bayesify as by
from bayesify.lab.data import Data
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.methods import PlainPart, TemperaturePart
from bayesify.lab.runs import device_of
from bayesify.lab.trained import Trained
from bayesify.prediction.calibrate import FEWEST_TARGETS
from bayesify.prediction.likelihood import Likelihood
from bayesify.prediction.results import Classification, Regression
from bayesify.prediction.samples import methods_of, number_of_draws

MOST_NUMBERS = 50_000_000
"""The temperature is set by as many validation rows as have at most so many logits in all draws."""


def calibrate(recipe: Recipe, data: Data, network: nn.Module, likelihood: Likelihood) -> dict[str, Any]:
    """Set the noise of real targets, or the temperature of classes, by the validation rows.

    Not if the recipe has `calibrate: false` or a number for the noise. Plain networks keep a temperature of 1: if
    it is set, they are the method `temperature`.

    Args:
        recipe: The recipe.
        data: Its data.
        network: The trained network.
        likelihood: Its likelihood, which is changed in place.

    Returns:
        What was done, for `run.json`.
    """
    part = recipe.likelihood
    if not part.calibrate:
        return {}
    if isinstance(likelihood, by.Gaussian):
        return _set_noise(recipe, data, network, likelihood) if isinstance(part.precision, str) else {}
    is_plain = isinstance(recipe.method, (PlainPart, TemperaturePart))
    if is_plain or not isinstance(likelihood, by.Categorical) or not len(data.validation):
        return {}
    return _set_temperature(recipe, data, network, likelihood)


def _set_noise(recipe: Recipe, data: Data, network: nn.Module, likelihood: by.Gaussian) -> dict[str, Any]:
    rows = len(data.validation)
    if data.validation.targets.numel() < FEWEST_TARGETS:
        return {"noise": f"as trained, as {rows} validation rows are too few to set it by"}
    before = float(likelihood.log_precision.detach())
    likelihood.calibrate(_real_validation(recipe, data, network, likelihood), data.validation.targets)
    factor = math.exp(0.5 * (before - float(likelihood.log_precision.detach())))
    return {"noise": f"that of training times {factor:.3g}, by {rows} validation rows", "noise_factor": factor}


def _set_temperature(recipe: Recipe, data: Data, network: nn.Module, likelihood: by.Categorical) -> dict[str, Any]:
    asked, device = recipe.evaluation.samples, device_of(recipe)
    samples = number_of_draws(methods_of(network), asked if isinstance(asked, int) else None)
    every = -(-data.validation.targets.numel() * samples * data.targets.count // MOST_NUMBERS)
    rows = data.validation.take(torch.arange(0, len(data.validation), every))
    trained = Trained(network.to(device), likelihood.to(device), data.inputs, data.targets, recipe)
    batches = trained.prepared_batches(rows, recipe.evaluation.batch_size)
    p: Classification = by.predict(network, batches, samples, likelihood=likelihood, draws=True)
    likelihood.calibrate(p, rows.targets.to(p.log_probs.device).long())
    network.cpu(), likelihood.cpu()
    return {"temperature": likelihood.temperature}


def validation_nll(recipe: Recipe, data: Data, network: nn.Module, likelihood: Likelihood) -> float:
    """The negative log density of the validation targets, standardised, per row."""
    p = _real_validation(recipe, data, network, likelihood)
    return float(-p.log_prob(data.validation.targets).double().mean())


def _real_validation(recipe: Recipe, data: Data, network: nn.Module, likelihood: Likelihood) -> Regression:
    """The prediction of the validation rows; network and likelihood are then on the CPU."""
    device = device_of(recipe)
    p = Trained(network.to(device), likelihood.to(device), data.inputs, data.targets, recipe).predict(data.validation)
    network.cpu(), likelihood.cpu()
    assert isinstance(p, Regression), "the likelihood is Gaussian"
    return p
