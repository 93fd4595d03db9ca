"""What `bayesify inspect` and `bayesify schema` print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bayesify.cli.arguments import Arguments, CommandError
from bayesify.conversion.summary import summary
from bayesify.lab.models import build, load_weights
from bayesify.lab.models.user_networks import build_user_network, is_user_network
from bayesify.lab.recipes import Recipe, default_training
from bayesify.lab.recipes.defaults import default_noise
from bayesify.lab.recipes.methods import METHOD_PARTS
from bayesify.lab.runs import Run, build_network, load_data, prepared_for_method

YAML = (".yaml", ".yml")


def inspect_network(
    model: str,
    changes: Sequence[str],
    method: str | None,
    shape: tuple[int, ...],
    outputs: int,
    weights: Path | None,
    trust: Path | None = None,
) -> str:
    """The conversion summary of a run's model, of a recipe's, or of a network by name."""
    if Path(model).suffix == ".safetensors":
        raise CommandError(f"{model}: a file of tensors does not say what network it is for; give the run's folder")
    own = [method, weights, *changes]
    if Path(model).is_dir():
        if any(own):
            raise CommandError(f"{model}: a run has its own method and weights; leave out the other arguments")
        return str(summary(Run.open(model, trust=trust).load().model))
    if Path(model).suffix in YAML:
        recipe = Arguments.of([model, *changes]).recipe(trust, method=method, model__weights=weights)
        return str(summary(_network_of_recipe(recipe)))
    network = _network_by_name(model, changes, method, shape, outputs, weights, trust)
    return str(summary(network))


def _network_of_recipe(recipe: Recipe) -> nn.Module:
    data = load_data(recipe)
    return _bayesian(build_network(recipe, data.inputs, data.targets), recipe)


def _network_by_name(
    model: str,
    changes: Sequence[str],
    method: str | None,
    shape: tuple[int, ...],
    outputs: int,
    weights: Path | None,
    trust: Path | None,
) -> nn.Module:
    """A network by name; changes are options of the method, or of the network as `model.options.KEY=VALUE`."""
    full = [word if word.startswith(("method.", "model.")) else f"method.{word}" for word in changes]
    recipe = Recipe.of({"model": {"name": model}, "method": {"name": method or "Rank1"}}, full)
    part = recipe.model
    if is_user_network(part.name):
        network = build_user_network(part.name, part.options, part.pretrained, trust=trust)
    else:
        network = build(part.name, shape=shape, outputs=outputs, pretrained=part.pretrained, **part.options)
    if weights is not None:
        load_weights(network, weights, ignore=part.ignore)
    return _bayesian(prepared_for_method(recipe, network), recipe)


def _bayesian(network: nn.Module, recipe: Recipe) -> nn.Module:
    return recipe.method.convert(network, default_noise(recipe.model.is_trained, real=False))


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes, with the default training of each method."""
    training = {
        kind: {name: default_training(name, trained) for name in METHOD_PARTS}
        for kind, trained in (("from trained weights", True), ("from scratch", False))
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Recipe.model_json_schema(),
        "x-training": training,
    }
