"""The error for data that can't be used, and the words that its messages share."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable
from typing import Any

from bayesify.errors import BayesifyError


class DataError(BayesifyError):
    """Data that is missing, broken or not what a loader expects."""


def listed(items: Iterable[object], most: int = 8) -> str:
    """Some items in words, and how many more there are.

    >>> listed("abcd", most=3)
    'a, b, c and 1 more'
    """
    every = [str(item) for item in items]
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + rest


def nearest(name: object, known: Collection[str]) -> str:
    """The known names closest to a mistaken one, or what is known at all.

    >>> nearest("quallity", ["quality", "price"])
    "did you mean 'quality'?"
    """
    close = difflib.get_close_matches(str(name), list(known), n=3)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"known are: {listed(sorted(known), most=20) or 'none'}"


def choice(option: str, value: object, known: Collection[str | None]) -> None:
    """Refuse a value that isn't one of those an option has."""
    if value not in known:
        raise DataError(f"{option}={value!r}: expected one of {', '.join(map(repr, known))}")


def need(module: str, purpose: str, extra: str = "lab") -> Any:
    """An optional package, imported now; its absence is explained.

    >>> need("math", "adding up").pi > 3
    True
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise DataError(f"{purpose} needs the package {package}: pip install 'bayesify[{extra}]'") from error
