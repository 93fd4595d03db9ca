"""Checks of hyper-parameters."""

from __future__ import annotations

from ..errors import BayesifyError
from ..family import Family


def check_option(family: Family, name: str, allowed: tuple[str, ...]) -> None:
    """Raise unless an option has one of its allowed values."""
    value = getattr(family, name)
    if value not in allowed:
        raise BayesifyError(
            f"{type(family).__name__}({name}={value!r}): expected one of {', '.join(map(repr, allowed))}"
        )


def check_number(
    family: Family, name: str, low: float, high: float = float("inf"), *, whole: bool = False, open_low: bool = False
) -> None:
    """Raise unless an option is a number in [low, high) (or (low, high) with `open_low`)."""
    value = getattr(family, name)
    right_type = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if right_type and (low < value if open_low else low <= value) and value < high:
        return
    kind = "a whole number" if whole else "a number"
    above = f"> {low}" if open_low else f">= {low}"
    below = "" if high == float("inf") else f" and < {high}"
    raise BayesifyError(f"{type(family).__name__}({name}={value!r}): expected {kind} {above}{below}")


def check_flag(family: Family, name: str) -> None:
    """Raise unless an option is True or False."""
    if not isinstance(getattr(family, name), bool):
        raise BayesifyError(f"{type(family).__name__}({name}={getattr(family, name)!r}): expected True or False")
