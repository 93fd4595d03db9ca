"""The data in words and numbers: rows by split, inputs, missing values, classes or the range of targets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesify.lab.comparison import Comparison
from bayesify.lab.data import Arrays, Columns, Images, Inputs, Series, inputs_from_dict, targets_from_dict
from bayesify.lab.report.verdict import join_words
from bayesify.lab.run_files import read_preprocessing
from bayesify.lab.runs import Run

MOST_NAMES = 30
"""Of more columns than this, only the first ones are named."""
MOST_CLASSES = 30
"""Of more classes, the most frequent ones and the rarest are shown, half as many each."""


@dataclass(frozen=True)
class DataDescription:
    """The data of a comparison, by its first run: with several seeds, the splits of others have other rows."""

    facts: tuple[tuple[str, str], ...]
    splits: tuple[str, ...]
    classes: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
    """Each class with its number of rows in each split, and in percent."""
    left_out: int
    """The number of classes that are not shown."""

    @classmethod
    def of(cls, comparison: Comparison) -> DataDescription | None:
        """The description; None if the run lacks its preprocessing."""
        run = comparison.rows[0].runs[0]
        if not (run.folder / "preprocessing.json").is_file():
            return None
        kept, known = read_preprocessing(run.folder / "preprocessing.json"), run.metrics.get("data", {})
        inputs, names = inputs_from_dict(kept["inputs"]), targets_from_dict(kept["targets"]).names
        rows: dict[str, int] = known.get("rows") or {comparison.split: run.metrics[comparison.split]["n"]}
        counts: dict[str, list[int]] = known.get("classes", {})
        facts = {
            "Data set": data_name(run),
            "Rows": join_words([f"{n:,} {split}" for split, n in rows.items()]),
            "Inputs": input_words(inputs),
            "Missing values": _missing(known, sum(rows.values())) if isinstance(inputs, Columns) else "",
            "Classes": f"{len(names)}" if counts else "",
            **_targets(known),
        }
        balance = [(name, tuple(_count(some, k) for some in counts.values())) for k, name in enumerate(names)]
        balance = [each for each in balance if counts]
        shown = _shortened(sorted(balance, key=lambda each: -each[1][0][0])) if len(balance) > MOST_CLASSES else balance
        return cls(
            tuple((name, words) for name, words in facts.items() if words),
            tuple(counts),
            tuple(shown),
            len(balance) - len(shown),
        )


def data_name(run: Run) -> str:
    """The name of the file or folder, or of the data set if it has none."""
    part = run.recipe.data
    return Path(part.path).name if part.path else part.name


def input_words(inputs: Inputs) -> str:
    """What an input is.

    >>> input_words(Images((3, 32, 32), (0.5,) * 3, (0.2,) * 3))
    'images of 32 × 32 pixels in 3 channels'
    """
    if isinstance(inputs, Images):
        channels, height, width = inputs.shape
        return f"images of {width} × {height} pixels in {channels} channel{'s' * (channels > 1)}"
    if isinstance(inputs, Columns):
        kinds = {"number": inputs.numeric, "category": inputs.categorical}
        return "; ".join(_columns(kind, names) for kind, names in kinds.items() if names)
    shape = " × ".join(map(str, inputs.raw_shape))
    return f"{_kind(inputs)} of {shape} numbers"


def _kind(inputs: Inputs) -> str:
    return {Arrays: "arrays", Series: "time series"}.get(type(inputs), type(inputs).__name__.lower())


def _columns(kind: str, names: tuple[str, ...]) -> str:
    plural = kind if len(names) == 1 else {"number": "numbers", "category": "categories"}[kind]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return f"{len(names)} column{'s' * (len(names) > 1)} of {plural} ({join_words([*names[:MOST_NAMES], *more])})"


def _missing(known: dict[str, Any], rows: int) -> str:
    if "missing" not in known:
        return ""
    each = [f"{name}: {count:,} ({100 * count / rows:.2g}%)" for name, count in known["missing"].items()]
    return "; ".join(each[:MOST_NAMES]) or "none"


def _targets(known: dict[str, Any]) -> dict[str, str]:
    return {
        f"Target {name}": f"{low:.4g} to {high:.4g} in the training rows, median {median:.4g}"
        for name, (low, median, high) in known.get("targets", {}).items()
    }


def _count(counts: list[int], k: int) -> tuple[int, str]:
    count = counts[k] if k < len(counts) else 0
    return count, f"{100 * count / max(sum(counts), 1):.2g}%"


def _shortened(balance: list[Any]) -> list[Any]:
    return [*balance[: MOST_CLASSES // 2], *balance[-MOST_CLASSES // 2 :]]
