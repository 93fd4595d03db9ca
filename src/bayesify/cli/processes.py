"""The folder of a run, which the processes that train together must share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from bayesify.cli.words import CommandError

SHARED = "BAYESIFY_RUN"
"""The variable through which processes that Lightning starts know the folder."""


def is_first() -> bool:
    """Whether this process speaks for all: Lightning runs the same command once more for each further device."""
    return not any(_number(name) > 0 for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def folder_of(out: Path | None, name: str, nodes: int = 1) -> Path:
    """The folder that was asked for, the one that the first process chose, or the first free one for a name."""
    if out is not None:
        return out
    if not is_first() and SHARED in os.environ:
        return Path(os.environ[SHARED])
    if not is_first() or nodes > 1 or max(_number("WORLD_SIZE"), _number("SLURM_NTASKS")) > 1:
        raise CommandError("several processes train together and must share a folder: give all the same with --out")
    return first_free(Path("runs") / name)


def first_free(folder: Path) -> Path:
    """A folder that is not there or empty: the one given, or with -2, -3, … after its name."""
    for number in count(1):
        free = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not free.exists() or (free.is_dir() and not any(free.iterdir())):
            return free
    raise AssertionError("numbers do not end")


@contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Meanwhile, processes that are started know the folder."""
    before = os.environ.get(SHARED)
    os.environ[SHARED] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[SHARED]
        else:
            os.environ[SHARED] = before


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0
