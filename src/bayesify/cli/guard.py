"""Errors as messages and exit codes, and the chatter of other packages silenced."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import typer

from bayesify.cli import show
from bayesify.errors import BayesifyError

FAILED, WRONG, INTERRUPTED = 1, 2, 130
LAB = {
    *("PIL", "jinja2", "lightning", "matplotlib", "numpy", "pyarrow", "pydantic", "rich", "sklearn", "tensorboardX"),
    *("torchmetrics", "typer", "yaml"),
}
"""The modules that `bayesify[lab]` brings."""
TALKERS = {"lightning", "lightning_fabric", "lightning_utilities", "torch", "torchmetrics"}
"""Packages whose warnings are for those who write training loops."""


def guarded(app: typer.Typer, words: Sequence[str]) -> int:
    """Run a command; what goes wrong becomes a message, unless `--debug` asks for the traceback."""
    debug = "--debug" in words
    try:
        code = _run(app, [word for word in words if word != "--debug"], debug)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if debug:
            raise
        return explained(error)
    return code


def _run(app: typer.Typer, words: list[str], debug: bool) -> int:
    """Typer ends a command by SystemExit, after messages of its own for words it does not know."""
    try:
        with nullcontext() if debug else quiet():
            typer.main.get_command(app).main(words, prog_name="bayesify")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            show.warning("stopped")
        return end.code if isinstance(end.code, int) else FAILED if end.code else 0
    return 0


def explained(error: Exception) -> int:
    """Say what went wrong; the exit code."""
    if _is_interruption(error):
        show.warning(str(error))
        return INTERRUPTED
    if isinstance(error, BayesifyError):
        show.error(str(error))
        return WRONG
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("bayesify"):
        show.error(f"the package {error.name} is missing: pip install {_where(error.name)}")
        return WRONG
    if isinstance(error, OSError):
        show.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return WRONG
    show.error(f"{type(error).__name__}: {error}\nthis is a bug; run with --debug for the traceback")
    return FAILED


def _is_interruption(error: Exception) -> bool:
    """Only training raises it, so where that was never imported there is nothing to import for the question."""
    training = sys.modules.get("bayesify.lab.training")
    return training is not None and isinstance(error, training.Interrupted)


def _where(module: str) -> str:
    """What brings a module.

    >>> _where("lightning.pytorch"), _where("timm")
    ("'bayesify[lab]'", 'timm')
    """
    package = module.split(".")[0]
    return "'bayesify[lab]'" if package in LAB else package


@contextmanager
def quiet() -> Iterator[None]:
    """Without the tips, notes and warnings that Lightning and torch have for programmers."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(disabled)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if concerns_the_user(category, filename):
        show.warning(f"warning: {message}")


def concerns_the_user(category: type[Warning], filename: str) -> bool:
    """Whether a person can do anything about a warning; what torch says of the GPU they can.

    >>> concerns_the_user(UserWarning, "/site-packages/lightning/pytorch/trainer/trainer.py")
    False
    >>> concerns_the_user(UserWarning, "/home/ann/networks.py")
    True
    """
    if issubclass(category, (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning)):
        return False
    parts = Path(filename).parts
    return "cuda" in parts or not TALKERS & set(parts)
