"""How shifts and attacks were measured, in words: on how many rows, and how strong; by model if they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from bayesify.lab.comparison.table import Comparison
from bayesify.lab.report.verdict import join_words

OPTIONS = {"epsilon": "epsilon", "steps": "steps", "step_size": "step size", "samples": "draws"}
"""The options of an attack in `metrics.json`, and in words."""
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class MeasurementConditions:
    """How strong attacks were, and how many rows were attacked or shifted."""

    comparison: Comparison

    @cached_property
    def known(self) -> dict[str, list[Metrics]]:
        """The metrics of each model's runs on the split."""
        return {row.name: [run.metrics[self.comparison.split] for run in row.runs] for row in self.comparison.rows}

    def shift(self) -> str:
        """The number of rows that shifts were measured on, if it is known."""
        return self._in_words(lambda run: _rows(run.get("shift_rows"), run))

    def attacks(self) -> list[str]:
        """Each attack with its strength and the number of rows."""
        every = chain(*(run.get("attack", {}) for runs in self.known.values() for run in runs))
        return [f"{name}: {', '.join(self._attack(name))}" for name in dict.fromkeys(every)]

    def _attack(self, name: str) -> list[str]:
        def of(key: str) -> Callable[[Metrics], str | None]:
            return lambda run: None if (value := run.get("attack", {}).get(name, {}).get(key)) is None else f"{value:g}"

        options = [f"{words} {value}" for key, words in OPTIONS.items() if (value := self._in_words(of(key)))]
        rows = self._in_words(lambda run: _rows(run.get("attack", {}).get(name, {}).get("n"), run))
        return [*options, f"on {rows}"] if rows else options

    def _in_words(self, value: Callable[[Metrics], str | None]) -> str:
        """A value, or each value with its models if they differ; empty if no run has it."""
        found: dict[str, dict[str, None]] = {}
        for name, runs in self.known.items():
            for words in filter(None, map(value, runs)):
                found.setdefault(words, {})[name] = None
        if len(found) < 2:
            return "".join(found)
        return join_words([f"{words} ({join_words(list(names))})" for words, names in found.items()])


def _rows(some: int | None, run: Metrics) -> str | None:
    if some is None:
        return None
    return f"all {some:,} rows" if some >= run["n"] else f"{some:,} of the {run['n']:,} rows"
