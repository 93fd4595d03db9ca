"""The error of this package, and the phrases that its messages share."""

import difflib
from collections.abc import Iterable, Sequence

from bayesify.errors import BayesifyError


class ModelError(BayesifyError):
    """A network that can't be built as asked, or weights that don't fit it."""


def suggestion(word: str, choices: Iterable[str]) -> str:
    """The choices nearest to a word, as the end of a sentence, or nothing where none is near.

    >>> suggestion("resnet22", ["resnet20", "vgg16"])
    "; did you mean 'resnet20'?"
    """
    spelling = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), spelling, n=3)
    return f"; did you mean {' or '.join(repr(spelling[choice]) for choice in near)}?" if near else ""


def some(names: Sequence[str]) -> str:
    """The first few of many names.

    >>> some(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    shown = ", ".join(map(repr, names[:3]))
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def positive(**values: object) -> None:
    """Refuse a size that is not a whole number of at least 1.

    >>> positive(width=0)
    Traceback (most recent call last):
    bayesify.lab.models.errors.ModelError: width must be a whole number of at least 1, not 0
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name} must be a whole number of at least 1, not {value!r}")


def size_list(name: str, value: int | Sequence[int]) -> list[int]:
    """One size or many, as a list of sizes.

    >>> size_list("hidden", 50), size_list("hidden", (20, 10))
    ([50], [20, 10])
    """
    several: list[int] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for each in several:
        positive(**{name: each})
    return several


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a word that is not among the choices.

    >>> one_of("pool", "lst", ["last", "mean"])
    Traceback (most recent call last):
    bayesify.lab.models.errors.ModelError: pool must be one of 'last', 'mean', not 'lst'; did you mean 'last'?
    """
    choices = list(choices)
    if value not in choices:
        raise ModelError(
            f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}{suggestion(str(value), choices)}"
        )
