"""The results of benchmarks/faults.py as a file, a page, and the table of docs/reliability.md."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "reliability.md"
MARKS = "<!-- written by benchmarks/faults.py: start -->", "<!-- written by benchmarks/faults.py: end -->"


def write(results: dict[str, Any]) -> None:
    """Write the file, its page and the table of the documentation."""
    results["trials"].sort(key=lambda row: (results["kinds"].index(row["kind"]), row["trial"]))
    rows = ",\n  ".join(json.dumps(row) for row in results["trials"])
    facts = [f' "{key}": {json.dumps(value)},' for key, value in results.items() if key != "trials"]
    text = "\n".join(["{", *facts, ' "trials": [', f"  {rows}", " ]", "}", ""])
    replace_file(RESULTS, text)
    replace_file(RESULTS.with_suffix(".md"), page(results))
    if PAGE.exists():
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
        replace_file(PAGE, before + MARKS[0] + "\n" + table(results) + MARKS[1] + rest.split(MARKS[1])[1])


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def table(results: dict[str, Any]) -> str:
    """A line for each kind of trial, and the sums."""
    lines = ["| fault | trials | interruptions | same final model | other model | lost | other problems |"]
    lines.append("|---|---|---|---|---|---|---|")
    rows = results["trials"]
    for name in (*results["kinds"], "all"):
        some = [row for row in rows if name in (row["kind"], "all")]
        if some:
            outcomes = [sum(row["outcome"] == each for row in some) for each in ("same", "different", "lost")]
            other = sum(row["outcome"] == "same" and bool(row["problems"]) for row in some)
            interruptions = sum(row["interruptions"] for row in some)
            lines.append(f"| {name} | {' | '.join(str(n) for n in (len(some), interruptions, *outcomes, other))} |")
    return "\n".join(lines) + "\n"


def page(results: dict[str, Any]) -> str:
    """benchmarks/results/faults.md."""
    rows = results["trials"]
    stages: dict[str, int] = {}
    for row in rows:
        for stage in row["at"]:
            stages[stage] = stages.get(stage, 0) + 1
    said: dict[str, str] = {}
    for row in rows:
        said.setdefault(row["kind"], row.get("said", ""))
    problems = [f"- {row['kind']} {row['trial']}: {text}" for row in rows for text in row["problems"]]
    return "\n".join(
        [
            "# Interrupted training\n",
            f"Written by `python -m benchmarks.faults`, with {results['setup']}.\n",
            table(results),
            "Where interruptions came: " + ", ".join(f"{stage} {count}" for stage, count in stages.items()) + ".\n",
            "What was said:\n",
            *(f"- {kind}: `{' '.join(text.split())}`" for kind, text in said.items() if text),
            "",
            *(["Problems:\n", *problems] if problems else ["There were no problems."]),
            "",
        ]
    )
