"""`Recipe`: everything about a run, read from YAML or from plain values, validated, and written back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from bayesify.lab.default_choices import Default
from bayesify.lab.recipes.defaults import BATCH_SIZE, default_options, default_training
from bayesify.lab.recipes.error_messages import RecipeError, describe_errors
from bayesify.lab.recipes.methods import BAYESIAN_PARTS, AnyMethodPart, MixedPart
from bayesify.lab.recipes.parts import DataPart, EvaluationPart, LikelihoodPart, ModelPart, Part, TrainingPart
from bayesify.lab.run_files import write_file

MOST_BYTES = 1_000_000
MOST_ALIASES = 1000
MOST_VALUES = 100_000
"""A recipe with more text or, once its aliases are written out, with more values is refused."""


class Recipe(Part):
    """Everything about a run: data, network, method, likelihood, training, evaluation and seed.

    What is left out of `training`, and of the method's options, is filled in from the method's defaults: one set for
    training from scratch, one for fine-tuning trained weights.

    Attributes:
        data: Which data, and how they are split, augmented and batched.
        model: Which network, and the weights that it starts from.
        method: Which method makes the network Bayesian, and its options.
        likelihood: What the network's outputs mean.
        training: Epochs, optimizer, objective, precision and devices.
        evaluation: The number of draws, and what is measured.
        seed: The seed of splits, initial values and noise.
        defaults: Which values fill in what is left out: those chosen by benchmarks, or those of the methods' papers.

    >>> recipe = Recipe.of({"method": {"name": "Rank1", "components": 8}}, ["training.epochs=5"])
    >>> recipe.method.to_method()
    Rank1(components=8, factors='both', ...
    >>> recipe.training.epochs
    5
    >>> Recipe.of({"method": {"name": "Rank1", "componets": 8}})
    Traceback (most recent call last):
    bayesify.lab.recipes.error_messages.RecipeError: method.componets: no such key for Rank1; did you mean 'components'?
    """

    data: DataPart = DataPart()
    model: ModelPart = ModelPart()
    method: AnyMethodPart = BAYESIAN_PARTS["Rank1"]()
    likelihood: LikelihoodPart = LikelihoodPart()
    training: TrainingPart = TrainingPart()
    evaluation: EvaluationPart = EvaluationPart()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    defaults: Literal["tuned", "papers"] = "tuned"
    _trust: Path | None = PrivateAttr(default=None)
    _choices: tuple[Default, ...] = PrivateAttr(default=())

    @property
    def trust(self) -> Path | None:
        """The Python file whose networks may be used. It is never read from a file or written to one."""
        return self._trust

    @property
    def choices(self) -> tuple[Default, ...]:
        """What `lab.recipe_for` has chosen, and how to choose otherwise; never read from a file or written to one."""
        return self._choices

    def with_choices(self, choices: Iterable[Default]) -> Recipe:
        """The same recipe, with what was chosen in it."""
        self._choices = tuple(choices)
        return self

    def __eq__(self, other: object) -> bool:
        """Whether two recipes describe the same run, whatever the user trusts."""
        return isinstance(other, Recipe) and self.plain() == other.plain()

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, given: Any) -> Any:
        """Fill in the method's defaults, for training from scratch or for fine-tuning."""
        if not isinstance(given, Mapping) or not isinstance(given.get("training", {}), Mapping):
            return given
        model, method = given.get("model"), given.get("method", {})
        trained = isinstance(model, Mapping) and bool(model.get("weights") or model.get("pretrained"))
        if not isinstance(method, Mapping):
            return given
        name, papers, data = str(method.get("name", "Rank1")), given.get("defaults") == "papers", given.get("data")
        size = data.get("batch_size") if isinstance(data, Mapping) else None
        size = size if isinstance(size, int) and size > 0 else BATCH_SIZE  # otherwise it is refused where it is
        usual = default_training(name, trained, papers=papers, batch_size=size)
        return {
            **given,
            "training": {**usual, **given.get("training", {})},
            "method": {"name": name, **default_options(name, trained, papers=papers, given=method), **method},
        }

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any] | None = None,
        overrides: Iterable[str] = (),
        *,
        trust: str | Path | None = None,
    ) -> Recipe:
        """Make a recipe from plain values.

        Args:
            given: Nested values as a YAML recipe has them, such as `{"method": "IBNN", "training": {"epochs": 5}}`.
            overrides: Changes such as `"method.components=8"`, as on the command line.
            trust: A Python file of yours that `model.name` may name a function of, such as `networks.py`. It runs.

        Returns:
            The validated recipe, with all defaults filled in.

        Raises:
            RecipeError: If a key is unknown or a value is not allowed; the message names the key.
        """
        values = apply_overrides(given or {}, overrides)
        if isinstance(values.get("method"), str):
            values["method"] = {"name": values["method"]}
        if isinstance(method := values.get("method"), dict):
            method.setdefault("name", "Rank1")
        try:
            recipe = cls.model_validate(values)
            recipe.method.for_convert()  # runs the checks of the method itself
        except ValidationError as error:
            raise RecipeError("\n".join(describe_errors(error, cls))) from None
        recipe._trust = None if trust is None else Path(trust)
        return recipe

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = (), *, trust: str | Path | None = None) -> Recipe:
        """Read a recipe from a YAML file.

        Args:
            path: The file.
            overrides: Changes such as `"training.epochs=5"`.
            trust: A Python file of yours that `model.name` may name a function of. It runs.

        Returns:
            The validated recipe, with all defaults filled in.

        Raises:
            RecipeError: If the file is missing or is not a valid recipe.
        """
        try:
            return cls.of(read_yaml(Path(path)), overrides, trust=trust)
        except RecipeError as error:
            raise error if str(error).startswith(str(path)) else RecipeError(f"{path}: {error}") from None

    def plain(self) -> dict[str, Any]:
        """The recipe as plain values, defaults included."""
        return self.model_dump(mode="json")

    def without_defaults(self) -> dict[str, Any]:
        """The recipe as plain values without the method's defaults, so that another method can bring its own."""
        values, name, trained = self.plain(), self.method.name, self.model.is_trained  # type: ignore[union-attr]
        papers = self.defaults == "papers"
        training = default_training(name, trained, papers=papers, batch_size=self.data.batch_size)
        defaults = {"training": TrainingPart(**training).model_dump(mode="json")}
        if not isinstance(self.method, MixedPart):  # its `layers` have no default
            own = default_options(name, trained, papers=papers, given=values["method"])
            defaults["method"] = {**type(self.method)().model_dump(mode="json"), **own}
        for part, usual in defaults.items():
            values[part] = {key: value for key, value in values[part].items() if key == "name" or value != usual[key]}
        return values

    def write(self, path: Path) -> None:
        """Write the recipe as YAML, defaults included."""
        write_file(path, yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True))


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, without merge keys and with few aliases: both can make a short text large."""

    aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MOST_ALIASES:
                raise yaml.YAMLError(f"more than {MOST_ALIASES:,} aliases (*name)")
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: merge keys (<<) are not allowed; write them out")
        super().flatten_mapping(node)


def _load_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file."""
    if not path.is_file():
        raise RecipeError(f"{path}: no such file; give the path of a YAML recipe")
    if path.stat().st_size > MOST_BYTES:
        raise RecipeError(f"{path}: {path.stat().st_size:,} bytes; a recipe has at most {MOST_BYTES:,}")
    try:
        values = _load_yaml(path.read_text())
        count = _count(values, MOST_VALUES)
    except RecursionError:
        raise RecipeError(f"{path}: values are nested too deeply, or contain themselves") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, an impossible date, a number of many digits
        raise RecipeError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if count > MOST_VALUES:
        raise RecipeError(f"{path}: more than {MOST_VALUES:,} values, once its aliases are written out")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: expected keys such as data, model, method, training; got {type(values).__name__}")
    return values


def _count(value: Any, most: int) -> int:
    """The number of values in nested ones, counted up to a bit above `most`.

    >>> _count({"a": [1, 2], "b": 3}, 100)
    5
    """
    count = 1
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, set)) else ():
        if count > most:
            break
        count += _count(each, most - count)
    return count


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of plain values with `key.key=value` overrides applied.

    >>> apply_overrides({"training": {"epochs": 3}}, ["training.lr=1e-3"])
    {'training': {'epochs': 3, 'lr': 0.001}}
    """
    copied: dict[str, Any] = _copy_mappings(values)
    for override in overrides:
        _apply(copied, override)
    return copied


def _copy_mappings(value: Any) -> Any:
    """A copy whose mappings can be changed without changing the original."""
    return {str(key): _copy_mappings(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one `key.key=value`; the value is YAML."""
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
        value = _load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RecipeError(f"{override!r}: the value is not YAML; quote it if it has special characters") from None
    values[last] = _number(value)


def _number(value: Any) -> Any:
    """The number that a string such as 1e-4 stands for, which YAML reads as a string."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
