"""An extension of griffe, which reads docstrings for mkdocstrings: doctests become code blocks.

Markdown would take `>>>` for quotations of quotations.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^>>>.*\n(?:(?!\s*$).*\n?)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with each doctest, up to the next empty line, as a code block."""
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


class Doctests(Extension):
    """Fences the doctests of every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
