"""Turn errors into messages and exit codes, and hide warnings and logs that don't concern the user."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TextIO

import typer

from bayesify.cli import output
from bayesify.errors import BayesifyError

BUG, USER_ERROR, INTERRUPTED, TERMINATED = 1, 2, 130, 143
LAB = {
    *("PIL", "jinja2", "lightning", "matplotlib", "numpy", "pyarrow", "pydantic", "rich", "sklearn", "tensorboardX"),
    *("torchmetrics", "typer", "yaml"),
}
"""The modules that `bayesify[lab]` installs."""
NOISY_PACKAGES = {"lightning", "lightning_fabric", "lightning_utilities", "torch", "torchmetrics"}
"""Packages whose warnings are meant for programmers."""


def run_and_report_errors(app: typer.Typer, words: Sequence[str]) -> int:
    """Run a command and return its exit code; an error becomes a message, or with --debug a traceback."""
    debug = "--debug" in words
    try:
        code = _run(app, [word for word in words if word != "--debug"], debug)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BUG
    except KeyboardInterrupt:  # before typer runs, which handles it afterwards
        output.warning("stopped")
        return INTERRUPTED
    except Exception as error:  # every error ends as a message and an exit code; --debug shows the traceback
        if debug:
            raise
        return report_error(error)
    return code


def _run(app: typer.Typer, words: list[str], debug: bool) -> int:
    """Run typer, which ends a command with SystemExit and prints its own messages about wrong arguments."""
    try:
        with _sigterm_ends_the_command(), nullcontext() if debug else quiet():
            typer.main.get_command(app).main(words, prog_name="bayesify")
    except SystemExit as end:
        if end.code in (INTERRUPTED, TERMINATED):
            output.warning("stopped")
        return end.code if isinstance(end.code, int) else BUG if end.code else 0
    return 0


def report_error(error: Exception) -> int:
    """Print what went wrong, and return the exit code."""
    if _is_interruption(error):
        output.warning(str(error))
        return 128 + int(getattr(error, "signal_number", signal.SIGINT))
    if isinstance(error, BayesifyError):
        output.error(str(error))
        return USER_ERROR
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("bayesify"):
        output.error(f"the package {error.name} is missing: pip install {_where(error.name)}")
        return USER_ERROR
    if isinstance(error, OSError):
        output.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return USER_ERROR
    output.error(f"{type(error).__name__}: {error}\nthis is a bug; run with --debug for the traceback")
    return BUG


@contextmanager
def _sigterm_ends_the_command() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, with its cleanup and a message; training saves a checkpoint first."""
    if threading.current_thread() is not threading.main_thread():  # other threads can't handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def _is_interruption(error: Exception) -> bool:
    """Whether training was interrupted; if `lab.training` was never imported, it was not."""
    training = sys.modules.get("bayesify.lab.training")
    return training is not None and isinstance(error, training.Interrupted)


def _where(module: str) -> str:
    """What to install for a module.

    >>> _where("lightning.pytorch"), _where("timm")
    ("'bayesify[lab]'", 'timm')
    """
    package = module.split(".")[0]
    return "'bayesify[lab]'" if package in LAB else package


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the tips, logs and warnings of Lightning and torch."""
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
        output.warning(f"warning: {message}")


def concerns_the_user(category: type[Warning], filename: str) -> bool:
    """Whether the user can do something about a warning, such as torch's about the GPU.

    >>> concerns_the_user(UserWarning, "/site-packages/lightning/pytorch/trainer/trainer.py")
    False
    >>> concerns_the_user(UserWarning, "/home/ann/networks.py")
    True
    """
    if issubclass(category, (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning)):
        return False
    parts = Path(filename).parts
    return "cuda" in parts or not NOISY_PACKAGES & set(parts)
