"""What commands print: results to stdout, messages to stderr, in colour on a terminal."""

from __future__ import annotations

import io
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
FILE_WIDTH = 200
"""The width of tables if the output is not a terminal."""


def error(message: str) -> None:
    """Print an error that the user can fix."""
    _print_message("error: ", message, "bold red")


def warning(message: str) -> None:
    """Print something that the user should know."""
    _print_message("", message, "yellow")


def result(thing: Any) -> None:
    """Print a table, or text unchanged, to stdout."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    thing = printable(thing) if isinstance(thing, str) else thing
    Console(width=width, highlight=False, markup=False).print(thing, soft_wrap=isinstance(thing, str))


def as_text(thing: Any) -> str:
    """A table as text."""
    console = Console(width=FILE_WIDTH, file=io.StringIO(), highlight=False, markup=False)
    with console.capture() as captured:
        console.print(thing)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def printable(text: str) -> str:
    """Text without control characters, which could rewrite what a terminal shows, and may come from a file.

    >>> printable("red\\x1b[31m")
    'red\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def metrics(found: Mapping[str, Any]) -> Group:
    """The contents of `metrics.json`: a table of metrics by split, and what the method costs."""
    splits = {split: dict(_rows(found[split])) for split in SPLITS if found.get(split)}
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for split in splits:
        table.add_column(split, justify="right")
    for name in dict.fromkeys(name for values in splits.values() for name in values):
        table.add_row(printable(name), *(printable(values.get(name, "")) for values in splits.values()))
    return Group(table, *_costs(found))


def _rows(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The metrics of a split with their intervals, then those on other inputs.

    >>> dict(_rows({"nll": 0.1, "interval": {"nll": [0.05, 0.2]}, "ood": {"noise": {"entropy": {"auroc": 0.9}}}}))
    {'nll': '0.1000 (0.0500 to 0.2000)', 'noise AUROC by entropy': '0.9000'}
    """
    for name, value in values.items():
        if not isinstance(value, (Mapping, list)):
            yield name, _with_interval(values, name)
    for key, words in (("accuracy_at", ""), ("accuracy_at_epistemic", ", by mutual information")):
        for share, value in values.get(key, {}).items():
            yield f"accuracy at {float(share):.0%} coverage{words}", _number(value)
    for other, by_score in values.get("ood", {}).items():
        for score, found in by_score.items():
            yield f"{other} AUROC by {score}", _with_interval(found, "auroc") if found else ""
    for kind, by_intensity in values.get("shift", {}).items():
        intensity, found = list(by_intensity.items())[-1]
        yield f"accuracy, {kind} {intensity}", _number(found["accuracy"])
    for name, value in values.get("corrupted", {}).items():
        yield f"{name}, mean of all corruptions", _number(value)
    for attack, found in values.get("attack", {}).items():
        yield f"accuracy under {attack}", _number(found["robust_accuracy"])


def _with_interval(values: Mapping[str, Any], name: str) -> str:
    low, high = values.get("interval", {}).get(name, (None, None))
    return _number(values.get(name)) + (f" ({_number(low)} to {_number(high)})" if low is not None else "")


def _costs(found: Mapping[str, Any]) -> list[str]:
    parameters = found.get("parameters")
    if parameters is None:
        return []
    added = f"{parameters['added']:,} added ({found.get('overhead', 0.0):.2f}%)"
    return [f"{found.get('draws', 1)} draws · {parameters['base']:,} parameters, {added}"]


def _number(value: Any) -> str:
    """A number for people to read.

    >>> _number(0.123456), _number(1500), _number(None)
    ('0.1235', '1,500', '')
    """
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)


def _print_message(title: str, message: str, style: str) -> None:
    console = Console(stderr=True, highlight=False)
    message = printable(message)
    console.print(
        Text(title, style) + Text(_wrap(title + message)[len(title) :], "" if title else style), soft_wrap=True
    )


def _wrap(message: str) -> str:
    """Wrap for a terminal at spaces only, so that file names can be copied."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    options = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
    return "\n".join(textwrap.fill(line, width, **options) for line in message.splitlines())  # type: ignore[arg-type]
