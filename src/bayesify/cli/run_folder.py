"""Choose the folder of a run, which all processes of distributed training must share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bayesify.cli.arguments import CommandError
from bayesify.lab.run_names import RUNS, first_free

FOLDER_VARIABLE = "BAYESIFY_RUN"
"""The environment variable that tells processes started by Lightning the folder."""


def is_main_process() -> bool:
    """Whether this is the main process: Lightning runs the same command again for each further device."""
    return not any(_number(name) > 0 for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def folder_of(out: Path | None, name: str, nodes: int = 1) -> Path:
    """The folder that was asked for, the one that the main process chose, or the first free one for a name."""
    if out is not None:
        return out
    if not is_main_process() and FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    if not is_main_process() or nodes > 1 or max(_number("WORLD_SIZE"), _number("SLURM_NTASKS")) > 1:
        raise CommandError("several processes train together and must share a folder: give each the same --out")
    return first_free(RUNS / name)


@contextmanager
def share_folder(folder: Path) -> Iterator[None]:
    """Tell the folder to the processes that are started in the meantime."""
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = before


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0
