"""The page about one or more runs: what is on it, and its files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

import bayesify as by
from bayesify.lab.comparison import Comparison, Row
from bayesify.lab.gathering import grouped
from bayesify.lab.report.claims import best_claim, claim
from bayesify.lab.report.conditions import Conditions
from bayesify.lab.report.figures import VARIABLES, look
from bayesify.lab.report.gallery import Gallery
from bayesify.lab.report.models import Model, risk_picture
from bayesify.lab.report.picture import File, Picture
from bayesify.lab.report.shifts import Shifts
from bayesify.lab.report.tables import Table, any_intervals, breaks, direction, table
from bayesify.lab.report.verdict import best_row, sentences
from bayesify.lab.runs import Run

DASHES = {"-": "none", "--": "6 3", "-.": "7 3 2 3", ":": "2 3"}
"""The dashes of lines in the page's own legend."""
GENERATOR = '<meta name="generator" content="bayesify'
"""What tells a page that was written here from others."""


def write_report(models: Comparison | Sequence[Run], path: str | Path) -> None:
    """Write a page that says in words, numbers and figures how good the models are.

    Runs in folders `NAME/seed-0`, `NAME/seed-1`, … are one model; figures have the rows of all its runs. The page needs
    nothing beside it. Each figure is also written as PNG and its data as CSV: beside report.html into `report_files`,
    from which goes what an earlier page at the same path has left and this one does not have.
    """
    contents = _contents(models if isinstance(models, Comparison) else Comparison.of(grouped(models)))
    page = Environment(
        loader=PackageLoader("bayesify.lab.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page.filters["breaks"] = breaks
    text = page.get_template("report.html.jinja").render(contents)
    path, files = Path(path), list(_files(contents))
    folder = path.with_name(f"{path.stem}_files")
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        _write(folder / file.name, file.content)
    for name in _offered(path) - {file.name for file in files}:
        (folder / name).unlink(missing_ok=True)
    _write(path, text.encode())


def _contents(comparison: Comparison) -> dict[str, Any]:
    models = [Model(i, row, comparison.split) for i, row in enumerate(comparison.rows)]
    sets = [name for name in models[0].strange if all(name in model.strange for model in models)]
    shifts, conditions, best = Shifts(comparison), Conditions(comparison), best_row(comparison)
    galleries = [Gallery.of(i, row, comparison.split) for i, row in enumerate(comparison.rows)]
    return {
        "title": f"{comparison.rows[0].runs[0].recipe.data.name}: {', '.join(row.name for row in comparison.rows)}",
        "claim": best_claim(comparison, sets),
        "claims": [claim(row, comparison, sets) for row in comparison.rows if row is not best],
        "verdict": sentences(comparison),
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
        "shifted_rows": conditions.shift(),
        "attacks": conditions.attacks(),
        "galleries": sorted(filter(None, galleries), key=lambda gallery: gallery.name != best.name),
        "about": [_about(row) for row in comparison.rows],
        "lines": [(row.name, look(i)["color"], DASHES[look(i)["linestyle"]]) for i, row in enumerate(comparison.rows)],
        "variables": VARIABLES,
        "palette": {variable: colour for colour, variable in VARIABLES.items()},
        "direction": direction,
        "any_intervals": any_intervals,
        "version": by.__version__,
    }


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


def _offered(path: Path) -> set[str]:
    """The files of an earlier page; none of a page that was not written here."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return set(re.findall(r'download="([\w-]+\.(?:png|csv))"', text, re.ASCII)) if GENERATOR in text else set()


def _about(row: Row) -> dict[str, str]:
    """A model's first run: its recipe and what was converted."""
    run = row.runs[0]
    recipe = yaml.safe_dump(run.recipe.plain(), sort_keys=False, allow_unicode=True)
    conversion = "" if not row.is_bayesian or not run.model_file.exists() else str(by.summary(run.load().model))
    return {"name": row.name, "folder": str(run.folder), "recipe": recipe, "conversion": conversion}


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)
