"""Runs that belong together: those of a comparison's folder, and those of one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from bayesify.lab.runs import Run

BASE, PLAIN = "base", "plain network"
"""The folder of the plain network that a comparison's models start from, and its name in tables."""


def runs_at(folders: Iterable[str | Path]) -> list[Run]:
    """The runs in folders: one by itself, or those of a comparison (`NAME/seed-0`, …) in the order they began."""
    found: dict[Path, Run] = {}
    for folder in map(Path, folders):
        inside = [Run(path.parent) for path in _recipes(folder)] or [Run.open(folder)]
        found |= {run.folder.resolve(): run for run in sorted(inside, key=_began)}
    return list(found.values())


def grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by the name of their model: the folder's, or that of the folder around `seed-0`, `seed-1`, …

    >>> list(grouped([Run(Path("demo/Rank1/seed-0")), Run(Path("demo/Rank1/seed-1")), Run(Path("mine"))]))
    ['Rank1', 'mine']
    >>> list(grouped([Run(Path("a/Rank1/seed-0")), Run(Path("b/Rank1/seed-0")), Run(Path("b/base/seed-0"))]))
    ['a/Rank1', 'b/Rank1', 'plain network']
    """
    homes: dict[Path, list[Run]] = {}
    for run in runs:
        folder = run.folder.resolve()
        homes.setdefault(folder.parent if folder.name.startswith("seed-") else folder, []).append(run)
    names = {home: PLAIN if home.name == BASE and home not in _folders(homes[home]) else home.name for home in homes}
    many = Counter(names.values())
    return {name if many[name] == 1 else f"{home.parent.name}/{name}": homes[home] for home, name in names.items()}


def _folders(runs: Iterable[Run]) -> set[Path]:
    return {run.folder.resolve() for run in runs}


def _recipes(folder: Path) -> list[Path]:
    """The recipe of each run at, in or two levels below a folder: where the first are, no deeper."""
    for pattern in ("recipe.yaml", "*/recipe.yaml", "*/*/recipe.yaml"):
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def _began(run: Run) -> tuple[str, int]:
    """When a run began, to the second; within that, when its recipe was written."""
    facts = run.facts if (run.folder / "run.json").exists() else {}
    return str(facts.get("began", "")), run.recipe_file.stat().st_mtime_ns
