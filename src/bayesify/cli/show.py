"""What commands print: results on stdout, all else on stderr, with colours where a person looks."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

SPLITS = ("train", "validation", "test")
WIDE = 200
"""Columns where the output is no terminal, so that tables in files are whole."""


def error(message: str) -> None:
    """A message about what the user can fix."""
    _tell("error: ", message, "bold red")


def warning(message: str) -> None:
    """A message about what the user should know."""
    _tell("", message, "yellow")


def result(thing: Any) -> None:
    """Something on stdout: a table, or text as it is."""
    width = None if sys.stdout.isatty() else WIDE
    Console(width=width, highlight=False, markup=False).print(thing, soft_wrap=isinstance(thing, str))


def metrics(found: Mapping[str, Any]) -> Group:
    """What `metrics.json` holds: a table of the splits' numbers, and what the method costs."""
    splits = {split: dict(_flat(found[split])) for split in SPLITS if split in found}
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for split in splits:
        table.add_column(split, justify="right")
    for name in dict.fromkeys(name for values in splits.values() for name in values):
        table.add_row(name, *(_number(values.get(name)) for values in splits.values()))
    return Group(table, *_costs(found))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers of a split, with those inside others named by the way to them.

    >>> dict(_flat({"nll": 0.1, "ood": {"noise": {"entropy": 0.9}}}))
    {'nll': 0.1, 'ood noise entropy': 0.9}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {inner}", each) for inner, each in _flat(value))
        else:
            yield name, value


def _costs(found: Mapping[str, Any]) -> list[str]:
    parameters = found.get("parameters")
    if parameters is None:
        return []
    added = f"{parameters['added']:,} added ({found['overhead']:.2f}%)"
    return [f"{found['draws']} draws · {parameters['base']:,} parameters and {added}"]


def _number(value: Any) -> str:
    """A number as a person reads it.

    >>> _number(0.123456), _number(1500), _number(None)
    ('0.1235', '1,500', '')
    """
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)


def _tell(title: str, message: str, style: str) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(
        Text(title, style) + Text(_wrapped(title + message)[len(title) :], "" if title else style), soft_wrap=True
    )


def _wrapped(message: str) -> str:
    """Wrapped for a terminal, at spaces alone, so that names of files can still be copied."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    whole = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
    return "\n".join(textwrap.fill(line, width, **whole) for line in message.splitlines())  # type: ignore[arg-type]
