"""`DataError`, and helpers for its messages."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bayesify.errors import BayesifyError


class DataError(BayesifyError):
    """Data that is missing, broken or not what a loader expects."""


class Problems:
    """Collects the errors of several checks, so that one message has all of them.

    >>> problems = Problems()
    >>> for name in ("age", "city"):
    ...     with problems.noted():
    ...         raise DataError(f"column {name!r} is empty")
    >>> problems.raise_any()
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: 2 problems:
    - column 'age' is empty
    - column 'city' is empty
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note a DataError inside, and go on behind."""
        try:
            yield
        except DataError as error:
            self.found.append(str(error))

    def raise_any(self) -> None:
        """Raise what was noted, if anything was, each problem once."""
        found = list(dict.fromkeys(self.found))
        if len(found) == 1:
            raise DataError(found[0])
        if found:
            raise DataError("\n- ".join([f"{len(found)} problems:", *found]))


def list_some(items: Iterable[object], most: int = 8) -> str:
    """The first items as text, and how many more there are.

    >>> list_some("abcd", most=3)
    'a, b, c and 1 more'
    """
    every = [str(item) for item in items]
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + rest


def suggest(name: object, known: Collection[str]) -> str:
    """A suggestion of the known names closest to a wrong one, or all that are known.

    >>> suggest("quallity", ["quality", "price"])
    "did you mean 'quality'?"
    """
    close = difflib.get_close_matches(str(name), list(known), n=3)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"expected one of: {list_some(sorted(known), most=20) or 'none'}"


def require_choice(option: str, value: object, known: Collection[str | None]) -> None:
    """Raise if the value of an option is not one of those allowed."""
    if value not in known:
        raise DataError(f"{option}={value!r}: expected one of {', '.join(map(repr, known))}")


def import_optional(module: str, purpose: str, extra: str = "lab") -> Any:
    """Import an optional package, or raise an error with the command to install it.

    >>> import_optional("math", "adding up").pi > 3
    True
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise DataError(f"{purpose} needs the package {package}: pip install 'bayesify[{extra}]'") from error
