"""Finished trials: one JSON line each, and each row's predictions in a file of their own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.defaults.measures import Rows
from benchmarks.defaults.trial import Trial

ROOT = Path(__file__).parents[2]
RUNS, LINES = ROOT / "runs" / "defaults", ROOT / "benchmarks" / "results" / "defaults.jsonl"
PRECISION = 6


def records() -> dict[Trial, dict[str, Any]]:
    """All finished trials."""
    lines = LINES.read_text().splitlines() if LINES.exists() else []
    found = [json.loads(line) for line in lines]
    return {Trial(**each.pop("trial")): each for each in found}


def add(trial: Trial, record: dict[str, Any], rows: Rows) -> None:
    """Keep a finished trial."""
    rows_file(trial).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(rows_file(trial), **rows)
    line = json.dumps({"trial": asdict(trial), **rounded(record)}, ensure_ascii=False)
    with LINES.open("a") as file:
        file.write(line + "\n")


def rows_of(trial: Trial) -> Rows | None:
    """Each row's predictions, if they are here."""
    if not rows_file(trial).exists():
        return None
    with np.load(rows_file(trial)) as file:
        return {name: file[name] for name in file.files}


def rows_file(trial: Trial) -> Path:
    """Where they are."""
    key = hashlib.sha256(json.dumps(asdict(trial), sort_keys=True).encode()).hexdigest()[:16]
    return RUNS / "rows" / f"{trial.task}-{trial.seed}-{key}.npz"


def rounded(value: Any) -> Any:
    """The same with numbers rounded."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, PRECISION) if isinstance(value, float) else value
