"""What `bayesify compare` compares: several recipes, or one with several methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayesify.cli.words import CommandError, Words
from bayesify.lab.recipes import Recipe, changed

METHODS = ("Rank1", "IBNN", "ECMP")
"""Those that are compared unless others are named."""
BASE = "base."
"""Before a key that is for the plain network alone."""
BAYESIAN = ("method.", *(f"training.{key}" for key in ("freeze_base", "recalibrate", "regulariser")))
"""Changes that a plain network has no use for."""


@dataclass(frozen=True)
class Contest:
    """Recipes by name, and that of the plain network they start from, if they do."""

    recipes: dict[str, dict[str, Any]]
    base: Recipe | None = None

    @classmethod
    def of(cls, words: Words, methods: str | None, finetune: bool | None) -> Contest:
        """Several recipes as they are, or one recipe with several methods, from one plain network's weights."""
        if len(words.recipes) > 1:
            contest = cls(_recipes(words, methods, finetune))
        else:
            contest = _of_methods(words, methods, finetune)
        for name, values in contest.recipes.items():
            _require_one_device(name, Recipe.of(values))
        return contest


def _recipes(words: Words, methods: str | None, finetune: bool | None) -> dict[str, dict[str, Any]]:
    if methods is not None or finetune:
        option = "--finetune" if methods is None else f"--methods {methods}"
        raise CommandError(f"{option} is for one recipe; got {len(words.recipes)}, which are compared as they are")
    stems = [path.stem for path in words.recipes]
    if len(set(stems)) < len(stems):
        raise CommandError(f"recipes are told apart by their names; got {', '.join(map(str, words.recipes))}")
    return {path.stem: changed(Words([path], []).values(), words.changes) for path in words.recipes}


def _of_methods(words: Words, methods: str | None, finetune: bool | None) -> Contest:
    own = [change for change in words.changes if not change.startswith(BASE)]
    if any(change.startswith("method=") for change in own):
        raise CommandError("method=… would make all models the same; say which to compare with --methods")
    values = words.values()
    plain = changed({**values, "method": "none"}, [change for change in own if not change.startswith(BAYESIAN)])
    trained = Recipe.of(plain).model.is_trained
    if trained and finetune is False:
        raise CommandError("--scratch: the recipe starts from trained weights; leave out model.weights and pretrained")
    from_base = not trained and finetune is not False
    names = methods.split(",") if methods else METHODS if from_base else ("none", *METHODS)
    recipes = {name.strip(): changed(_with_method(values, name.strip()), own) for name in names}
    if not from_base:
        return Contest(recipes)
    only = [change.removeprefix(BASE) for change in words.changes if change.startswith(BASE)]
    return Contest(recipes, Recipe.of(plain, only))


def _with_method(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The recipe with a method: its own options where it is the recipe's method already.

    >>> _with_method({"method": {"name": "IBNN", "components": 8}}, "IBNN")
    {'method': {'name': 'IBNN', 'components': 8}}
    >>> _with_method({"method": {"name": "IBNN", "components": 8}}, "ECMP")
    {'method': {'name': 'ECMP'}}
    """
    own = values.get("method")
    same = isinstance(own, Mapping) and own.get("name") == name
    return {**values, "method": own if same else {"name": name}}


def _require_one_device(name: str, recipe: Recipe) -> None:
    """Lightning starts further processes by running the command again, which here would be all of the comparison."""
    if recipe.training.devices not in (1, "1") or recipe.training.nodes > 1:
        raise CommandError(
            f"{name}: compare trains on one device; train each with `bayesify train --devices "
            f"{recipe.training.devices}` into FOLDER/{name}/seed-{recipe.seed}, then compare with --out FOLDER"
        )
