"""What is wrong with a recipe, in words that name the key, what was expected and the nearest right one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from bayesify.errors import BayesifyError
from bayesify.lab.recipes.methods import METHODS
from bayesify.lab.recipes.parts import DataPart, RegulariserPart


class RecipeError(BayesifyError):
    """A recipe that can't be run as it is written."""


def lines(error: ValidationError, recipe: type[BaseModel]) -> list[str]:
    """What is wrong with each key, in words."""
    return sorted({_line(each, recipe) for each in error.errors(include_url=False)})


def _line(problem: Any, recipe: type[BaseModel]) -> str:
    where = [part for part in problem["loc"] if not _is_tag(part)]
    key = ".".join(map(str, where))
    if problem["type"] == "extra_forbidden":
        owner, known = _known_keys(problem["loc"], recipe)
        return f"{key}: no such key{owner}{_nearest(str(where[-1]), known)}"
    if problem["type"] == "union_tag_invalid":
        return f"{key}.name: no method is called {problem['ctx']['tag']}{_nearest(problem['ctx']['tag'], METHODS)}"
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{key}: {message}; got {problem['input']!r}"


def _is_tag(part: Any) -> bool:
    """Whether a step of a location is the branch of a union rather than a key."""
    return part in METHODS or part in ("float", "int", "str")


def _known_keys(location: tuple[Any, ...], recipe: type[BaseModel]) -> tuple[str, list[str]]:
    """Whose key it is, for the message, and the keys that there are."""
    part: Any = recipe
    owner = ""
    for step in location[:-1]:
        if step in METHODS:
            part, owner = METHODS[step], f" for {step}"
        elif isinstance(part, type) and issubclass(part, BaseModel) and step in part.model_fields:
            named: dict[str, Any] = {"regulariser": RegulariserPart, "data": DataPart}
            part = named.get(step) or part.model_fields[step].annotation
    return owner, list(part.model_fields) if isinstance(part, type) and issubclass(part, BaseModel) else []


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower().strip("'"), lower, 1)
    if near:
        return f"; did you mean {lower[near[0]]!r}?"
    return f"; there are {', '.join(known)}" if known else ""
