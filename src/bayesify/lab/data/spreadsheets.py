"""Text in CSV files that a spreadsheet would take for a formula."""

from __future__ import annotations

from typing import Any

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""What a formula, or a command hidden in one, begins with; the last four are full-width."""


def safe_cell(value: Any) -> Any:
    """A value for a CSV file; text that a spreadsheet would run as a formula gets an apostrophe in front.

    Control characters are left out. Numbers, also as text, stay as they are.

    Args:
        value: What is to be written.

    Returns:
        The same, or the printable text, perhaps with an apostrophe in front.

    >>> safe_cell("=cmd|' /C calc'!A0"), safe_cell("-3.5"), safe_cell(-3.5), safe_cell("cat")
    ("'=cmd|' /C calc'!A0", '-3.5', -3.5, 'cat')
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip(" ").startswith(FORMULA) and not _is_number(text) else text


def printable(text: str) -> str:
    """The text on one line, without characters that are not shown, such as those that control a terminal.

    >>> printable("a\\nb\\x1b[31m\\u202e")
    'a b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
