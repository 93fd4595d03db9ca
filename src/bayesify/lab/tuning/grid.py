"""What `tune` tries for each method: changes of a recipe, in the order in which a small number of trials uses them."""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from bayesify.lab.baselines.posthoc import needs_training
from bayesify.lab.comparison.table import SAME_KEYS
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.defaults import default_noise
from bayesify.lab.recipes.methods import BayesianPart
from bayesify.lab.tuning.choice import TuneError

TRIALS = 6
"""How many candidates are tried by default, for every method the same number."""
NOISES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.6)
"""The sizes of noise to try, those near the recipe's own first, for every method that has the option."""
VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "Ensemble": {"method.jitter": (0.1, 0.2, 0.4, 0.02, 0.8)},
    "swag": {"method.scale": (0.3, 0.1, 3.0)},
    "laplace": {"method.posterior": ("last_diagonal", "all_diagonal"), "method.prior_precision": ("marginal",)},
}
"""The values of options to try, for methods without that option."""
FACTORS: dict[str, tuple[float, ...]] = {"training.lr": (0.3, 3.0, 0.1), "training.weight_decay": (0.1, 10.0)}
"""How many times the recipe's own value to try next, for every method that trains."""

Grid = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Candidate:
    """A recipe to try, and what it changes in words."""

    name: str
    recipe: Recipe


def candidates_of(
    recipe: Recipe, grid: Grid | None = None, trials: int | None = None, *, real: bool = False
) -> list[Candidate]:
    """The recipe as it is, followed by changed ones: first those that change one key, then two, …

    Args:
        recipe: The recipe.
        grid: Values to try by key, such as `{"method.noise": [0.1, 0.3]}`; by default those of the method.
        trials: How many candidates; by default all of a given grid, or 6.
        real: Whether the targets are real numbers, which have another default noise.

    Returns:
        The candidates.

    Raises:
        TuneError: If there are fewer than two, or fewer than `trials`, or if a key decides what is predicted.
        RecipeError: If a key or a value does not exist.

    >>> recipe = Recipe.of({"method": "Ensemble"})
    >>> [each.name for each in candidates_of(recipe, {"method.jitter": [0.05, 0.2], "training.lr": [0.03]})]
    ['jitter=0.05, lr=0.1 (as given)', 'jitter=0.2', 'lr=0.03', 'jitter=0.2, lr=0.03']
    """
    if grid is None or "method.noise" in grid:
        recipe = _with_noise(recipe, real)
    axes = grid_of(recipe) if grid is None else _checked(grid)
    steps: list[list[dict[str, Any]]] = [[{}, *({key: value} for value in values)] for key, values in axes.items()]
    changes = sorted((dict(ChainMap(*each)) for each in product(*reversed(steps))), key=len)
    found = [_candidate(recipe, each) for each in changes]
    unique = [one for i, one in enumerate(found) if one.recipe not in [other.recipe for other in found[:i]]]
    _require_enough(recipe, len(unique), trials)
    kept = unique[: trials or (TRIALS if grid is None else None)]
    own = {key: value_of(recipe, key) for key in axes if _differs(kept, key)}
    return [Candidate(f"{_name(own)} (as given)", recipe), *kept[1:]]


def grid_of(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    """What to try for a recipe, by key."""
    values = VALUES.get(name_of(recipe), {})
    if _derives_from_noise(recipe):
        given: float = value_of(recipe, "method.noise")
        values = {"method.noise": tuple(sorted(NOISES, key=lambda noise: abs(math.log(noise / given))))}
    own = {key: value_of(recipe, key) for key in FACTORS} if needs_training(recipe) else {}
    return values | {key: tuple(_rounded(value * f) for f in FACTORS[key]) for key, value in own.items()}


def name_of(recipe: Recipe) -> str:
    """The name of a recipe's method."""
    return str(recipe.method.name)  # type: ignore[union-attr]


def _derives_from_noise(recipe: Recipe) -> bool:
    """Whether an option of the method is left out that is derived from its `noise`.

    >>> [_derives_from_noise(Recipe.of({"method": {"name": "MCDropout", "p": p}})) for p in (None, 0.1)]
    [True, False]
    """
    part = recipe.method
    return isinstance(part, BayesianPart) and None in [getattr(part, name) for name in part.to_method().options_for(1)]


def _with_noise(recipe: Recipe, real: bool) -> Recipe:
    """The recipe with the noise that training would use, if it is left out."""
    if not _derives_from_noise(recipe) or value_of(recipe, "method.noise") is not None:
        return recipe
    return _candidate(recipe, {"method.noise": default_noise(recipe.model.is_trained, real)}).recipe


def value_of(recipe: Recipe, key: str) -> Any:
    """The value of a key with dots; None if there is none."""
    value: Any = recipe.plain()
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _candidate(recipe: Recipe, changes: Mapping[str, Any]) -> Candidate:
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    changed = Recipe.of(recipe.plain(), overrides, trust=recipe.trust)
    return Candidate(_name({key: value_of(changed, key) for key in changes}), changed)


def _name(values: Mapping[str, Any]) -> str:
    """Values by key in words.

    >>> _name({"method.noise": 0.25, "training.lr": 0.003})
    'noise=0.25, lr=0.003'
    """
    short = {key.removeprefix("method.").removeprefix("training."): value for key, value in values.items()}
    return ", ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in short.items()
    )


def _differs(candidates: Sequence[Candidate], key: str) -> bool:
    return len({json.dumps(value_of(each.recipe, key)) for each in candidates}) > 1


def _checked(grid: Grid) -> Grid:
    """Raise unless the grid has lists of values, and no key that decides which rows are predicted, or how often."""
    for key, values in grid.items():
        if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence) or not values:
            raise TuneError(f"grid: {key}={values!r}: expected a list of values to try, such as {key}=[0.1, 0.3]")
        part, _, option = key.partition(".")
        if part in ("seed", "evaluation") or (part == "data" and (not option or option.split(".")[0] in SAME_KEYS)):
            raise TuneError(
                f"grid: {key} decides what is predicted, so candidates could not be compared; tune keys of method, "
                "training, model or likelihood"
            )
    return grid


def _require_enough(recipe: Recipe, found: int, trials: int | None) -> None:
    name = name_of(recipe)
    advice = "give the values to try, such as grid={'training.lr': [0.01, 0.1]} (--grid 'training.lr=[0.01, 0.1]')"
    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 2):
        raise TuneError(f"trials={trials!r}: expected at least 2, the recipe as it is and another")
    if found < 2:
        raise TuneError(f"there is nothing to tune for {name}, with this grid and this recipe; {advice}")
    if trials is not None and found < trials:
        raise TuneError(f"trials={trials}: there are only {found} candidates for {name}; lower it, or {advice}")


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
