"""`Frame`: the columns of a CSV or Parquet file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bayesify.lab.data.errors import DataError, import_optional, list_some, suggest

DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": ","}
PARQUET = (".parquet", ".pq")


@dataclass(frozen=True)
class Frame:
    """The columns of a table by name: booleans, integers, floats with NaN, or words with None, each (N,)."""

    name: str
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def take(self, rows: Tensor) -> Frame:
        """A selection of rows as a new frame."""
        index = rows.numpy()
        return Frame(self.name, {name: column[index] for name, column in self.columns.items()})

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.columns:
            raise DataError(f"{self.name} has no column {name!r}: {suggest(name, self.columns)}")
        return self.columns[name]

    def numbers(self, name: str) -> np.ndarray:
        """A column as float64, with NaN for missing values; raises for words and infinity."""
        column = self[name]
        if column.dtype == object:
            there = [(row, word) for row, word in enumerate(column) if word is not None]
            row, word = next(((row, word) for row, word in there if not is_number(word)), there[0])
            raise DataError(
                f"column {name!r} of {self.name} has words, such as {word!r} in row {row}; expected numbers: "
                "correct them, or list those that mean missing in na_values=[…]"
            )
        values = column.astype(np.float64)
        infinite = np.flatnonzero(np.isinf(values))
        if len(infinite):
            raise DataError(
                f"column {name!r} of {self.name} has infinity in {len(infinite)} rows (rows {list_some(infinite)}); "
                "remove or replace it"
            )
        return values

    def words(self, name: str) -> np.ndarray:
        """A column as strings, integers without a decimal point; raises for missing values."""
        self.check_words(name)
        return np.array([_word(value) for value in self[name].tolist()], dtype=object)

    def check_words(self, name: str) -> None:
        """Raise if a column of words has missing values."""
        gaps = missing_rows(self[name])
        if len(gaps):
            raise DataError(
                f"column {name!r} of {self.name} has {len(gaps)} missing values (rows {list_some(gaps)}); remove these "
                "rows, or give missing values a word of their own"
            )

    def check_numbers(self, name: str, missing: str) -> None:
        """Raise if a column of numbers has words or infinity, or missing values that are not to be filled."""
        gaps = np.flatnonzero(np.isnan(self.numbers(name)))
        if len(gaps) and missing == "error":
            raise DataError(
                f"column {name!r} of {self.name} has {len(gaps)} missing values (rows {list_some(gaps)}); remove these "
                "rows, or fill them with the training mean: missing='mean'"
            )


def missing_rows(column: np.ndarray) -> np.ndarray:
    """The rows where a column has no value.

    >>> missing_rows(np.array([1.0, np.nan])).tolist(), missing_rows(np.array(["a", None])).tolist()
    ([1], [1])
    """
    if column.dtype == object:
        return np.flatnonzero([value is None for value in column])
    return np.flatnonzero(np.isnan(column)) if column.dtype.kind == "f" else np.array([], dtype=np.int64)


def is_number(word: str) -> bool:
    """Whether a word is a number as Python reads it.

    >>> is_number("1e-3"), is_number("?")
    (True, False)
    """
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_frame(
    path: Path,
    *,
    keep: Sequence[str] | None = None,
    drop: Collection[str] = (),
    words: Collection[str] = (),
    na_values: Sequence[str] = (),
    delimiter: str | None = None,
) -> Frame:
    """Read columns of a CSV or Parquet file; those in `words` are read as text."""
    table = _read_parquet(path) if path.suffix in PARQUET else _read_csv(path, words, na_values, delimiter)
    doubled = {name for name in table.column_names if table.column_names.count(name) > 1}
    if doubled:
        raise DataError(f"{path} has more than one column {list_some(map(repr, sorted(doubled)))}; rename them")
    for name in [*drop, *(keep or ())]:
        if name not in table.column_names:
            raise DataError(f"{path} has no column {name!r}: {suggest(name, table.column_names)}")
    wanted = [name for name in keep or table.column_names if name not in drop]
    if not table.num_rows:
        raise DataError(f"{path} has no rows")
    return arrow_frame(table.select(wanted), str(path))


def arrow_frame(table: Any, name: str) -> Frame:
    """The columns of a pyarrow table."""
    columns = zip(table.column_names, table.columns, strict=True)
    return Frame(name, {column: _array(values, column, name) for column, values in columns})


def _array(values: Any, column: str, name: str) -> np.ndarray:
    pa = import_optional("pyarrow", "reading tables")
    kind, types = values.type, pa.types
    if types.is_dictionary(kind):
        return _array(values.cast(kind.value_type), column, name)
    if types.is_null(kind) or types.is_decimal(kind) or (types.is_boolean(kind) and values.null_count):
        values = values.cast(pa.float64()) if not types.is_boolean(kind) else values.cast(pa.int8())
    elif not any(ask(kind) for ask in (types.is_integer, types.is_floating, types.is_boolean, *_texts(types))):
        raise DataError(
            f"column {column!r} of {name} is of type {kind}; expected numbers, words (UTF-8) or true/false: convert "
            f"it, or leave it out with drop=[{column!r}]"
        )
    array: np.ndarray = values.to_numpy()
    return array


def _texts(types: Any) -> Sequence[Any]:
    return types.is_string, types.is_large_string


def _read_parquet(path: Path) -> Any:
    parquet, pa = (
        import_optional("pyarrow.parquet", "reading Parquet files"),
        import_optional("pyarrow", "reading tables"),
    )
    try:
        return parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} can't be read as Parquet ({error}); it is truncated or in another format") from error


def _read_csv(path: Path, words: Collection[str], na_values: Sequence[str], delimiter: str | None) -> Any:
    csv, pa = import_optional("pyarrow.csv", "reading CSV files"), import_optional("pyarrow", "reading tables")
    default = next((DELIMITERS[suffix] for suffix in path.suffixes[-2:] if suffix in DELIMITERS), None)
    if path.is_dir() or (default is None and delimiter is None):
        raise DataError(f"{path}: expected a .csv, .tsv or .parquet file (CSV may be compressed as .gz)")
    options = csv.ConvertOptions(column_types=dict.fromkeys(words, pa.string()), strings_can_be_null=True)
    options.null_values = [*options.null_values, *na_values]
    try:
        return csv.read_csv(
            str(path), convert_options=options, parse_options=csv.ParseOptions(delimiter=delimiter or default)
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path} can't be read as CSV ({error}); expected a header and rows of equal length; set delimiter=… if "
            "it is not a comma"
        ) from error


def _word(value: object) -> str:
    """A category as text: integers without a decimal point, booleans as in JSON.

    >>> _word(3.0), _word(True), _word("red")
    ('3', 'true', 'red')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
