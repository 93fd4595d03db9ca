"""`compare`: train several recipes on the same data, for several seeds, and compare them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bayesify.lab.comparison.find_runs import BASE, PLAIN
from bayesify.lab.comparison.table import CompareError, Comparison, require_same_data
from bayesify.lab.evaluation import evaluate
from bayesify.lab.progress import progress_bar
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.methods import DeepEnsemblePart, PlainPart
from bayesify.lab.runs import Run
from bayesify.lab.training import train

SHARED = ("data", "model", "likelihood", "evaluation")
"""The parts that a recipe given as plain values inherits from the base."""
RecipeLike = Recipe | Mapping[str, Any]


def compare(
    recipes: Mapping[str, RecipeLike],
    folder: str | Path,
    *,
    seeds: int = 3,
    base: RecipeLike | None = None,
    progress: bool = True,
    trust: str | Path | None = None,
) -> Comparison:
    """Train every recipe for each seed, and compare the models.

    The runs are in `folder/NAME/seed-0`, `folder/NAME/seed-1`, …; finished ones are not trained again, and an
    interrupted one is resumed.

    Args:
        recipes: Recipes by the name that the model gets in the table. With a `base`, they may be plain values such as
            `{"method": "Rank1"}`, which inherit data, model, likelihood and evaluation from the base.
        folder: Where the runs are.
        seeds: How many times each recipe is trained. Seeds count up from that of the recipes, and each seed has its
            own splits.
        base: The recipe of a plain network that is trained first for each seed, in `folder/base`. Every recipe then
            starts from its weights, and training options that a recipe leaves out are the method's fine-tuning
            defaults. (In a `Recipe` object, options count as left out if they equal the defaults from scratch.) Deep
            ensembles are still trained from scratch, because their members must differ.
        progress: Whether to show a progress bar.
        trust: A Python file of yours that the recipes' `model.name` may name a function of. It runs.

    Returns:
        The comparison, on the test split if there is one: `comparison.table()` for the terminal, `comparison.to_csv`,
        `lab.write_report(comparison, "report.html")`.

    Raises:
        CompareError: If the recipes differ in data or seeds, or `folder` holds runs of other recipes.
    """
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise CompareError(f"seeds={seeds!r}: expected an integer >= 1")
    base_recipe = None if base is None else _trusting(_base_recipe(base), trust)
    resolved = {name: _trusting(_resolve(name, given, base_recipe), trust) for name, given in recipes.items()}
    _check({PLAIN: base_recipe, **resolved} if base_recipe else resolved)
    folder = Path(folder)
    names = [*([PLAIN] if base_recipe else []), *resolved]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with progress_bar(len(names) * seeds, progress) as bar:
        for seed in range(seeds):
            for name, recipe, place in _jobs(resolved, base_recipe, folder, seed):
                bar.update(bar.task_ids[0], description=f"{name}, seed {recipe.seed}")
                runs[name].append(_train_or_open(recipe, place))
                bar.advance(bar.task_ids[0])
    return Comparison.of(runs)


def _trusting(recipe: Recipe, trust: str | Path | None) -> Recipe:
    return Recipe.of(recipe.plain(), trust=trust or recipe.trust)


def _base_recipe(given: RecipeLike) -> Recipe:
    recipe = given if isinstance(given, Recipe) else Recipe.of({"method": "none", **given})
    if not isinstance(recipe.method, PlainPart):
        method = recipe.plain()["method"]["name"]
        raise CompareError(f"the base has the method {method!r}; expected 'none', a plain network")
    if recipe.likelihood.precision == "auto":
        raise CompareError("the base has likelihood.precision='auto'; expected 'learned', 'input' or a number, for all")
    return recipe


def _resolve(name: str, given: RecipeLike, base: Recipe | None) -> Recipe:
    """The recipe to train: from scratch, or from the weights of a base that is yet to be trained."""
    if base is None:
        return given if isinstance(given, Recipe) else Recipe.of(given)
    values = given.without_defaults() if isinstance(given, Recipe) else _with_base(given, base)
    recipe = Recipe.of(values)
    if recipe.model.is_trained and recipe.model.weights != base.model.weights:
        raise CompareError(f"{name} has its own weights; leave them out, or compare without a base")
    if recipe.model.model_copy(update={"weights": None}) != base.model.model_copy(update={"weights": None}):
        raise CompareError(f"{name} has a different network from the base, so it can't start from its weights")
    return recipe if isinstance(recipe.method, DeepEnsemblePart) else _starting_from(values, "the base's")


def _with_base(given: Mapping[str, Any], base: Recipe) -> dict[str, Any]:
    """Plain values, completed with those of the base."""
    parts = {part: {**base.plain()[part], **given.get(part, {})} for part in SHARED}
    return {"seed": base.seed, **given, **parts}


def _starting_from(values: Mapping[str, Any], weights: str) -> Recipe:
    return Recipe.of({**values, "model": {**values["model"], "weights": weights, "pretrained": False}})


def _check(recipes: Mapping[str, Recipe]) -> None:
    if not recipes:
        raise CompareError("no recipes to compare; give at least one")
    for name in recipes:
        if name != Path(name).name or name in ("", "..", BASE):
            raise CompareError(f"{name!r} can't be a recipe's name: expected the name of a folder other than {BASE!r}")
    require_same_data(recipes)
    seeds = {name: recipe.seed for name, recipe in recipes.items()}
    if len(set(seeds.values())) > 1:
        raise CompareError(
            f"the recipes have different seeds, and so different splits: {seeds}; give all the same seed"
        )


def _jobs(
    recipes: Mapping[str, Recipe], base: Recipe | None, folder: Path, offset: int
) -> Iterator[tuple[str, Recipe, Path]]:
    """The recipes to train for one seed, and their folders."""
    if base is not None:
        home = folder / BASE / f"seed-{base.seed + offset}"
        yield PLAIN, _with_seed_offset(base, offset), home
    for name, recipe in recipes.items():
        own = _with_seed_offset(recipe, offset)
        if base is not None and not isinstance(recipe.method, DeepEnsemblePart):
            model = own.model.model_copy(update={"weights": str(Run(home).model_file)})
            own = own.model_copy(update={"model": model})
        yield name, own, folder / name / f"seed-{own.seed}"


def _with_seed_offset(recipe: Recipe, offset: int) -> Recipe:
    return recipe.model_copy(update={"seed": recipe.seed + offset})


def _train_or_open(recipe: Recipe, folder: Path) -> Run:
    """The run in a folder: trained now, resumed if it was interrupted, or opened if it is finished."""
    if not Run(folder).recipe_file.exists():
        return train(recipe, folder, progress=False)
    run = Run.open(folder, trust=recipe.trust)
    if _without_weights(run.recipe) != _without_weights(recipe):
        raise CompareError(f"{folder}: holds a run of a different recipe; choose another folder, or remove it")
    if not (folder / "metrics.json").exists():
        run = train(run.recipe, folder, resume=True, progress=False)
    if not (folder / "metrics.json").exists():  # a finished run whose metrics were removed
        evaluate(run)
    return run


def _without_weights(recipe: Recipe) -> Recipe:
    """The recipe without the path of the weights, which changes when folders are moved."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": None})})
