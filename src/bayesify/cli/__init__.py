"""The command `bayesify`: from a recipe or no more than a name to a trained Bayesian network, without code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that the words name, those of the process unless given, and return its exit code.

    0 is success, 1 an error of bayesify's own, 2 one that the message says how to fix, 130 a run that was interrupted.
    """
    try:
        from bayesify.cli.app import app
        from bayesify.cli.guard import guarded
    except ModuleNotFoundError as error:  # typer or rich, without which nothing prettier can be said
        print(f"error: the command line needs the package {error.name}: pip install 'bayesify[lab]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return guarded(app, list(sys.argv[1:] if words is None else words))
