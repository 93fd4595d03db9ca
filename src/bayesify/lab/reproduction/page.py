"""The page of an experiment: claims and verdicts, the paper's figures beside ours, and every paired test."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bayesify.lab.comparison.columns import Column
from bayesify.lab.reproduction.experiment import Exhibit
from bayesify.lab.reproduction.figure import draw
from bayesify.lab.reproduction.verdict import PairedTest, Results, spread
from bayesify.lab.run_files import write_file


def write_page(results: Results, lines: Path) -> None:
    """Write the page, the same as JSON, and the figure, beside the file of lines."""
    write_file(lines.with_suffix(".json"), json.dumps(as_json(results), indent=1, ensure_ascii=False) + "\n")
    write_file(lines.with_suffix(".md"), markdown(results, lines.stem))
    if results.settings:
        draw(results, lines.with_suffix(".png"))


def as_json(results: Results) -> dict[str, Any]:
    """Verdicts, means, standard deviations and tests."""
    rows = {
        setting: {
            row: {column.key: _summary(list(cell.values())) for column, cell in _cells(results, setting, row)}
            for row in results.rows(setting)
        }
        for setting in results.settings
    }
    exhibits = [
        {
            "title": exhibit.title,
            "verdict": results.verdict(exhibit),
            "tests": [_test(test) for test in results.tests(exhibit)],
        }
        for exhibit in results.experiment.exhibits
    ]
    return {
        "experiment": results.experiment.name,
        "scale": results.scale,
        "verdict": results.overall,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu_seconds": round(sum(record.seconds for record in results.records)),
        "exhibits": exhibits,
        "rows": rows,
    }


def _cells(results: Results, setting: str, row: str) -> Iterator[tuple[Column, dict[int, float]]]:
    for column in results.experiment.columns:
        if cell := results.cell(setting, row, column.key):
            yield column, cell


def _summary(values: Sequence[float]) -> dict[str, Any]:
    mean, sd = spread(values)
    return {"mean": round(mean, 6), "sd": None if sd is None else round(sd, 6), "n": len(values)}


def _test(test: PairedTest) -> dict[str, Any]:
    known = test.seeds > 0
    return {
        **vars(test.expectation),
        "setting": test.setting,
        "seeds": test.seeds,
        "difference": round(test.difference, 6) if known else None,
        "margin": round(test.margin, 6) if test.seeds > 1 else None,
        "outcome": test.outcome,
    }


def markdown(results: Results, name: str) -> str:
    """The page."""
    return "\n".join(line for part in _parts(results, name) for line in part) + "\n"


def _parts(results: Results, name: str) -> Iterator[list[str]]:
    experiment = results.experiment
    scale = experiment.scale(results.scale)
    minutes = sum(record.seconds for record in results.records) / 60
    command = f"bayesify reproduce {experiment.name}" + (" --scale paper" if results.scale == "paper" else "")
    yield [f"# {experiment.name}", "", "| | claim | verdict |", "|---|---|---|"]
    yield [f"| {each.title} | {each.claim} | **{results.verdict(each)}** |" for each in experiment.exhibits]
    yield ["", scale.words, ""]
    yield [f"`{command}`, torch {torch.__version__}, {platform.machine()}: {minutes:.0f} minutes of one core so far."]
    missing = [each for each in scale.seeds if each not in results.settings]
    yield [f"Not run yet: {', '.join(missing)}."] if missing else []
    yield ["", f"![Every seed of every network]({name}.png)"] if results.settings else []
    for setting in results.settings:
        yield ["", f"## {setting}", "", *_table(results, setting)]
    for exhibit in experiment.exhibits:
        yield ["", f"## {exhibit.title}: {results.verdict(exhibit)}", "", *_tests(results, exhibit)]
    if failed := [record for record in results.records if record.failed]:
        yield ["", "## Networks that came to nothing", ""]
        yield [f"- {each.setting}, {each.row}, seed {each.seed}: {each.failed}" for each in failed]


def _table(results: Results, setting: str) -> Iterator[str]:
    """Our figures, mean ± sd, each followed by the paper's."""
    rows = results.rows(setting)
    columns = [
        column
        for column in results.experiment.columns
        if any(c is column for r in rows for c, _ in _cells(results, setting, r))
    ]
    published = {column.key: _published(results, setting, column) for column in columns}
    heads = [head for column in columns for head in [column.head, *(["paper"] if published[column.key] else [])]]
    counts = {row: max((len(cell) for _, cell in _cells(results, setting, row)), default=0) for row in rows}
    yield f"Mean ± sd over {' or '.join(map(str, sorted(set(counts.values()))))} seeds or splits."
    yield ""
    yield f"| | {' | '.join(heads)} |"
    yield f"|---|{'---:|' * len(heads)}"
    for row in rows:
        cells: list[str] = []
        for column in columns:
            cell = list(results.cell(setting, row, column.key).values())
            cells.append(figure(column, cell))
            cells += [published[column.key].get(row, "")] if published[column.key] else []
        yield f"| {row} | {' | '.join(cells)} |"


def _published(results: Results, setting: str, column: Column) -> dict[str, str]:
    """The paper's figures of one measure by row."""
    found: dict[str, str] = {}
    for exhibit in results.experiment.exhibits:
        for row, values in exhibit.published.get(setting, {}).items():
            if column.key in values:
                found[row] = values[column.key]
    return found


def figure(column: Column, values: Sequence[float]) -> str:
    """Mean ± sd of some values as a table shows them."""
    if not values:
        return "–"
    mean, sd = spread(values)
    return column.format(mean) + ("" if sd is None else f" ± {column.format(sd)}")


def _tests(results: Results, exhibit: Exhibit) -> Iterator[str]:
    if results.experiment.overlap:
        yield "Margins are those of resampled splits, which share rows (Nadeau and Bengio 2003), at 95%."
    else:
        yield "Margins are half the width of 95% intervals of paired differences."
    yield ""
    yield "| setting | expected | by | difference | n | |"
    yield "|---|---|---|---:|---:|---|"
    for test in results.tests(exhibit):
        column = results.experiment.column(test.expectation.measure)
        shown = f"{column.format(test.difference)} ± {column.format(test.margin)}" if test.seeds > 1 else "–"
        expected = f"{test.expectation.better} better than {test.expectation.worse}"
        yield f"| {test.setting} | {expected} | {column.head} | {shown} | {test.seeds} | {test.outcome} |"
