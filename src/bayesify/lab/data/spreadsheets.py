"""Text in CSV files that a spreadsheet would take for a formula."""

from __future__ import annotations

from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""What a formula, or a command hidden in one, begins with; the last four are full-width."""


def safe_cell(value: Any) -> Any:
    """A value for a CSV file; text that a spreadsheet would run as a formula gets an apostrophe in front.

    Numbers, also as text, stay as they are.

    Args:
        value: What is to be written.

    Returns:
        The same, or the text with an apostrophe in front.

    >>> safe_cell("=cmd|' /C calc'!A0"), safe_cell("-3.5"), safe_cell(-3.5), safe_cell("cat")
    ("'=cmd|' /C calc'!A0", '-3.5', -3.5, 'cat')
    """
    if not isinstance(value, str) or not value.lstrip(" ").startswith(FORMULA) or _is_number(value):
        return value
    return f"'{value}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isprintable()
