"""What `bayesify inspect` and `bayesify schema` say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bayesify.cli.words import CommandError, Words
from bayesify.convert import convert
from bayesify.lab.models import build, load_weights
from bayesify.lab.recipes import Recipe, training_of
from bayesify.lab.recipes.methods import METHODS
from bayesify.lab.runs import Run, build_network, load_data
from bayesify.summary import summary

YAML = (".yaml", ".yml")


def inspected(
    model: str,
    changes: Sequence[str],
    method: str | None,
    shape: tuple[int, ...],
    outputs: int,
    weights: Path | None,
) -> str:
    """The conversion summary of a run's model, of a recipe's, or of a network by name."""
    if Path(model).suffix == ".safetensors":
        raise CommandError(
            f"{model}: a file of tensors does not say which network it is; give the run's folder instead"
        )
    own = [method, weights, *changes]
    if Path(model).is_dir():
        if any(own):
            raise CommandError(f"{model}: a run's model has its method and weights; leave out the other words")
        return str(summary(Run.open(model).load().model))
    if Path(model).suffix in YAML:
        return str(summary(_of_recipe(Words.of([model, *changes]).recipe(method=method, model__weights=weights))))
    network = _named(model, changes, method, shape, outputs, weights)
    return str(summary(network))


def _of_recipe(recipe: Recipe) -> nn.Module:
    data = load_data(recipe)
    return _bayesian(build_network(recipe, data.inputs, data.targets), recipe)


def _named(
    model: str,
    changes: Sequence[str],
    method: str | None,
    shape: tuple[int, ...],
    outputs: int,
    weights: Path | None,
) -> nn.Module:
    """A network by name; changes are of the method, or of the network as `model.options.KEY=VALUE`."""
    full = [word if word.startswith(("method.", "model.")) else f"method.{word}" for word in changes]
    recipe = Recipe.of({"model": {"name": model}, "method": {"name": method or "Rank1"}}, full)
    part = recipe.model
    network = build(part.name, shape=shape, outputs=outputs, pretrained=part.pretrained, **part.options)
    if weights is not None:
        load_weights(network, weights, ignore=part.ignore)
    return _bayesian(network, recipe)


def _bayesian(network: nn.Module, recipe: Recipe) -> nn.Module:
    families = recipe.method.families()
    return network if families is None else convert(network, families)


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes, with the training that each method has unless a recipe says otherwise."""
    training = {
        kind: {name: training_of(name, trained) for name in METHODS}
        for kind, trained in (("from trained weights", True), ("from scratch", False))
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Recipe.model_json_schema(),
        "x-training": training,
    }
