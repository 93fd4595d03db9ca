"""Read and write the JSON files of a run, and check that they have the form in which they are written.

A run may come from elsewhere, and files get damaged: each error names the file, what is wrong and what to do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bayesify.errors import BayesifyError


class RunError(BayesifyError):
    """A run's folder that can't be used as asked."""


class _Entries(BaseModel):
    """Entries of a JSON file; more than these may be there."""

    model_config = ConfigDict(extra="allow", strict=True)


Finite = Annotated[float, Field(allow_inf_nan=False)]
Numbers = dict[str, float | None]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
Level = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(e-?\d+)?$")]
"""A number as the key of an object: a share of the rows, or the intensity of a shift."""


class _Facts(_Entries):
    """The contents of `run.json`."""

    status: str
    began: str = ""
    seconds: Annotated[Finite, Field(ge=0)] | None = None
    versions: dict[str, str | None] = {}


class _Detection(_Entries):
    """How well a score detects out-of-distribution inputs."""

    auroc: float | None = None
    average_precision: float | None = None
    fpr95: float = 1.0
    interval: dict[str, Interval] = {}


class _Shift(_Entries):
    """The metrics on shifted inputs of one kind and intensity."""

    accuracy: float
    __pydantic_extra__: dict[str, float | None]


class _Attack(_Entries):
    """The metrics under an attack."""

    clean_accuracy: float
    robust_accuracy: float
    average_precision: Numbers = {}
    epsilon: float | None = None
    steps: float | None = None
    step_size: float | None = None
    samples: float | None = None
    n: int | None = None


class _Split(_Entries):
    """The metrics of one split; those without a place here are numbers."""

    n: Annotated[int, Field(ge=0)]
    draws: float = 1
    interval: dict[str, Interval | dict[str, Interval]] = {}
    ood: dict[str, dict[str, _Detection | None]] = {}
    accuracy_at: dict[Level, float | None] = {}
    buckets: list[float | None] = []
    accuracy_at_epistemic: dict[Level, float | None] = {}
    buckets_epistemic: list[float | None] = []
    shift: dict[str, Annotated[dict[Level, _Shift], Field(min_length=1)]] = {}
    corrupted: Numbers = {}
    attack: dict[str, _Attack] = {}
    __pydantic_extra__: dict[str, float | None]


class _Threshold(_Entries):
    """The score above which the model abstains, or would by its total uncertainty."""

    value: Finite
    by: str = ""
    split: str = ""
    share: Finite = 0.0


class _Parameters(_Entries):
    base: int
    added: int


class _Description(_Entries):
    """What the data are."""

    rows: dict[str, int] = {}
    missing: dict[str, int] = {}
    classes: dict[str, list[int]] = {}
    targets: dict[str, Annotated[list[float], Field(min_length=3, max_length=3)]] = {}


class _Metrics(_Entries):
    """The contents of `metrics.json`; a split that was not measured is missing."""

    train: _Split = None  # type: ignore[assignment]  # may be missing, but not null
    validation: _Split = None  # type: ignore[assignment]  # may be missing, but not null
    test: _Split = None  # type: ignore[assignment]  # may be missing, but not null
    threshold: _Threshold | None = None
    abstain: _Threshold = None  # type: ignore[assignment]  # may be missing, but not null
    overhead: float = 0.0
    parameters: _Parameters | None = None
    draws: float = 1
    data: _Description = _Description()


class _Preprocessing(_Entries):
    """The contents of `preprocessing.json`; inputs and targets have checks of their own."""

    inputs: dict[str, Any]
    targets: dict[str, Any]
    precision: Annotated[Finite, Field(gt=0)] | Annotated[str, Field(pattern="^input$")] | None = None
    precision_factor: Annotated[Finite, Field(gt=0)] = 1.0
    temperature: Annotated[Finite, Field(gt=0)] = 1.0


def read_facts(path: Path) -> dict[str, Any]:
    """The contents of `run.json`."""
    return _checked(path, _Facts, "the run can't be used without it; train it again, or get the file from its source")


def read_metrics(path: Path) -> dict[str, Any]:
    """The contents of `metrics.json`."""
    return _checked(path, _Metrics, f"delete it, then run `bayesify evaluate {path.parent}`")


def read_preprocessing(path: Path) -> dict[str, Any]:
    """The contents of `preprocessing.json`."""
    return _checked(path, _Preprocessing, "train the run again, or get the file from its source")


def _checked(path: Path, form: type[BaseModel], remedy: str) -> dict[str, Any]:
    values = read_json(path)
    try:
        form.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise RunError(f"{path}: {where}: {first['msg'].lower()}; the file was edited or damaged: {remedy}") from None
    return values


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    if not path.is_file():
        raise RunError(f"{path}: no such file")
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, no UTF-8, or a number of many digits
        raise RunError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(values, dict):
        raise RunError(f"{path}: expected an object, {{…}}; got {type(values).__name__}")
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_file(path, json.dumps(values, indent=1) + "\n")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically, and never through a symbolic link."""
    part = path.with_name(f"{path.name}.part")
    with open_new(part) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)


def open_new(path: Path) -> BinaryIO:
    """Create a file and open it for writing; a file or a symbolic link in its place is removed, not written to.

    Args:
        path: The file, often a temporary one that takes the place of another once it is complete.

    Returns:
        The open file.
    """
    path.unlink(missing_ok=True)
    return path.open("xb")  # fails if there is a link again, wherever that leads
