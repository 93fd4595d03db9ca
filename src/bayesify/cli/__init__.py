"""The command line, `bayesify`: train, evaluate, compare and use Bayesian networks without writing code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        words: The command and its arguments; those of the process by default.

    Returns:
        The exit code: 0 for success, 1 for a bug in bayesify, 2 for an error that the message says how to fix, 130 for
        an interruption.
    """
    try:
        from bayesify.cli.app import app
        from bayesify.cli.error_handling import run_and_report_errors
    except ModuleNotFoundError as error:  # typer or rich, which print all other messages
        print(f"error: the command line needs the package {error.name}: pip install 'bayesify[lab]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return run_and_report_errors(app, list(sys.argv[1:] if words is None else words))
