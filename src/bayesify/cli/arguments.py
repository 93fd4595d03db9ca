"""The arguments of a command: recipes, and `key=value` changes to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayesify.errors import BayesifyError
from bayesify.lab.run_names import is_data, name_of

if TYPE_CHECKING:
    from bayesify.lab.recipes import Recipe

# The arguments and options that several commands have.

Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|KEY=VALUE",
        show_default=False,
        help="A YAML recipe (default: a small network on scikit-learn's digits), and keys to change in it, such as "
        "method=IBNN or training.epochs=5.",
    ),
]
DataOrChanges = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DATA|RECIPE|KEY=VALUE",
        show_default=False,
        help="Data: a table, a folder of images by class, an .npz file, a Hugging Face name (owner/name). Or a YAML "
        "recipe (default: a small network on scikit-learn's digits). And keys to change, such as method=IBNN or "
        "training.epochs=5.",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, made by `bayesify train`.")]
Samples = Annotated[
    int | None, typer.Option(min=1, metavar="S", help="Number of draws from the posterior. Default: the recipe's.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Don't show progress; print only the folder.")]
Weights = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Start from a trained network's weights (model.weights).")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of splits, initial values and noise (seed).")]
Trust = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="A Python file of yours that model.name names a function of, such as networks.py. It will be executed: "
        "read it first if it is not yours. Nothing else in a recipe or a run is ever executed.",
    ),
]


class CommandError(BayesifyError):
    """Arguments that don't make a valid command."""


@dataclass(frozen=True)
class Arguments:
    """Paths of recipes or data, and `key=value` changes.

    >>> Arguments.of(["a.yaml", "seed=3", "training.epochs=5"])
    Arguments(recipes=[PosixPath('a.yaml')], changes=['seed=3', 'training.epochs=5'])
    """

    recipes: list[Path]
    changes: list[str]

    @classmethod
    def of(cls, words: Sequence[str] | None) -> Arguments:
        """Sort the arguments: one that contains = is a change, unless it is the name of a file."""
        paths = [word for word in words or () if "=" not in word or Path(word).is_file()]
        return cls([Path(word) for word in paths], [word for word in words or () if word not in paths])

    def values(self) -> dict[str, Any]:
        """The values of the recipe; empty if there is none, which means all defaults."""
        from bayesify.lab.recipes import Recipe, TrainingPart, read_yaml

        if len(self.recipes) > 1:
            named = " ".join(map(str, self.recipes))
            raise CommandError(f"expected one recipe and key=value changes; got the recipes {named}")
        first = self.recipes[0] if self.recipes else None
        if first is not None and first.exists() and is_data(first):
            raise CommandError(
                f"{first}: expected a recipe; `bayesify train {first}` writes one, recipe.yaml in the run's folder"
            )
        values = read_yaml(first) if first is not None else {}
        # A run's recipe also has the defaults of its method, which must not stay when the method is changed.
        training = values.get("training")
        is_resolved = isinstance(training, dict) and set(TrainingPart.model_fields) <= set(training)
        return Recipe.of(values).without_defaults() if is_resolved else values

    def recipe(self, trust: Path | None = None, target: str | None = None, **options: Any) -> Recipe:
        """The recipe with all changes, or that for data; options are changes too, with __ for dots, ignored if None."""
        from bayesify.lab.recipes import Recipe

        changes = [*self.changes, *_changes(options)]
        if len(self.recipes) == 1 and is_data(self.recipes[0]):
            from bayesify.lab.recipe_for_data import recipe_for

            return recipe_for(self.recipes[0], target=target, changes=changes, trust=trust)
        if target is not None:
            raise CommandError(
                f"--target {target} is for data, such as customers.csv; a recipe has data.options.target={target}"
            )
        return Recipe.of(self.values(), changes, trust=trust)

    def run_name(self, recipe: Recipe) -> str:
        """The name for a run of the recipe."""
        first = name_of(self.recipes[0]) if self.recipes else recipe.data.name
        return f"{first}-{recipe.method.name}"  # type: ignore[union-attr]


def _changes(options: dict[str, Any]) -> list[str]:
    """Options as `key=value` changes.

    >>> _changes({"model__weights": Path("a b.pt"), "seed": None})
    ['model.weights="a b.pt"']
    """
    given = {name.replace("__", "."): value for name, value in options.items() if value is not None}
    quoted = {key: json.dumps(str(value)) if isinstance(value, Path) else value for key, value in given.items()}
    return [f"{key}={value}" for key, value in quoted.items()]


def evaluation_changes(changes: Sequence[str] | None, **options: Any) -> dict[str, Any]:
    """The evaluation options of a command, from its own options and from `evaluation.key=value` arguments.

    >>> evaluation_changes(["evaluation.attack.steps=5"], attack={"name": "fgsm"}, samples=None)
    {'attack': {'name': 'fgsm', 'steps': 5}}
    """

    for change in changes or ():
        if not change.startswith("evaluation."):
            raise CommandError(
                f"{change}: can't be changed after training; expected evaluation.KEY=VALUE, such as evaluation.rows=500"
            )
    from bayesify.lab.recipes import apply_overrides

    given = {key: value for key, value in options.items() if value is not None}
    values: dict[str, Any] = apply_overrides({"evaluation": given}, changes or ())["evaluation"]
    return values


def refuse_changes_with_resume(words: Sequence[str] | None, **options: Any) -> None:
    """Raise if --resume is combined with anything that would change the run."""
    given = [*(words or ()), *(f"--{name}" for name, value in options.items() if value is not None)]
    if given:
        raise CommandError(f"--resume continues a run unchanged; leave out {' '.join(given)}, or train a new run")


def sizes(text: str) -> tuple[int, ...]:
    """Parse the shape of one input.

    >>> sizes("3,32,32")
    (3, 32, 32)
    """
    parts = text.replace("x", ",").strip(",").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise CommandError(f"--shape {text}: expected integers separated by commas, such as 3,32,32 or 13")
    return tuple(map(int, parts))
