"""`Default`: something that was chosen for a user, and how to choose otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Default(NamedTuple):
    """What was chosen about something, and an example of the change that chooses otherwise."""

    about: str
    chosen: str
    change: str = ""

    def __str__(self) -> str:
        line = f"{self.about:<11} {self.chosen}{f'  [{self.change}]' if self.change else ''}"
        return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


def as_lines(choices: Sequence[Default]) -> list[str]:
    """A line for each choice, and one before them that says what the changes at their ends are.

    >>> as_lines([Default("method", "Rank1", "method=IBNN")])
    ['chosen (add what is in brackets to choose otherwise):', 'method      Rank1  [method=IBNN]']
    """
    return ["chosen (add what is in brackets to choose otherwise):", *map(str, choices)] if choices else []
