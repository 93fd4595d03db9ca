"""The page about one or more runs: what is on it, and its files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

import bayesify as by
from bayesify.lab.comparison import Comparison, Row
from bayesify.lab.gathering import grouped
from bayesify.lab.measures import rejected
from bayesify.lab.report.claims import best_claim, claim
from bayesify.lab.report.figures import VARIABLES, look
from bayesify.lab.report.gallery import Gallery
from bayesify.lab.report.models import Model, risk_picture
from bayesify.lab.report.picture import File, Picture
from bayesify.lab.report.shifts import Shifts
from bayesify.lab.report.tables import Table, any_intervals, direction, table
from bayesify.lab.report.verdict import best_row, sentences
from bayesify.lab.runs import Run

DASHES = {"-": "none", "--": "6 3", "-.": "7 3 2 3", ":": "2 3"}
"""The dashes of lines in the page's own legend."""


def write_report(models: Comparison | Sequence[Run], path: str | Path) -> None:
    """Write a page that says in words, numbers and figures how good the models are.

    Runs in folders `NAME/seed-0`, `NAME/seed-1`, … are one model; figures have the rows of all its runs. The page needs
    nothing beside it. Each figure is also written as PNG and its data as CSV: beside report.html into `report_files`.
    """
    contents = _contents(models if isinstance(models, Comparison) else Comparison.of(grouped(models)))
    page = Environment(
        loader=PackageLoader("bayesify.lab.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    path = Path(path)
    folder = path.with_name(f"{path.stem}_files")
    folder.mkdir(parents=True, exist_ok=True)
    for file in _files(contents):
        _write(folder / file.name, file.content)
    _write(path, page.get_template("report.html.jinja").render(contents).encode())


def _contents(found: Comparison) -> dict[str, Any]:
    models = [Model(i, row, found.split) for i, row in enumerate(found.rows)]
    sets = [name for name in models[0].strange if all(name in model.strange for model in models)]
    comparison = _with_rejected(found, models, sets)
    headline, *details = sentences(comparison)
    shifts, best = Shifts(comparison), best_row(comparison)
    galleries = [Gallery.of(i, row, found.split) for i, row in enumerate(comparison.rows)]
    return {
        "title": f"{comparison.rows[0].runs[0].recipe.data.name}: {', '.join(row.name for row in comparison.rows)}",
        "claim": best_claim(comparison, sets),
        "claims": [claim(row, comparison, sets) for row in comparison.rows if row is not best],
        "verdict": [headline, *details],
        "comparison": comparison,
        "is_classes": models[0].is_classes,
        "tables": _tables(comparison, sets),
        "figures_file": File("comparison.csv", comparison.csv().encode()),
        "sets": sets,
        "calibration": [model.calibration() for model in models],
        "risk": risk_picture(models),
        "uncertainty": [model.uncertainty() for model in models] if sets else [],
        "shifts": shifts.parts() if shifts.kinds else [],
        "every_corruption": shifts.every_corruption() if shifts.kinds else [],
        "attacks": _attacks(comparison),
        "galleries": sorted(filter(None, galleries), key=lambda gallery: gallery.name != best.name),
        "about": [_about(row) for row in comparison.rows],
        "lines": [(row.name, look(i)["color"], DASHES[look(i)["linestyle"]]) for i, row in enumerate(comparison.rows)],
        "variables": VARIABLES,
        "palette": {variable: colour for colour, variable in VARIABLES.items()},
        "direction": direction,
        "any_intervals": any_intervals,
        "version": by.__version__,
    }


def _with_rejected(comparison: Comparison, models: Sequence[Model], sets: Sequence[str]) -> Comparison:
    """With the share of each strange set that is noticed at 5% false alarms, which is counted here from the rows."""
    rows = tuple(
        replace(model.row, figures={**model.row.figures} | {rejected(name).key: model.rejected(name) for name in sets})
        for model in models
    )
    known = comparison.groups.get("ood", ())
    columns = [[c for c in known if c.over == name] + [rejected(name)] for name in sets]
    groups = {**comparison.groups, "ood": tuple(column for some in columns for column in some)}
    return replace(comparison, rows=rows, groups=groups)


def _tables(comparison: Comparison, sets: Sequence[str]) -> dict[str, Table | None]:
    """Tables by where they stand."""
    names = {
        "calibration": "Calibration in numbers",
        "selective": "Declining in numbers",
        "uncertainty": f"Uncertainty on the {comparison.split} split",
        "ood": "Strange inputs in numbers",
        **{f"ood_{name}": f"Every score: {name}" for name in sets},
        "shift": "Corrupted inputs in numbers",
        "attack": "Attacks in numbers",
        "cost": "What it costs",
    }
    return {"all": Table("all", "All models", comparison.columns)} | {
        group: table(comparison, group, name) for group, name in names.items()
    }


def _attacks(comparison: Comparison) -> list[str]:
    """How strong each attack was, as the first run has it."""
    found = comparison.rows[0].runs[0].metrics[comparison.split].get("attack", {})
    options = ("epsilon", "steps", "step_size")
    return [
        f"{name}: {', '.join(f'{key} {values[key]:g}' for key in options if values.get(key) is not None)}"
        for name, values in found.items()
    ]


def _files(contents: dict[str, Any]) -> Iterator[File]:
    """Everything that the page offers."""
    yield contents["figures_file"]
    shifted = [picture for _, pictures in contents["shifts"] for picture in pictures]
    pictures: list[Picture] = [
        *contents["calibration"],
        contents["risk"],
        *contents["uncertainty"],
        *shifted,
        *contents["every_corruption"],
    ]
    for each in (*pictures, *contents["galleries"]):
        yield from each.files


def _about(row: Row) -> dict[str, str]:
    """A model's first run: its recipe and what was converted."""
    run = row.runs[0]
    recipe = yaml.safe_dump(run.recipe.plain(), sort_keys=False, allow_unicode=True)
    conversion = "" if row.is_plain or not run.model_file.exists() else str(by.summary(run.load().model))
    return {"name": row.name, "folder": str(run.folder), "recipe": recipe, "conversion": conversion}


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)
