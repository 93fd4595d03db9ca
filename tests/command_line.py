"""Commands that tests run in this process, and a small run that one of them has made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from bayesify.cli import main

TINY = ("training.epochs=1", "data.limit=60", "evaluation.samples=2", "data.options={size: 8}")


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Cli = Callable[..., Done]


def cli_in(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command in this process, in a folder of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TERMINAL_WIDTH", "120")

    def run(*words: object) -> Done:
        code = main([str(word) for word in words])
        return Done(code, *capsys.readouterr())

    return run


def tiny_run(folder: Path) -> Path:
    """A finished run."""
    assert main(["train", *TINY, "--out", str(folder), "-q"]) == 0
    return folder
