"""Error messages for invalid recipes: which key is wrong, what was expected, and the closest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from bayesify.errors import BayesifyError
from bayesify.lab.recipes.methods import METHOD_PARTS
from bayesify.lab.recipes.parts import DataPart, PointsPart, RegulariserPart, StepsPart

SCHEDULE_PARTS: dict[str, Any] = {"StepsPart": StepsPart, "PointsPart": PointsPart, "ScheduleName": None}


class RecipeError(BayesifyError):
    """A recipe that is not valid, or does not fit its data."""


def describe_errors(error: ValidationError, recipe: type[BaseModel]) -> list[str]:
    """One line for each invalid key."""
    problems = error.errors(include_url=False)  # if a key may be a number or a part, one for each
    keys = {_key(each) for each in problems if each["type"] != "model_type"}
    told = [each for each in problems if each["type"] != "model_type" or _key(each) not in keys]
    return sorted({_describe(each, recipe) for each in told})


def _key(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"] if not _is_union_branch(part))


def _describe(problem: Any, recipe: type[BaseModel]) -> str:
    key = _key(problem)
    if problem["type"] == "extra_forbidden":
        owner, known = _known_keys(problem["loc"], recipe)
        return f"{key}: no such key{owner}{_suggest(str(problem['loc'][-1]), known)}"
    if problem["type"] == "union_tag_invalid":
        return f"{key}.name: no method is called {problem['ctx']['tag']}{_suggest(problem['ctx']['tag'], METHOD_PARTS)}"
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{key}: {message}" + ("" if key == "training" else f"; got {problem['input']!r}")  # all of its options


def _is_union_branch(part: Any) -> bool:
    """Whether a step of pydantic's error location is the branch of a union rather than a key."""
    named = part in METHOD_PARTS or part in SCHEDULE_PARTS or part in ("float", "int", "str")
    return named or str(part).startswith(("constrained-", "Adaptive"))


def _known_keys(location: tuple[Any, ...], recipe: type[BaseModel]) -> tuple[str, list[str]]:
    """Which method the key belongs to, as words for the message, and the valid keys."""
    part: Any = recipe
    owner = ""
    for step in location[:-1]:
        if step in METHOD_PARTS:
            part, owner = METHOD_PARTS[step], f" for {step}"
        elif step in SCHEDULE_PARTS:
            part = SCHEDULE_PARTS[step]
        elif isinstance(part, type) and issubclass(part, BaseModel) and step in part.model_fields:
            named: dict[str, Any] = {"regulariser": RegulariserPart, "data": DataPart}
            part = named.get(step) or part.model_fields[step].annotation
    return owner, list(part.model_fields) if isinstance(part, type) and issubclass(part, BaseModel) else []


def _suggest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower().strip("'"), lower, 1)
    if near:
        return f"; did you mean {lower[near[0]]!r}?"
    return f"; there are {', '.join(known)}" if known else ""
