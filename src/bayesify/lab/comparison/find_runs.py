"""Find the runs in a folder, and group them by model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from bayesify.lab.runs import Run

BASE, PLAIN = "base", "plain network"
"""The folder of the plain network that a comparison's models start from, and its name in tables."""


def runs_at(folders: Iterable[str | Path], *, trust: str | Path | None = None) -> list[Run]:
    """The runs in folders: a single run, or those of a comparison (`NAME/seed-0`, …) in the order of their start.

    Args:
        folders: Folders of runs or of comparisons.
        trust: A Python file of yours, if networks of the runs are functions of it.

    Returns:
        The runs, each once.
    """
    found: dict[Path, Run] = {}
    for folder in map(Path, folders):
        places = [path.parent for path in _recipes(folder)] or [folder]
        inside = [Run.open(place, trust=trust) for place in places]
        found |= {run.folder.resolve(): run for run in sorted(inside, key=_start_time)}
    return list(found.values())


def group_by_model(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by model name: the name of their folder, or of the folder that holds `seed-0`, `seed-1`, …

    >>> list(group_by_model([Run("demo/Rank1/seed-0"), Run("demo/Rank1/seed-1"), Run("mine")]))
    ['Rank1', 'mine']
    >>> list(group_by_model([Run("a/Rank1/seed-0"), Run("b/Rank1/seed-0"), Run("b/base/seed-0")]))
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
    """The recipes of the runs in a folder: at its top, one level down or two levels down, whichever comes first."""
    for pattern in ("recipe.yaml", "*/recipe.yaml", "*/*/recipe.yaml"):
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def _start_time(run: Run) -> tuple[str, int]:
    """When a run was started, to the second, and when its recipe was written, which orders runs of one second."""
    facts = run.facts if (run.folder / "run.json").exists() else {}
    return str(facts.get("began", "")), run.recipe_file.stat().st_mtime_ns
