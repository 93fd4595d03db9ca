"""One recipe says all of a run: data, network, method, training, evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from bayesify.lab.recipes.defaults import options_of, training_of
from bayesify.lab.recipes.methods import FAMILY_PARTS, MixedPart, SomeMethod
from bayesify.lab.recipes.parts import DataPart, EvaluationPart, LikelihoodPart, ModelPart, Part, TrainingPart
from bayesify.lab.recipes.wording import RecipeError, lines


class Recipe(Part):
    """A whole run.

    >>> recipe = Recipe.of({"method": {"name": "Rank1", "components": 8}}, ["training.epochs=5"])
    >>> recipe.method.one()
    Rank1(components=8, factors='both', ...
    >>> recipe.training.epochs
    5
    >>> Recipe.of({"method": {"name": "Rank1", "componets": 8}})
    Traceback (most recent call last):
    bayesify.lab.recipes.wording.RecipeError: method.componets: no such key for Rank1; did you mean 'components'?
    """

    data: DataPart = DataPart()
    model: ModelPart = ModelPart()
    method: SomeMethod = FAMILY_PARTS["Rank1"]()
    likelihood: LikelihoodPart = LikelihoodPart()
    training: TrainingPart = TrainingPart()
    evaluation: EvaluationPart = EvaluationPart()
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _with_the_methods_own(cls, given: Any) -> Any:
        """What the recipe does not say of training, and of the method, is the method's own for what it starts from."""
        if not isinstance(given, Mapping) or not isinstance(given.get("training", {}), Mapping):
            return given
        model, method = given.get("model"), given.get("method", {})
        trained = isinstance(model, Mapping) and bool(model.get("weights") or model.get("pretrained"))
        if not isinstance(method, Mapping):
            return given
        name = str(method.get("name", "Rank1"))
        return {
            **given,
            "training": {**training_of(name, trained), **given.get("training", {})},
            "method": {"name": name, **options_of(name, trained), **method},
        }

    @classmethod
    def of(cls, given: Mapping[str, Any] | None = None, overrides: Iterable[str] = ()) -> Recipe:
        """A recipe from plain values and `key.key=value` overrides."""
        values = changed(given or {}, overrides)
        if isinstance(values.get("method"), str):
            values["method"] = {"name": values["method"]}
        if isinstance(method := values.get("method"), dict):
            method.setdefault("name", "Rank1")
        try:
            recipe = cls.model_validate(values)
            recipe.method.families()  # a family's own checks
        except ValidationError as error:
            raise RecipeError("\n".join(lines(error, cls))) from None
        return recipe

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """A recipe from a YAML file."""
        return cls.of(read_yaml(Path(path)), overrides)

    def plain(self) -> dict[str, Any]:
        """The recipe as plain values, with everything said."""
        return self.model_dump(mode="json")

    def said(self) -> dict[str, Any]:
        """The recipe as plain values, without what is the method's own, so that another method brings its own."""
        values, name, trained = self.plain(), self.method.name, self.model.is_trained  # type: ignore[union-attr]
        own = {"training": TrainingPart(**training_of(name, trained)).model_dump(mode="json")}
        if not isinstance(self.method, MixedPart):  # whose layers have no default
            own["method"] = {**type(self.method)().model_dump(mode="json"), **options_of(name, trained)}
        for part, usual in own.items():
            values[part] = {key: value for key, value in values[part].items() if key == "name" or value != usual[key]}
        return values

    def write(self, path: Path) -> None:
        """As YAML, with everything said."""
        part = path.with_suffix(".part")
        part.write_text(yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True))
        os.replace(part, path)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    if not path.is_file():
        raise RecipeError(f"{path}: no such file; give the path of a YAML recipe")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: expected keys such as data, model, method, training; got {type(values).__name__}")
    return values


def changed(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of plain values with what `key.key=value` overrides say.

    >>> changed({"training": {"epochs": 3}}, ["training.lr=1e-3"])
    {'training': {'epochs': 3, 'lr': 0.001}}
    """
    copied: dict[str, Any] = _tree(values)
    for override in overrides:
        _override(copied, override)
    return copied


def _tree(value: Any) -> Any:
    """A copy whose mappings may be changed."""
    return {str(key): _tree(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _override(values: dict[str, Any], override: str) -> None:
    """Set what `key.key=value` says; the value is YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"{override!r}: expected key=value, such as method.components=8")
    *path, last = key.split(".")
    for step in path:
        inner = values.setdefault(step, {})
        if isinstance(inner, str) and step == "method":
            inner = values[step] = {"name": inner}
        if not isinstance(inner, dict):
            raise RecipeError(f"{override!r}: {step} is {inner!r}, which has no keys")
        values = inner
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"{override!r}: the value is not YAML; quote it if it has special characters") from None
    values[last] = _number(value)


def _number(value: Any) -> Any:
    """YAML reads 1e-4 as a word; a person means a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
