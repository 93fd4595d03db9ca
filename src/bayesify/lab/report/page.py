"""`write_report`: put the report's page together, and write it with its files."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

import bayesify as by
from bayesify.lab.comparison.columns import REALS
from bayesify.lab.comparison.find_runs import group_by_model
from bayesify.lab.comparison.row import Row
from bayesify.lab.comparison.table import CompareError, Comparison
from bayesify.lab.report.abstention import MOST_REFERRED, Thresholds
from bayesify.lab.report.classes import ClassErrors
from bayesify.lab.report.data_description import DataDescription, data_name
from bayesify.lab.report.figures.model_figures import ModelFigures, risk_figure_of
from bayesify.lab.report.figures.page_figure import File
from bayesify.lab.report.figures.shift_figures import ShiftFigures
from bayesify.lab.report.figures.style import VARIABLES, line_style
from bayesify.lab.report.figures.training_curves import training_curves
from bayesify.lab.report.headline import error_probability, recommendation
from bayesify.lab.report.least_and_most_certain import Gallery
from bayesify.lab.report.measurement_conditions import MeasurementConditions
from bayesify.lab.report.tables import Table, breaks, direction, table
from bayesify.lab.report.verdict import best_row, join_words, required_mean, verdict_sentences
from bayesify.lab.run_files import write_file
from bayesify.lab.runs import Run

DASHES = {"-": "none", "--": "6 3", "-.": "7 3 2 3", ":": "2 3"}
"""The dash patterns of matplotlib's line styles, for the legend in HTML."""
GENERATOR = '<meta name="generator" content="bayesify'
"""The mark of a page that was written by `write_report`."""


def write_report(
    models: Comparison | Sequence[Run],
    path: str | Path,
    *,
    target_accuracy: float | None = None,
    error_costs: Sequence[float] = (),
) -> None:
    """Write a page about one or more models, in words, tables and figures.

    The page is a single file that works offline. Each figure is also written as PNG, and its data as CSV, to a folder
    beside the page: `report_files` for `report.html`. Files in it that an earlier report left and that this one does
    not have are removed.

    Args:
        models: A comparison, or evaluated runs on the same data. Runs in folders `NAME/seed-0`, `NAME/seed-1`, … count
            as one model; figures show the rows of all its runs.
        path: The page to write, such as `report.html`.
        target_accuracy: The accuracy to reach by referring the least certain cases to a person, such as 0.98; by
            default the first round one above the model's own that the rows can show.
        error_costs: How many referrals an error costs as much as; for each, the page has the cheapest threshold.

    Raises:
        CompareError: If the runs differ in data or seeds, some are not evaluated, or an option is out of range.
    """
    if target_accuracy is not None and not 0 < target_accuracy < 1:
        raise CompareError(f"target_accuracy={target_accuracy!r}: expected a share between 0 and 1, such as 0.98")
    for cost in error_costs:
        if not 0 < cost < math.inf:
            raise CompareError(f"error_costs has {cost!r}: expected numbers above 0, such as 20")
    comparison = models if isinstance(models, Comparison) else Comparison.of(group_by_model(models))
    contents = _contents(comparison, target_accuracy, error_costs)
    page = Environment(
        loader=PackageLoader("bayesify.lab.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page.filters["breaks"] = breaks
    text = page.get_template("report.html.jinja").render(contents)
    path, files = Path(path), list(_files(contents))
    folder = path.with_name(f"{path.stem}_files")
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        write_file(folder / file.name, file.content)
    for name in _earlier_files(path) - {file.name for file in files}:
        (folder / name).unlink(missing_ok=True)
    write_file(path, text)


def _contents(comparison: Comparison, target: float | None, costs: Sequence[float]) -> dict[str, Any]:
    for row in comparison.rows:
        for column in comparison.columns[:3]:
            required_mean(row, column)
    best = best_row(comparison)
    models = [ModelFigures(i, row, comparison.split) for i, row in enumerate(comparison.rows)]
    best_first = sorted(models, key=lambda model: model.row is not best)
    sets = [name for name in models[0].ood_sets if all(name in model.ood_sets for model in models)]
    shifts, conditions, is_classes = ShiftFigures(comparison), MeasurementConditions(comparison), models[0].is_classes
    galleries = [Gallery.of(model.index, model.row, comparison.split) for model in best_first]
    risk = error_probability(comparison)
    return {
        "title": f"{data_name(comparison.rows[0].runs[0])}: {join_words([row.name for row in comparison.rows])}",
        "data_name": data_name(comparison.rows[0].runs[0]),
        "recommendation": recommendation(comparison, best_first[0], target),
        "verdict": verdict_sentences(comparison) if len(models) > 1 else [],
        "comparison": comparison,
        "is_classes": is_classes,
        "tables": _tables(comparison, sets),
        "comparison_file": File("comparison.csv", comparison.csv().encode()),
        "data": DataDescription.of(comparison),
        "class_errors": list(filter(None, [ClassErrors.of(model) for model in best_first])),
        "sets": sets,
        "calibration": [model.calibration() for model in models],
        "risk": risk_figure_of(models),
        "thresholds": [Thresholds.of(model, target, costs, risk) for model in best_first]
        if models[0].has_one_answer
        else [],
        "uncertainty": [model.uncertainty() for model in models] if sets else [],
        "shifts": shifts.parts() if shifts.kinds else [],
        "every_corruption": shifts.every_corruption() if shifts.kinds else [],
        "shifted_rows": conditions.shift(),
        "attacks": conditions.attacks(),
        "galleries": list(filter(None, galleries)),
        "training": list(filter(None, [training_curves(model.index, model.row) for model in models])),
        "about": [_run_details(row) for row in comparison.rows],
        "lines": [_legend_line(i, row) for i, row in enumerate(comparison.rows)],
        "variables": VARIABLES,
        "palette": {variable: colour for colour, variable in VARIABLES.items()},
        "direction": direction,
        "most_referred": f"{MOST_REFERRED:.0%}",
        "version": by.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _legend_line(i: int, row: Row) -> tuple[str, str, str]:
    """The name, the colour and the dash pattern of a model's line."""
    style = line_style(i)
    return row.name, style["color"], DASHES[style["linestyle"]]


def _tables(comparison: Comparison, sets: Sequence[str]) -> dict[str, Table | None]:
    """The tables of the page by their place."""
    names = {
        "calibration": "Calibration in numbers",
        "conformal": "Conformal intervals" if comparison.columns[0] in REALS else "Conformal sets",
        "selective": "Selective prediction in numbers",
        "uncertainty": f"Uncertainty on the {comparison.split} split",
        "ood": "Out-of-distribution detection in numbers",
        **{f"ood_{name}": f"All scores: {name}" for name in sets},
        "shift": "Common corruptions in numbers",
        "attack": "Attacks in numbers",
        "cost": "Cost",
    }
    return {"all": Table.of(comparison, "all", "All models", comparison.columns)} | {
        group: table(comparison, group, name) for group, name in names.items()
    }


def _files(contents: dict[str, Any]) -> Iterator[File]:
    """All files that the page offers for download."""
    yield contents["comparison_file"]
    shift_figures = [figure for _, figures in contents["shifts"] for figure in figures]
    figures = ("calibration", "uncertainty", "every_corruption", "training", "class_errors", "thresholds", "galleries")
    for each in (contents["risk"], *shift_figures, *(each for name in figures for each in contents[name])):
        yield from each.files


def _earlier_files(path: Path) -> set[str]:
    """The files of an earlier report at the same path; none if the page there is not a report."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return set(re.findall(r'download="([\w-]+\.(?:png|csv))"', text, re.ASCII)) if GENERATOR in text else set()


def _run_details(row: Row) -> dict[str, Any]:
    """When and with what a model's runs were trained, the recipe of the first, and which layers were converted."""
    run = row.runs[0]
    recipe = yaml.safe_dump(run.recipe.plain(), sort_keys=False, allow_unicode=True)
    conversion = "" if not row.is_bayesian or not run.model_file.exists() else str(by.summary(run.load().model))
    facts = run.facts
    versions = [f"{name} {version}" for name, version in facts.get("versions", {}).items() if version]
    return {
        "name": row.name,
        "folder": str(run.folder),
        "recipe": recipe,
        "conversion": conversion,
        "began": [str(each.facts.get("began", "")) for each in row.runs],
        "versions": join_words([*versions, *([f"on {facts['platform']}"] if facts.get("platform") else [])]),
    }
