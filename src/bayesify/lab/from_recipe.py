"""What a recipe names: its data, its plain network and its likelihood."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

import torch
from torch import nn

import bayesify as by
from bayesify.lab.data import Classes, Data, Inputs, Labels, Masks, Reals, Targets, load
from bayesify.lab.models import build, load_weights
from bayesify.lab.models.norm_dropout import with_dropout_before_norms
from bayesify.lab.models.user_networks import build_user_network, is_user_network
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.methods import OwnDropoutPart
from bayesify.lab.run_files import RunError
from bayesify.prediction.likelihood import Likelihood


def load_data(recipe: Recipe) -> Data:
    """Load the data that a recipe names."""
    part = recipe.data
    shared = {
        "seed": recipe.seed,
        **{key: getattr(part, key) for key in ("validation", "test", "calibration", "limit", "download")},
    }
    path = None if part.path is None else expand_path(part.path)
    return load(part.name, path=path, **shared, **part.options)


def build_network(recipe: Recipe, inputs: Inputs, targets: Targets, *, weights: bool = True) -> nn.Module:
    """Build the plain network that a recipe names, for the shape of the data, and load its weights."""
    part = recipe.model
    pretrained = part.pretrained and weights
    outputs = number_of_outputs(recipe, targets)
    if is_user_network(part.name):
        network = build_user_network(part.name, part.options, pretrained, trust=recipe.trust)
    else:
        network = build(part.name, shape=inputs.shape, outputs=outputs, pretrained=pretrained, **part.options)
    if part.weights and weights:
        load_weights(network, expand_path(part.weights), ignore=part.ignore)
    for p in network.parameters() if recipe.training.channels_last else ():
        if p.dim() == 4:  # `Module.to` refuses tensors of 5 dimensions, such as K copies of a kernel
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return prepared_for_method(recipe, network)


def prepared_for_method(recipe: Recipe, network: nn.Module) -> nn.Module:
    """The plain network with the dropout layers that its method needs."""
    part = recipe.method
    if isinstance(part, OwnDropoutPart) and part.before_norms is not None:
        return with_dropout_before_norms(network, part.before_norms)
    return network


def expand_path(path: str) -> Path:
    """A recipe's path, with `~` and environment variables such as $BAYESIFY_DATA replaced."""
    return Path(os.path.expandvars(path)).expanduser()


LIKELIHOODS: dict[type[Targets], tuple[str, str]] = {
    Classes: ("categorical", "classes"),
    Masks: ("categorical", "classes of pixels"),
    Labels: ("bernoulli", "several labels"),
    Reals: ("gaussian", "real numbers"),
}
"""The likelihood of each kind of targets, and what these are."""


def make_likelihood(
    recipe: Recipe,
    targets: Targets,
    *,
    precision: float | str | None = None,
    precision_factor: float = 1.0,
    temperature: float = 1.0,
) -> Likelihood:
    """The likelihood that a recipe names, or the one that fits the targets, with what was saved of a trained one."""
    name = recipe.likelihood.name
    fitting, what = LIKELIHOODS[type(targets)]
    if name not in ("auto", fitting):
        raise RunError(f"likelihood.name={name!r} does not fit: the targets are {what}, which need {fitting!r}")
    if fitting == "bernoulli":
        return by.Bernoulli()
    if fitting == "categorical":
        return by.Categorical(1 if isinstance(targets, Masks) else -1, temperature=temperature)
    precision = precision or _standardised_precision(recipe, targets)
    likelihood = by.Gaussian("learned" if precision == "auto" else precision)  # type: ignore[arg-type]
    likelihood.log_precision.data += math.log(precision_factor)
    return likelihood


def _standardised_precision(recipe: Recipe, targets: Targets) -> float | str:
    """The precision of standardised targets that a recipe asks for; that of a target in its units, times its variance.

    >>> from bayesify.lab.data import Reals
    >>> given = Recipe.of({"likelihood": {"precision": 0.1, "units": "target"}})
    >>> _standardised_precision(given, Reals(("price",), mean=(20.0,), std=(10.0,)))
    10.0
    """
    precision = recipe.likelihood.precision
    if isinstance(precision, str) or recipe.likelihood.units == "standardised":
        return precision
    assert isinstance(targets, Reals)
    if targets.count > 1:
        raise RunError(
            f"likelihood.units='target' is for one target, but there are {targets.count}: {', '.join(targets.names)}; "
            "give the precision of standardised targets"
        )
    return precision * targets.std[0] ** 2


def with_precision(recipe: Recipe, precision: Literal["learned", "input"]) -> Recipe:
    """The recipe with another kind of noise."""
    return recipe.model_copy(update={"likelihood": recipe.likelihood.model_copy(update={"precision": precision})})


def number_of_outputs(recipe: Recipe, targets: Targets) -> int:
    """The number of outputs that a network needs; for a real target a mean, and perhaps a log-precision."""
    per_input = isinstance(targets, Reals) and recipe.likelihood.precision == "input"
    return targets.count * (2 if per_input else 1)
