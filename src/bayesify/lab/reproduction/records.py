"""What is known of an experiment: a JSON line for every network that was trained and measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.parts import Part
from bayesify.lab.reproduction.errors import ReproductionError
from bayesify.lab.reproduction.experiment import Measured
from bayesify.lab.run_files import write_file

DIGITS = 6


@dataclass(frozen=True)
class Record:
    """One network: where it belongs, what it was trained by, and what was measured.

    `recipe` is a digest of the recipe, and of the seeds that were trained side by side: a line whose recipe is not that
    of the experiment any more is not used. `failed` is the reason why there are no measures.
    """

    setting: str
    row: str
    seed: int
    recipe: str
    seconds: float
    measures: Measured = field(default_factory=dict)
    failed: str = ""

    @property
    def place(self) -> tuple[str, str, int]:
        """What it is the result of."""
        return self.setting, self.row, self.seed

    def line(self) -> str:
        """The record as a line."""
        values = {key: value for key, value in vars(self).items() if value not in ("", {})}
        return json.dumps(values, ensure_ascii=False)


def rounded(measured: Measured) -> Measured:
    """The measures as they are written."""
    return {name: {key: round(value, DIGITS) for key, value in values.items()} for name, values in measured.items()}


@dataclass
class Records:
    """The records of an experiment, in a file that is replaced as a whole by every new one."""

    file: Path
    known: dict[tuple[str, str, int], Record]

    @classmethod
    def read(cls, file: Path) -> Records:
        """Read a file; none is empty."""
        known: dict[tuple[str, str, int], Record] = {}
        for number, line in enumerate(file.read_text().splitlines() if file.exists() else [], start=1):
            try:
                record = Record(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ReproductionError(
                    f"{file}, line {number}: not a result ({error}); delete the line, and its network is trained again"
                ) from None
            known[record.place] = record
        return cls(file, known)

    def add(self, found: Sequence[Record]) -> None:
        """Keep new records."""
        self.known |= {record.place: record for record in found}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.file, "".join(f"{record.line()}\n" for record in self.known.values()))

    def has(self, setting: str, row: str, seed: int, digest: str) -> bool:
        """Whether this network is known, trained by the same recipe."""
        record = self.known.get((setting, row, seed))
        return record is not None and record.recipe == digest


def digest(recipe: Recipe, together: Sequence[int | str] = ()) -> str:
    """A short name of a recipe, whose values it depends on, and of the seeds or the base that it is trained with.

    Options that have their usual values are left out, so that results outlive the addition of an option.
    """
    known = {name: _unusual(getattr(recipe, name), value) for name, value in recipe.plain().items()}
    usual = {name: field.get_default(call_default_factory=True) for name, field in Recipe.model_fields.items()}
    known = {name: value for name, value in known.items() if value != usual[name]}
    text = json.dumps({"recipe": known, "together": list(together)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _unusual(part: Any, values: Any) -> Any:
    """The values of a part of a recipe other than its usual ones, and its name; anything else as it is."""
    if not isinstance(part, Part):
        return values
    usual = {name: field.get_default(call_default_factory=True) for name, field in type(part).model_fields.items()}
    return {name: value for name, value in values.items() if name == "name" or getattr(part, name) != usual[name]}
