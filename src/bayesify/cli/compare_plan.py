"""`ComparePlan`: which recipes `bayesify compare` trains: several recipes, or one with several methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayesify.cli.arguments import Arguments, CommandError
from bayesify.lab.recipes import Recipe, apply_overrides

METHODS = ("Rank1", "IBNN", "ECMP")
"""The methods that are compared by default."""
BASE = "base."
"""The prefix of a key that is changed for the plain network only."""
BAYESIAN_KEYS = ("method.", *(f"training.{key}" for key in ("freeze_base", "recalibrate", "regulariser")))
"""Keys that don't apply to a plain network."""


@dataclass(frozen=True)
class ComparePlan:
    """Recipes by name, and the recipe of the plain network that they fine-tune, if they do."""

    recipes: dict[str, dict[str, Any]]
    base: Recipe | None = None

    @classmethod
    def of(cls, words: Arguments, methods: str | None, finetune: bool | None) -> ComparePlan:
        """Plan for several recipes as they are, or for one recipe with several methods."""
        if len(words.recipes) > 1:
            plan = cls(_several_recipes(words, methods, finetune))
        else:
            plan = _one_recipe(words, methods, finetune)
        for name, values in plan.recipes.items():
            _require_one_device(name, Recipe.of(values))
        return plan


def _several_recipes(words: Arguments, methods: str | None, finetune: bool | None) -> dict[str, dict[str, Any]]:
    if methods is not None or finetune:
        option = "--finetune" if methods is None else f"--methods {methods}"
        raise CommandError(f"{option} needs a single recipe; the {len(words.recipes)} given are compared as they are")
    stems = [path.stem for path in words.recipes]
    if len(set(stems)) < len(stems):
        raise CommandError(f"recipes need different file names; got {', '.join(map(str, words.recipes))}")
    return {path.stem: apply_overrides(Arguments([path], []).values(), words.changes) for path in words.recipes}


def _one_recipe(words: Arguments, methods: str | None, finetune: bool | None) -> ComparePlan:
    own = [change for change in words.changes if not change.startswith(BASE)]
    if any(change.startswith("method=") for change in own):
        raise CommandError("method=… would make all models the same; choose the methods to compare with --methods")
    values = words.values()
    plain = apply_overrides(
        {**values, "method": "none"}, [change for change in own if not change.startswith(BAYESIAN_KEYS)]
    )
    trained = Recipe.of(plain).model.is_trained
    if trained and finetune is False:
        raise CommandError(
            "--scratch: the recipe starts from trained weights; leave out model.weights and model.pretrained"
        )
    from_base = not trained and finetune is not False
    names = methods.split(",") if methods else METHODS if from_base else ("none", *METHODS)
    recipes = {name.strip(): apply_overrides(_with_method(values, name.strip()), own) for name in names}
    if not from_base:
        return ComparePlan(recipes)
    only = [change.removeprefix(BASE) for change in words.changes if change.startswith(BASE)]
    return ComparePlan(recipes, Recipe.of(plain, only))


def _with_method(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The recipe with another method; its options stay if the recipe has that method already.

    >>> _with_method({"method": {"name": "IBNN", "components": 8}}, "IBNN")
    {'method': {'name': 'IBNN', 'components': 8}}
    >>> _with_method({"method": {"name": "IBNN", "components": 8}}, "ECMP")
    {'method': {'name': 'ECMP'}}
    """
    own = values.get("method")
    same = isinstance(own, Mapping) and own.get("name") == name
    return {**values, "method": own if same else {"name": name}}


def _require_one_device(name: str, recipe: Recipe) -> None:
    """Raise if a recipe uses several devices: Lightning would run the whole comparison again in each process."""
    if recipe.training.devices not in (1, "1") or recipe.training.nodes > 1:
        raise CommandError(
            f"{name}: compare trains on one device; train each run with `bayesify train --devices "
            f"{recipe.training.devices} --out FOLDER/{name}/seed-{recipe.seed}`, then compare with --out FOLDER"
        )
