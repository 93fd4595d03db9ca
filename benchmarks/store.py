"""Finished trials of a benchmark: one JSON line each, and each row's predictions in a file of their own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

ROOT = Path(__file__).parents[1]
PRECISION = 6
Rows = dict[str, np.ndarray]
Trial = TypeVar("Trial")


@dataclass(frozen=True)
class Store(Generic[Trial]):
    """The trials of one benchmark, which are frozen dataclasses of the type `kind`.

    Lines are committed; what is in the folder `runs`, which paired differences need, is not.
    """

    kind: type[Trial]
    lines: Path
    runs: Path

    @classmethod
    def named(cls, kind: type[Trial], name: str) -> Store[Trial]:
        """The store of the benchmark `name`, in benchmarks/results and runs."""
        return cls(kind, ROOT / "benchmarks" / "results" / f"{name}.jsonl", ROOT / "runs" / name)

    def records(self) -> dict[Trial, dict[str, Any]]:
        """All finished trials."""
        lines = self.lines.read_text().splitlines() if self.lines.exists() else []
        found = [json.loads(line) for line in lines]
        return {self.kind(**each.pop("trial")): each for each in found}

    def add(self, trial: Trial, record: dict[str, Any], rows: Rows) -> None:
        """Keep a finished trial."""
        self.rows_file(trial).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(self.rows_file(trial), **rows)  # type: ignore[arg-type]
        line = json.dumps({"trial": asdict(trial), **rounded(record)}, ensure_ascii=False)  # type: ignore[call-overload]
        with self.lines.open("a") as file:
            file.write(line + "\n")

    def rows_of(self, trial: Trial) -> Rows | None:
        """Each row's predictions, if they are here."""
        if not self.rows_file(trial).exists():
            return None
        with np.load(self.rows_file(trial)) as file:
            return {name: file[name] for name in file.files}

    def rows_file(self, trial: Trial) -> Path:
        """Where they are."""
        key: dict[str, Any] = asdict(trial)  # type: ignore[call-overload]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return self.runs / "rows" / f"{next(iter(key.values()))}-{key['seed']}-{digest}.npz"


def rounded(value: Any) -> Any:
    """The same with numbers rounded.

    >>> rounded({"nll": 0.12345678})
    {'nll': 0.123457}
    """
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, PRECISION) if isinstance(value, float) else value
