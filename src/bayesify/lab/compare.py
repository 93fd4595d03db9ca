"""Train several recipes on the same data, over several seeds, and set them side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bayesify.lab.comparison import CompareError, Comparison, require_same_data
from bayesify.lab.evaluation import evaluate
from bayesify.lab.gathering import BASE, PLAIN
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.methods import DeepPart, PlainPart
from bayesify.lab.runs import Run
from bayesify.lab.training import train

SHARED = ("data", "model", "likelihood", "evaluation")
"""The parts that a recipe of plain values takes from the base where it doesn't say them."""
Given = Recipe | Mapping[str, Any]


def compare(
    recipes: Mapping[str, Given],
    folder: str | Path,
    *,
    seeds: int = 3,
    base: Given | None = None,
    progress: bool = True,
) -> Comparison:
    """Train every recipe for each seed, and compare them; runs that are finished already are not trained again.

    The runs are in `folder/NAME/seed-0`, … and their seeds count from that of the recipes, which is also the splits'.

    With `base`, a plain network is trained first for each seed, in `folder/base`, and every recipe starts from its
    weights, so that what a recipe doesn't say of training is the method's fine-tuning. Recipes may then be plain values
    such as `{"method": "Rank1"}`: what they don't say of data, model, likelihood and evaluation is the base's. Of a
    `Recipe`, which says everything, that counts as said which differs from the method's training from scratch. Deep
    ensembles are trained from scratch all the same, for their members must begin apart.
    """
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise CompareError(f"seeds={seeds!r}: expected a whole number >= 1")
    trunk = None if base is None else _base(base)
    made = {name: _recipe(name, given, trunk) for name, given in recipes.items()}
    _check({PLAIN: trunk, **made} if trunk else made)
    folder = Path(folder)
    names = [*([PLAIN] if trunk else []), *made]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with _bar(len(names) * seeds, progress) as bar:
        for seed in range(seeds):
            for name, recipe, place in _jobs(made, trunk, folder, seed):
                bar.update(bar.task_ids[0], description=f"{name}, seed {recipe.seed}")
                runs[name].append(_trained(recipe, place))
                bar.advance(bar.task_ids[0])
    return Comparison.of(runs)


def _base(given: Given) -> Recipe:
    recipe = given if isinstance(given, Recipe) else Recipe.of({"method": "none", **given})
    if not isinstance(recipe.method, PlainPart):
        raise CompareError(f"the base's method is {type(recipe.method).__name__}: expected 'none', a plain network")
    return recipe


def _recipe(name: str, given: Given, base: Recipe | None) -> Recipe:
    """A recipe that starts from scratch, or with a base from weights that are still to be trained."""
    if base is None:
        return given if isinstance(given, Recipe) else Recipe.of(given)
    values = given.said() if isinstance(given, Recipe) else _with_base(given, base)
    recipe = Recipe.of(values)
    if recipe.model.is_trained and recipe.model.weights != base.model.weights:
        raise CompareError(f"{name} has weights of its own; leave them out, or compare without a base")
    if recipe.model.model_copy(update={"weights": None}) != base.model.model_copy(update={"weights": None}):
        raise CompareError(f"{name} has another network than the base, so it can't start from its weights")
    return recipe if isinstance(recipe.method, DeepPart) else _starting_from(values, "the base's")


def _with_base(given: Mapping[str, Any], base: Recipe) -> dict[str, Any]:
    """Plain values, with the base's where they say nothing."""
    parts = {part: {**base.plain()[part], **given.get(part, {})} for part in SHARED}
    return {"seed": base.seed, **given, **parts}


def _starting_from(values: Mapping[str, Any], weights: str) -> Recipe:
    return Recipe.of({**values, "model": {**values["model"], "weights": weights, "pretrained": False}})


def _check(recipes: Mapping[str, Recipe]) -> None:
    if not recipes:
        raise CompareError("no recipe to compare; give at least one")
    for name in recipes:
        if name != Path(name).name or name in ("", "..", BASE):
            raise CompareError(f"{name!r} can't be a recipe's name: it is a folder's too, and {BASE!r} is taken")
    require_same_data(recipes)
    seeds = {name: recipe.seed for name, recipe in recipes.items()}
    if len(set(seeds.values())) > 1:
        raise CompareError(f"the recipes have different seeds, and so different splits: {seeds}; give all the same")


def _jobs(
    recipes: Mapping[str, Recipe], base: Recipe | None, folder: Path, offset: int
) -> Iterator[tuple[str, Recipe, Path]]:
    """What is to be trained for one seed, and where."""
    if base is not None:
        home = folder / BASE / f"seed-{base.seed + offset}"
        yield PLAIN, _seeded(base, offset), home
    for name, recipe in recipes.items():
        own = _seeded(recipe, offset)
        if base is not None and not isinstance(recipe.method, DeepPart):
            model = own.model.model_copy(update={"weights": str(Run(home).model_file)})
            own = own.model_copy(update={"model": model})
        yield name, own, folder / name / f"seed-{own.seed}"


def _seeded(recipe: Recipe, offset: int) -> Recipe:
    return recipe.model_copy(update={"seed": recipe.seed + offset})


def _trained(recipe: Recipe, folder: Path) -> Run:
    """The run, trained now unless it is there; one that was interrupted goes on."""
    if not Run(folder).recipe_file.exists():
        return train(recipe, folder, progress=False)
    run = Run.open(folder)
    if _anonymous(run.recipe) != _anonymous(recipe):
        raise CompareError(f"{folder}: holds a run of another recipe; give another folder, or remove it")
    if not (folder / "metrics.json").exists():
        run = train(run.recipe, folder, resume=True, progress=False)
    if not (folder / "metrics.json").exists():  # a finished run whose metrics were removed
        evaluate(run)
    return run


def _anonymous(recipe: Recipe) -> Recipe:
    """Without the path of the weights, which changes when folders move."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": None})})


def _bar(total: int, shown: bool) -> Progress:
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*parts, console=Console(stderr=True), transient=True, disable=not shown)
    bar.add_task("", total=total)
    return bar
