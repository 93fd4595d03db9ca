"""`predict_files`: predict new inputs from files, and write a table as CSV or Parquet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.conformal import conformal_columns, rule_for
from bayesify.lab.data import Columns, Examples, Inputs, Masks, Reals, Targets
from bayesify.lab.data.errors import import_optional
from bayesify.lab.data.files import existing_path
from bayesify.lab.data.frame import read_arrow
from bayesify.lab.data.spreadsheets import safe_cell
from bayesify.lab.evaluation.abstention import abstention_level
from bayesify.lab.familiarity import made_up_values, odd_columns, reasons
from bayesify.lab.metrics import INTERVAL, scores
from bayesify.lab.metrics.several_answers import row_mean
from bayesify.lab.run_files import open_new
from bayesify.lab.runs import Run, RunError
from bayesify.lab.trained import Trained
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression

MOST_CLASSES = 20
"""With more classes than this, the table has no column for the probability of each class."""
FORMATS = (".csv", ".parquet")
PLAIN = (str, bool, int, float, date, type(None))
"""The types of values that are written to CSV files as they are; a datetime is a date."""


def predict_files(
    run: Run,
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    samples: int | None = None,
    coverage: float | None = None,
    abstain: float | None = None,
    score: str | None = None,
) -> int:
    """Predict new inputs from files and folders, and write a table with a row for each input.

    The first column, `input`, names the file and the row. Of a table, all columns follow as they are written there; one
    whose name a column of the prediction has gets `input_` in front, as `input_label`.

    For classes the columns are `label`, its `probability`, `entropy` and its parts `aleatoric` and `epistemic` in nats,
    and, for up to 20 classes, the probability `p_CLASS` of each. For real targets they are `mean`, `std` and its parts
    `aleatoric_std` and `epistemic_std`, and the ends `low` and `high` of the central 90% interval, all in the target's
    own units; with several targets, column names end in the target's name. For several labels, `labels` has those that
    are more probable than not, separated by "; ", and `p_LABEL` the probability of each. For a class of each pixel
    there is the share of the pixels of each class, `share_CLASS`, and `table.masks.npz` beside `table.csv` has the
    arrays `label`, `entropy` and `epistemic` (inputs, height, width). Uncertainties are then means over labels or
    pixels.

    The column `familiarity` is the share of held-out inputs that are less familiar, and `score` how little to trust a
    row: its doubt, or the score of `evaluation.abstain_by`. The column `abstain` is true if that is above the threshold
    in the run's metrics.json, which the share `evaluation.abstain` of the validation inputs exceeded, if a column of a
    table is out of its range, or if a value is missing or a category unknown that training rows always had. The column
    `why` says why: `ambiguous`, `models disagree`, `unfamiliar`, `column income out of range`, `column age has no
    number`, `column city has an unknown category`.

    If the run has calibration rows, `conformal_set` has the classes that may be the true one, separated by "; ", and
    `conformal_size` their number, or `conformal_low` and `conformal_high` are the ends of an interval: they hold the
    truth as often as `evaluation.conformal.coverage` or `coverage` says. With other draws than the run was evaluated
    with, they are there only if `coverage` is given.

    Args:
        run: An evaluated run.
        paths: Files and folders with inputs of the kind that the model was trained on.
        out: The table to write; its name ends in .csv or .parquet.
        samples: The number of draws; the recipe's by default.
        coverage: How often sets or intervals should hold the truth. Another value than the run was evaluated with needs
            the run's data.
        abstain: The share of validation inputs to abstain on, in place of the recipe's.
        score: By what to abstain: "entropy", "mutual_information", "max_probability" or "variance" for classes, "std"
            or "epistemic_std" for real targets; "familiarity" or "doubt", which combines total uncertainty with it.

    Returns:
        The number of inputs.

    Raises:
        RunError: If `out` has another ending, if the run is not evaluated, if there is no such score, or if `coverage`
            is given and it has no calibration rows.
        DataError: If the inputs can't be read or don't fit the model.
    """
    out = Path(out)
    if out.suffix not in FORMATS:
        raise RunError(f"{out}: expected a file name that ends in .csv or .parquet")
    level = abstention_level(run, abstain, score)
    trained = run.load()
    examples, names = trained.inputs.read(list(paths))
    copied = copied_columns(paths, trained.inputs)
    rule = rule_for(run, trained, samples, coverage)
    p = trained.predict(examples, samples)
    values, why = _abstain(p, level, trained, examples, run)
    familiarity = {} if p.familiarity is None else {"familiarity": p.familiarity.numpy()}
    conformal = {} if rule is None else conformal_columns(rule, p, trained.targets)
    columns = {**_columns(p, trained.targets), **conformal, **familiarity, "score": values}
    _require_finite(columns, run)
    columns |= {"abstain": np.array([bool(each) for each in why]), "why": ["; ".join(each) for each in why]}
    _write({"input": names, **_renamed(copied, {"input", *columns}), **columns}, out)
    if isinstance(trained.targets, Masks):
        _write_masks(p, names, out)
    return len(names)


def copied_columns(paths: Sequence[str | Path], inputs: Inputs) -> dict[str, Any]:
    """The columns of tables as they are written in their files, one after another; none of other inputs."""
    if not isinstance(inputs, Columns):
        return {}
    tables = [read_arrow(existing_path(path), delimiter=inputs.delimiter, as_text=True) for path in paths]
    if len(tables) == 1:
        return dict(zip(tables[0].column_names, tables[0].columns, strict=True))
    names = dict.fromkeys(name for table in tables for name in table.column_names)
    lists = {
        name: [table[name].to_pylist() if name in table.column_names else [None] * len(table) for table in tables]
        for name in names
    }
    kinds = {name: {table[name].type for table in tables if name in table.column_names} for name in names}
    return {
        name: [value if value is None or len(kinds[name]) == 1 else str(value) for part in parts for value in part]
        for name, parts in lists.items()
    }


def _renamed(columns: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """The columns with `input_` before names that are taken.

    >>> _renamed({"label": 1, "input_label": 2, "age": 3}, {"label"})
    {'input_label': 1, 'input_input_label': 2, 'age': 3}
    """
    found: dict[str, Any] = {}
    for name, column in columns.items():
        while name in taken or name in found:
            name = f"input_{name}"
        found[name] = column
    return found


def _columns(p: Prediction, targets: Targets) -> dict[str, Any]:
    if isinstance(p, BinaryPrediction):
        return _label_columns(p, targets)
    if isinstance(p, Classification):
        return _pixel_columns(p, targets) if isinstance(targets, Masks) else _class_columns(p, targets)
    assert isinstance(p, Regression) and isinstance(targets, Reals), "Trained.predict() refuses anything else"
    return _real_columns(p, targets)


def _class_columns(p: Classification, targets: Targets) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "label": [targets.names[label] for label in p.label.tolist()],
        "probability": p.confidence.numpy(),
        **{name: getattr(p, name).numpy() for name in ("entropy", "aleatoric", "epistemic")},
    }
    if targets.count <= MOST_CLASSES:
        columns |= {f"p_{name}": p.probs[:, i].numpy() for i, name in enumerate(targets.names)}
    return columns


def _label_columns(p: BinaryPrediction, targets: Targets) -> dict[str, Any]:
    rows = [[name for name, is_yes in zip(targets.names, row, strict=True) if is_yes] for row in p.label.tolist()]
    means = {name: getattr(p, name).mean(1).numpy() for name in ("entropy", "aleatoric", "epistemic")}
    each = {f"p_{name}": _column(p.probs, i) for i, name in enumerate(targets.names)}
    return {"labels": list(map("; ".join, rows)), **means, **each}


def _pixel_columns(p: Classification, targets: Targets) -> dict[str, Any]:
    means = {name: row_mean(getattr(p, name)).numpy() for name in ("confidence", "entropy", "aleatoric", "epistemic")}
    shares = torch.stack([(p.label == c).double().flatten(1).mean(1) for c in range(targets.count)], 1)
    return {**{f"share_{name}": _column(shares, i) for i, name in enumerate(targets.names)}, **means}


def _write_masks(p: Prediction, names: list[str], out: Path) -> None:
    """Write the predicted class of each pixel, and its uncertainty, to `table.masks.npz` beside `table.csv`."""
    assert isinstance(p, Classification)
    arrays = {name: getattr(p, name).half().numpy() for name in ("entropy", "epistemic")}
    path = out.with_suffix(".masks.npz")
    part = path.with_name(f"{path.name}.part")
    with open_new(part) as file:
        np.savez_compressed(file, input=np.array(names), label=p.label.byte().numpy(), **arrays)
    os.replace(part, path)


def _real_columns(p: Regression, targets: Reals) -> dict[str, Any]:
    low, high = (targets.restore(bound, p.std)[0] for bound in p.interval(INTERVAL))
    mean, std = targets.restore(p.mean, p.std)
    aleatoric, epistemic = (targets.restore(p.mean, part)[1] for part in (p.aleatoric_std, p.epistemic_std))
    found = {"mean": mean, "std": std, "aleatoric_std": aleatoric, "epistemic_std": epistemic, "low": low, "high": high}
    ends = [""] if targets.count == 1 else [f"_{name}" for name in targets.names]
    return {f"{name}{end}": _column(value, i) for i, end in enumerate(ends) for name, value in found.items()}


def _column(values: Tensor, i: int) -> Any:
    return values[:, i].contiguous().numpy()


def _abstain(
    p: Prediction, level: dict[str, Any], trained: Trained, examples: Examples, run: Run
) -> tuple[Any, list[list[str]]]:
    """The score of each row, and why the model abstains from it, if it does."""
    known = scores(p)
    score = level.get("by") or next(iter(known))
    if score not in known:
        raise RunError(
            f"{run.folder}: it abstains by {score}, for which familiarity.safetensors is missing; get the file again, "
            f"or run `bayesify evaluate {run.folder}`"
        )
    parts = [made_up_values(trained, examples), reasons(p, score, level["value"], trained.familiarity)]
    if score in ("doubt", "familiarity"):
        parts.insert(1, odd_columns(trained, examples))
    return known[score].numpy(), [list(chain.from_iterable(each)) for each in zip(*parts, strict=True)]


def _require_finite(columns: dict[str, Any], run: Run) -> None:
    """Raise if a number is NaN or infinite, as when the targets' scale is too large for the type of the outputs."""
    for name, values in columns.items():
        if not isinstance(values, list) and (bad := int((~np.isfinite(values)).sum())):
            raise RunError(
                f"{run.folder}: {name} is NaN or infinite for {bad} of {len(values)} inputs; the targets in its "
                "preprocessing.json are too large, or were edited: train the run again, with targets in other units"
            )


def _write(columns: dict[str, Any], out: Path) -> None:
    """Write the table atomically; text in a CSV file can't be a formula."""
    if out.suffix == ".csv":
        columns = {safe_cell(name): _safe_column(values) for name, values in columns.items()}
    table = import_optional("pyarrow", "writing tables").table(columns)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    with open_new(part) as file:
        if out.suffix == ".csv":
            import_optional("pyarrow.csv", "writing CSV files").write_csv(table, file)
        else:
            import_optional("pyarrow.parquet", "writing Parquet files").write_table(table, file)
    os.replace(part, out)


def _safe_column(values: Any) -> Any:
    """Values for a CSV file; text, in a list or as pyarrow has it, can't be a formula, and lists and such are text."""
    if not isinstance(values, list) and hasattr(values, "to_pylist"):
        plain = values.to_pylist()
        values = [each if isinstance(each, PLAIN) else str(each) for each in plain]
    return [safe_cell(value) for value in values] if isinstance(values, list) else values
