"""`train`: train a recipe in any form, or a recipe that is made for data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from bayesify.lab.default_choices import as_lines
from bayesify.lab.recipe_for_data import recipe_for
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.run_names import RUNS, first_free, is_data, name_of
from bayesify.lab.runs import Run
from bayesify.lab.training.train_recipe import train_recipe

AnyRecipe = Recipe | Mapping[str, Any] | str | Path


def train(
    recipe: AnyRecipe,
    folder: str | Path | None = None,
    *,
    target: str | None = None,
    changes: Iterable[str] = (),
    trust: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    evaluated: bool = True,
    callbacks: Sequence[L.Callback] = (),
) -> Run:
    """Train a recipe and evaluate the model; for data, make the recipe first.

    Args:
        recipe: What to train: a `Recipe`, nested values as in a recipe, a YAML file; or data as `lab.recipe_for` takes
            them, such as "customers.csv" with `target="churn"`.
        folder: The run's folder, which must not hold a run yet, unless `resume`. By default the first free one of
            runs/NAME-METHOD, runs/NAME-METHOD-2, ….
        target: The column or array of the data to predict.
        changes: Changes to the recipe, such as `"training.epochs=5"`.
        trust: A Python file of yours that `model.name` may name a function of. It runs.
        resume: Continue the run in the folder from its last checkpoint. The result is that of an uninterrupted run.
        progress: Whether to show a progress bar, and what was chosen.
        evaluated: Whether to evaluate the model, on the validation and the test split. Without, the run has no metrics
            and no familiarity yet: `resume` adds them.
        callbacks: Lightning callbacks of yours, for every network that is trained. Checkpoints have their state; give
            them again to `resume`.

    Returns:
        The run, in all processes of distributed training.

    Raises:
        DataError: If the data can't be used.
        RecipeError: If the recipe is not valid, or does not fit its data.
        RunError: If the folder holds a run, or for `resume` a run of another recipe.
        Interrupted: If training was stopped by Ctrl-C or SIGTERM; the checkpoint is kept.
    """
    found = as_recipe(recipe, target=target, changes=changes, trust=trust)
    if folder is None:
        if resume or found.training.devices != 1 or found.training.nodes != 1:
            raise RecipeError("give the run's folder: it can't be chosen for `resume` or for several processes")
        folder = default_folder(recipe, found)
    if progress and not resume:
        for line in as_lines(found.choices):
            print(line, file=sys.stderr)
    return train_recipe(found, folder, resume=resume, progress=progress, evaluated=evaluated, callbacks=callbacks)


def as_recipe(
    recipe: AnyRecipe,
    *,
    target: str | None = None,
    changes: Iterable[str] = (),
    trust: str | Path | None = None,
) -> Recipe:
    """A recipe in any form as a `Recipe`; for data, the recipe that is made for them."""
    if isinstance(recipe, (str, Path)) and is_data(recipe):
        return recipe_for(str(recipe), target=target, changes=changes, trust=trust)
    if target is not None:
        raise RecipeError(f"target={target!r}: a recipe names its own target, such as data.options.target={target}")
    if isinstance(recipe, (str, Path)):
        return Recipe.read(recipe, changes, trust=trust)
    if not isinstance(recipe, (Recipe, Mapping)):
        raise RecipeError(
            f"{type(recipe).__name__}: expected a Recipe, nested values, or the path of a recipe or of data"
        )
    if isinstance(recipe, Recipe) and not changes and trust is None:
        return recipe
    values = recipe.plain() if isinstance(recipe, Recipe) else recipe
    return Recipe.of(values, changes, trust=trust or (recipe.trust if isinstance(recipe, Recipe) else None))


def default_folder(source: AnyRecipe, recipe: Recipe) -> Path:
    """The first free folder for a run without one."""
    name = name_of(source) if isinstance(source, (str, Path)) else recipe.data.name
    return first_free(RUNS / f"{name}-{recipe.method.name}")  # type: ignore[union-attr]
