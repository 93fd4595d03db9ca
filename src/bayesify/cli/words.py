"""The words of a command: recipes, and `key=value` for what differs from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesify.errors import BayesifyError

if TYPE_CHECKING:
    from bayesify.lab.recipes import Recipe


class CommandError(BayesifyError):
    """Words that make no command together."""


@dataclass(frozen=True)
class Words:
    """Paths of recipes, and the keys that are to differ.

    >>> Words.of(["a.yaml", "seed=3", "training.epochs=5"])
    Words(recipes=[PosixPath('a.yaml')], changes=['seed=3', 'training.epochs=5'])
    """

    recipes: list[Path]
    changes: list[str]

    @classmethod
    def of(cls, words: Sequence[str] | None) -> Words:
        """A word with = in it is a change, unless a file is called so."""
        paths = [word for word in words or () if "=" not in word or Path(word).is_file()]
        return cls([Path(word) for word in paths], [word for word in words or () if word not in paths])

    def values(self) -> dict[str, Any]:
        """What the one recipe says; nothing if there is none, which leaves the defaults."""
        from bayesify.lab.recipes import Recipe, TrainingPart, read_yaml

        if len(self.recipes) > 1:
            named = " ".join(map(str, self.recipes))
            raise CommandError(f"expected one recipe and key=value words; got the recipes {named}")
        values = read_yaml(self.recipes[0]) if self.recipes else {}
        says_all = set(TrainingPart.model_fields) <= set(values.get("training") or {})
        return Recipe.of(values).said() if says_all else values  # a run's recipe says what was its method's own, too

    def recipe(self, **options: Any) -> Recipe:
        """The one recipe, changed; options have __ for the dots of keys and count unless they are None."""
        from bayesify.lab.recipes import Recipe

        return Recipe.of(self.values(), [*self.changes, *_changes(options)])

    def name(self, recipe: Recipe) -> str:
        """What a run of the recipe is called."""
        first = self.recipes[0].stem if self.recipes else recipe.data.name
        return f"{first}-{recipe.method.name}"  # type: ignore[union-attr]


def _changes(options: dict[str, Any]) -> list[str]:
    """Options as changes.

    >>> _changes({"model__weights": Path("a b.pt"), "seed": None})
    ['model.weights="a b.pt"']
    """
    given = {name.replace("__", "."): value for name, value in options.items() if value is not None}
    quoted = {key: json.dumps(str(value)) if isinstance(value, Path) else value for key, value in given.items()}
    return [f"{key}={value}" for key, value in quoted.items()]


def evaluation_changes(changes: Sequence[str] | None, **options: Any) -> dict[str, Any]:
    """Keys of the evaluation part that differ from the run's recipe, by options and by `evaluation.key=value` words.

    >>> evaluation_changes(["evaluation.attack.steps=5"], attack={"name": "fgsm"}, samples=None)
    {'attack': {'name': 'fgsm', 'steps': 5}}
    """
    from bayesify.lab.recipes import changed

    for change in changes or ():
        if not change.startswith("evaluation."):
            raise CommandError(
                f"{change}: a trained model stays as it is; expected evaluation.KEY=VALUE, such as evaluation.rows=500"
            )
    given = {key: value for key, value in options.items() if value is not None}
    values: dict[str, Any] = changed({"evaluation": given}, changes or ())["evaluation"]
    return values


def refuse_beside_resume(words: Sequence[str] | None, **options: Any) -> None:
    """A run that is resumed is the run it was."""
    given = [*(words or ()), *(f"--{name}" for name, value in options.items() if value is not None)]
    if given:
        raise CommandError(
            f"--resume continues a run exactly as it began, so nothing can be changed; leave out {' '.join(given)}, or "
            "train a new run"
        )


def sizes(text: str) -> tuple[int, ...]:
    """The shape of one input.

    >>> sizes("3,32,32")
    (3, 32, 32)
    """
    parts = text.replace("x", ",").strip(",").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise CommandError(f"--shape {text}: expected whole numbers with commas, such as 3,32,32 or 13")
    return tuple(map(int, parts))
