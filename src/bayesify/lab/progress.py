"""A progress bar over several trainings."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(total: int, shown: bool) -> Progress:
    """A bar with one task of `total` steps, on stderr, which disappears at the end."""
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*parts, console=Console(stderr=True), transient=True, disable=not shown)
    bar.add_task("", total=total)
    return bar
