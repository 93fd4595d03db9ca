"""`ModelError`, and helpers for its messages."""

import difflib
from collections.abc import Iterable, Sequence

from bayesify.errors import BayesifyError


class ModelError(BayesifyError):
    """A network that can't be built, or weights that don't fit it."""


def suggestion(word: str, choices: Iterable[str]) -> str:
    """A suggestion of the choices closest to a word, or an empty string.

    >>> suggestion("resnet22", ["resnet20", "vgg16"])
    "; did you mean 'resnet20'?"
    """
    spelling = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), spelling, n=3)
    return f"; did you mean {' or '.join(repr(spelling[choice]) for choice in near)}?" if near else ""


def first_few(names: Sequence[str]) -> str:
    """The first few names, and how many more there are.

    >>> first_few(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    shown = ", ".join(map(repr, names[:3]))
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def require_positive(**values: object) -> None:
    """Raise unless all values are integers of at least 1.

    >>> require_positive(width=0)
    Traceback (most recent call last):
    bayesify.lab.models.errors.ModelError: width must be an integer of at least 1, not 0
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name} must be an integer of at least 1, not {value!r}")


def size_list(name: str, value: int | Sequence[int]) -> list[int]:
    """One size or several as a list.

    >>> size_list("hidden", 50), size_list("hidden", (20, 10))
    ([50], [20, 10])
    """
    several: list[int] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for each in several:
        require_positive(**{name: each})
    return several


def require_one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise unless the value is one of the choices.

    >>> require_one_of("pool", "lst", ["last", "mean"])
    Traceback (most recent call last):
    bayesify.lab.models.errors.ModelError: pool must be one of 'last', 'mean', not 'lst'; did you mean 'last'?
    """
    choices = list(choices)
    if value not in choices:
        raise ModelError(
            f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}{suggestion(str(value), choices)}"
        )
