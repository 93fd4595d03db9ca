"""`Frame`: the columns of a CSV or Parquet file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bayesify.lab.data.errors import DataError, Problems, import_optional, list_some, suggest

DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": ","}
PARQUET = (".parquet", ".pq")
MISSING_VALUES = ("error", "mean", "indicator")
"""What may be done about missing values."""


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

    def readable_numbers(self, name: str) -> np.ndarray:
        """The same with NaN for words and infinity too."""
        column = self[name]
        if column.dtype == object:
            column = np.array([float(word) if word and is_number(word) else np.nan for word in column])
        values = column.astype(np.float64)
        return np.where(np.isfinite(values), values, np.nan)

    def words(self, name: str, missing: str | None = None) -> np.ndarray:
        """A column as strings, integers without a decimal point; raises for missing values without a word for them."""
        if missing is None:
            self.check_words(name, "error")
        values, gaps = self[name], set(missing_rows(self[name]).tolist())
        words = [missing if row in gaps else _word(value) for row, value in enumerate(values.tolist())]
        return np.array(words, dtype=object)

    def check_words(self, name: str, missing: str) -> None:
        """Raise if a column of words has missing values, which are not to be a category."""
        gaps = missing_rows(self[name])
        if len(gaps) and missing != "indicator":
            raise DataError(
                f"column {name!r} of {self.name} has {len(gaps)} missing values (rows {list_some(gaps)}); remove these "
                "rows, or give missing values a word of their own: missing='indicator'"
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
    problems: Problems | None = None,
) -> Frame:
    """Read columns of a CSV or Parquet file; those in `words` are read as text.

    Columns without numbers or words raise or, given `problems`, are noted there and left out.
    """
    table = read_arrow(path, words=words, na_values=na_values, delimiter=delimiter)
    return arrow_frame(chosen_columns(table, str(path), keep, drop), str(path), problems)


def read_arrow(
    path: Path,
    *,
    words: Collection[str] = (),
    na_values: Sequence[str] = (),
    delimiter: str | None = None,
    as_text: bool = False,
) -> Any:
    """A CSV or Parquet file as a pyarrow table; all of a CSV file's columns as they are written if `as_text`."""
    read = _read_parquet(path) if path.suffix in PARQUET else _read_csv(path, words, na_values, delimiter, as_text)
    doubled = {name for name in read.column_names if read.column_names.count(name) > 1}
    if doubled:
        raise DataError(f"{path} has more than one column {list_some(map(repr, sorted(doubled)))}; rename them")
    if not read.num_rows:
        raise DataError(f"{path} has no rows")
    return read


def chosen_columns(table: Any, name: str, keep: Sequence[str] | None = None, drop: Collection[str] = ()) -> Any:
    """Some columns of a pyarrow table; raises for those that it lacks."""
    lacking = [column for column in (*drop, *(keep or ())) if column not in table.column_names]
    if lacking:
        if len(lacking) == 1:
            raise DataError(f"{name} has no column {lacking[0]!r}: {suggest(lacking[0], table.column_names)}")
        there = list_some(table.column_names, 20)
        raise DataError(f"{name} has no columns {list_some(map(repr, lacking))}; it has {there}")
    return table.select([column for column in keep or table.column_names if column not in drop])


def arrow_frame(table: Any, name: str, problems: Problems | None = None) -> Frame:
    """The columns of a pyarrow table; those without numbers or words raise or, given `problems`, are noted there."""
    noted = Problems() if problems is None else problems
    arrays = {}
    for column, values in zip(table.column_names, table.columns, strict=True):
        with noted.noted():
            arrays[column] = _array(values, column, name)
    if problems is None:
        noted.raise_any()
    return Frame(name, arrays)


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


def _read_csv(
    path: Path, words: Collection[str], na_values: Sequence[str], delimiter: str | None, as_text: bool
) -> Any:
    csv, pa = import_optional("pyarrow.csv", "reading CSV files"), import_optional("pyarrow", "reading tables")
    default = next((DELIMITERS[suffix] for suffix in path.suffixes[-2:] if suffix in DELIMITERS), None)
    if path.is_dir() or (default is None and delimiter is None):
        raise DataError(f"{path}: expected a .csv, .tsv or .parquet file (CSV may be compressed as .gz)")
    uneven: list[str] = []

    def note(row: Any) -> str:
        uneven.append(f"{row.text[:40]!r} has {row.actual_columns}")
        expected[0] = row.expected_columns
        return "skip"

    expected = [0]
    parse = csv.ParseOptions(delimiter=delimiter or default, invalid_row_handler=note)
    options = csv.ConvertOptions(column_types=dict.fromkeys(words, pa.string()), strings_can_be_null=True)
    options.null_values = [*options.null_values, *na_values]
    try:
        if as_text:
            with csv.open_csv(str(path), parse_options=parse) as reader:
                options.column_types = dict.fromkeys(reader.schema.names, pa.string())
            options.strings_can_be_null = False
            uneven.clear()
        read = csv.read_csv(str(path), convert_options=options, parse_options=parse)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path} can't be read as CSV ({error}); expected a header and rows of equal length; set delimiter=… if "
            "it is not a comma"
        ) from error
    if uneven:
        raise DataError(
            f"{path} can't be read as CSV: the header has {expected[0]} columns, but {list_some(uneven)}; correct "
            "these rows, or set delimiter=… if it is not a comma"
        )
    return read


def _word(value: object) -> str:
    """A category as text: integers without a decimal point, booleans as in JSON.

    >>> _word(3.0), _word(True), _word("red")
    ('3', 'true', 'red')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
