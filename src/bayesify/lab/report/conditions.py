"""Under which conditions changed inputs were measured, in words; where models differ, by model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from bayesify.lab.comparison import Comparison
from bayesify.lab.report.verdict import listed

OPTIONS = {"epsilon": "epsilon", "steps": "steps", "step_size": "step size", "samples": "draws"}
"""What makes an attack strong, as `metrics.json` has it and in words."""
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Conditions:
    """How strong attacks were, and on how many rows they and shifts were measured."""

    comparison: Comparison

    @cached_property
    def known(self) -> dict[str, list[Metrics]]:
        """For each model the metrics of its runs on the split."""
        return {row.name: [run.metrics[self.comparison.split] for run in row.runs] for row in self.comparison.rows}

    def shift(self) -> str:
        """The rows of which shifts were measured, where it is known."""
        return self._told(lambda run: _rows(run.get("shift_rows"), run))

    def attacks(self) -> list[str]:
        """Each attack: its strength, and the rows that were attacked."""
        every = chain(*(run.get("attack", {}) for runs in self.known.values() for run in runs))
        return [f"{name}: {', '.join(self._attack(name))}" for name in dict.fromkeys(every)]

    def _attack(self, name: str) -> list[str]:
        def of(key: str) -> Callable[[Metrics], str | None]:
            return lambda run: None if (value := run.get("attack", {}).get(name, {}).get(key)) is None else f"{value:g}"

        options = [f"{words} {told}" for key, words in OPTIONS.items() if (told := self._told(of(key)))]
        rows = self._told(lambda run: _rows(run.get("attack", {}).get(name, {}).get("n"), run))
        return [*options, f"on {rows}"] if rows else options

    def _told(self, value: Callable[[Metrics], str | None]) -> str:
        """What a value is, or which it is for which models; nothing where no run has it."""
        found: dict[str, dict[str, None]] = {}
        for name, runs in self.known.items():
            for words in filter(None, map(value, runs)):
                found.setdefault(words, {})[name] = None
        if len(found) < 2:
            return "".join(found)
        return listed([f"{words} ({listed(list(names))})" for words, names in found.items()])


def _rows(some: int | None, run: Metrics) -> str | None:
    if some is None:
        return None
    return f"all {some:,} rows" if some >= run["n"] else f"{some:,} of the {run['n']:,} rows"
