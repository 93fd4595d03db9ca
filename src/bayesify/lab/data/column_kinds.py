"""`sort_columns`: which columns of a table are numbers, categories, or nothing to learn from, such as identifiers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bayesify.lab.data.columns import FEW_NUMBERS, MANY
from bayesify.lab.data.errors import import_optional, list_some
from bayesify.lab.data.frame import is_number

DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T]\d{1,2}:\d{2}.*)?")
IDENTIFIER = re.compile(r"id|index|unnamed.*|.*[_\s.-](id|uuid|guid)|", re.IGNORECASE)
CAMEL_IDENTIFIER = re.compile(r".*[a-z](Id|ID)")
FEW_ROWS = 20
"""In a table with fewer rows than this, values that are all different say nothing about their column."""
USUALLY = 0.95
"""A column of words is one of dates if so many of its different words are dates."""


@dataclass
class ColumnKinds:
    """What the columns of a table are taken for.

    Attributes:
        numbers: Columns of numbers.
        categories: Columns of words, true/false apart.
        codes: The `categories` that are integers, which only their names tell from numbers.
        left_out: Columns to learn nothing from, and why, such as "identifier" or "date".
        na_values: Words among numbers, which are taken for missing values, and their column.
        missing: The share of missing values of each column that has some.
    """

    numbers: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    na_values: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, float] = field(default_factory=dict)


def sort_columns(table: Any, *, target: Collection[str] = (), categorical: Collection[str] = ()) -> ColumnKinds:
    """Find out what the columns of a table are.

    Args:
        table: A pyarrow table.
        target: Columns that are not sorted.
        categorical: Columns that are categories, whatever they look like.

    Returns:
        The columns by kind.

    >>> import pyarrow as pa
    >>> table = pa.table({"id": list(range(30)), "age": [20.5] * 15 + [30.0] * 15, "currency": ["EUR"] * 30})
    >>> kinds = sort_columns(table)
    >>> kinds.numbers, kinds.left_out
    (['age'], {'id': 'identifier', 'currency': "always 'EUR'"})
    """
    found = ColumnKinds()
    for name in table.column_names:
        if name in target:
            continue
        column = table[name].combine_chunks()
        if column.null_count and column.null_count < len(column):
            found.missing[name] = column.null_count / len(column)
        reason = _reason_to_leave_out(name, column) if name not in categorical else ""
        if reason:
            found.left_out[name] = reason
        elif name in categorical:
            found.categories.append(name)
        else:
            _add(found, name, column)
    return found


def _reason_to_leave_out(name: str, column: Any) -> str:
    """Why nothing can be learnt from a column; empty if something can."""
    pa, pc = _arrow()
    kind, rows = column.type, len(column)
    if pa.types.is_temporal(kind):
        return "date"
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if column.null_count == rows:
        return "empty"
    if not (_is_number(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return f"of type {kind}"
    different = pc.count_distinct(column, mode="only_valid").as_py()
    if different == 1 and not column.null_count:
        return f"always {column[0].as_py()!r}"
    if pa.types.is_integer(kind):
        return _reason_for_integers(name, column, different)
    return "" if _is_number(kind) else _reason_for_words(pc.unique(column.drop_null()).to_pylist(), rows)


def _reason_for_integers(name: str, column: Any, different: int) -> str:
    _, pc = _arrow()
    rows = len(column)
    if rows < FEW_ROWS:
        return ""
    is_running = different == rows and pc.max(column).as_py() - pc.min(column).as_py() == rows - 1
    return "identifier" if is_running or (looks_like_identifier(name) and different > MANY) else ""


def _reason_for_words(words: Sequence[str], rows: int) -> str:
    numbers, odd = _numbers_and_others(words)
    if numbers > max(FEW_NUMBERS, len(odd)):
        return ""  # numbers, and words that mean missing
    if sum(DATE.fullmatch(word.strip()) is not None for word in words) >= USUALLY * len(words):
        return "date"
    if len(words) > MANY or (rows >= FEW_ROWS and len(words) > rows / 2):
        return "identifier or free text"
    return ""


def _add(found: ColumnKinds, name: str, column: Any) -> None:
    """Add a column to the numbers or to the categories."""
    pa, pc = _arrow()
    if pa.types.is_integer(column.type) and looks_like_identifier(name) and len(column) >= FEW_ROWS:
        found.codes.append(name)
        found.categories.append(name)
        return
    if _is_number(column.type):
        found.numbers.append(name)
        return
    numbers, odd = _numbers_and_others(pc.unique(column.drop_null()).to_pylist())
    if numbers > max(FEW_NUMBERS, len(odd)):
        found.na_values[name] = odd
        found.numbers.append(name)
    else:
        found.categories.append(name)


def looks_like_identifier(name: str) -> bool:
    """Whether a column has the name of an identifier.

    >>> [looks_like_identifier(name) for name in ("customer_id", "storeId", "Unnamed: 0", "paid", "width")]
    [True, True, True, False, False]
    """
    return bool(IDENTIFIER.fullmatch(name.strip()) or CAMEL_IDENTIFIER.fullmatch(name.strip()))


def same_as_target(table: Any, columns: Iterable[str], target: str) -> list[str]:
    """The columns whose values stand for one class each, and the classes for one value each.

    >>> import pyarrow as pa
    >>> same_as_target(pa.table({"y": [0, 1, 0], "left": ["no", "yes", "no"], "x": [1, 2, 3]}), ["left", "x"], "y")
    ['left']
    """
    _, pc = _arrow()
    known = table.filter(pc.is_valid(table[target]))
    classes = pc.count_distinct(known[target]).as_py()
    found = []
    for name in columns:
        if classes < 2 or pc.count_distinct(known[name], mode="all").as_py() != classes:
            continue
        if known.group_by([name, target]).aggregate([]).num_rows == classes:
            found.append(name)
    return found


def with_share_missing(kinds: ColumnKinds, names: Iterable[str], most: int = 12) -> str:
    """Names of columns as text, with their shares of missing values."""
    shares = {name: f" ({share:.0%} missing)".replace("(0%", "(<1%") for name, share in kinds.missing.items()}
    return list_some([f"{name}{shares.get(name, '')}" for name in names], most) or "none"


def _numbers_and_others(words: Sequence[str]) -> tuple[int, list[str]]:
    """How many words are numbers, and the others."""
    odd = [word for word in words if not is_number(word)]
    return len(words) - len(odd), odd


def _is_number(kind: Any) -> bool:
    types = _arrow()[0].types
    return any(ask(kind) for ask in (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean))


def _arrow() -> tuple[Any, Any]:
    purpose = "reading tables"
    return import_optional("pyarrow", purpose), import_optional("pyarrow.compute", purpose)
