"""The noise of real targets, set by the validation rows after training."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

import bayesify as by
from bayesify.lab.data import Data
from bayesify.lab.recipes import Recipe
from bayesify.lab.runs import device_of
from bayesify.lab.trained import Trained
from bayesify.prediction.likelihood import Likelihood
from bayesify.prediction.results import Regression

FEWEST_ROWS = 3
"""With fewer validation targets than this, the noise stays as training has left it."""


def calibrate_noise(recipe: Recipe, data: Data, network: nn.Module, likelihood: Likelihood) -> dict[str, Any]:
    """Set the noise of real targets by the validation rows, unless the recipe has a number or `calibrate: false`.

    Args:
        recipe: The recipe.
        data: Its data.
        network: The trained network.
        likelihood: Its likelihood, which is changed in place if it is a Gaussian.

    Returns:
        What was done, for `run.json`.
    """
    part = recipe.likelihood
    if not isinstance(likelihood, by.Gaussian) or not isinstance(part.precision, str) or not part.calibrate:
        return {}
    rows = len(data.validation)
    if data.validation.targets.numel() < FEWEST_ROWS:
        return {"noise": f"as trained, as {rows} validation rows are too few to set it by"}
    before = float(likelihood.log_precision.detach())
    likelihood.calibrate(_validation(recipe, data, network, likelihood), data.validation.targets)
    factor = math.exp(0.5 * (before - float(likelihood.log_precision.detach())))
    return {"noise": f"that of training times {factor:.3g}, by {rows} validation rows", "noise_factor": factor}


def validation_nll(recipe: Recipe, data: Data, network: nn.Module, likelihood: Likelihood) -> float:
    """The negative log density of the validation targets, standardised, per row."""
    p = _validation(recipe, data, network, likelihood)
    return float(-p.log_prob(data.validation.targets).double().mean())


def _validation(recipe: Recipe, data: Data, network: nn.Module, likelihood: Likelihood) -> Regression:
    """The prediction of the validation rows; network and likelihood are then on the CPU."""
    device = device_of(recipe)
    p = Trained(network.to(device), likelihood.to(device), data.inputs, data.targets, recipe).predict(data.validation)
    network.cpu(), likelihood.cpu()
    assert isinstance(p, Regression), "the likelihood is Gaussian"
    return p
