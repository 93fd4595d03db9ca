"""`predict_files`: predict new inputs from files, and write a table as CSV or Parquet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bayesify.lab.conformal import conformal_columns, rule_for
from bayesify.lab.data import Examples, Reals, Targets
from bayesify.lab.data.errors import import_optional
from bayesify.lab.data.spreadsheets import safe_cell
from bayesify.lab.familiarity import odd_columns, reasons
from bayesify.lab.metrics import INTERVAL, scores
from bayesify.lab.run_files import open_new
from bayesify.lab.runs import Run, RunError
from bayesify.lab.trained import Trained
from bayesify.prediction.results import Classification, Prediction, Regression

MOST_CLASSES = 20
"""With more classes than this, the table has no column for the probability of each class."""
FORMATS = (".csv", ".parquet")


def predict_files(
    run: Run, paths: Sequence[str | Path], out: str | Path, *, samples: int | None = None, coverage: float | None = None
) -> int:
    """Predict new inputs from files and folders, and write a table with a row for each input.

    For classes the columns are `label`, its `probability`, `entropy` and its parts `aleatoric` and `epistemic` in nats,
    and, for up to 20 classes, the probability `p_CLASS` of each. For real targets they are `mean`, `std` and its parts
    `aleatoric_std` and `epistemic_std`, and the ends `low` and `high` of the central 90% interval, all in the target's
    own units; with several targets, column names end in the target's name.

    The column `familiarity` is the share of held-out inputs that are less familiar. The column `abstain` is true if the
    doubt, or the score of `evaluation.abstain_by`, is above the threshold in the run's metrics.json, which the share
    `evaluation.abstain` of the validation inputs exceeded, or if a column of a table is out of its range. The column
    `why` says why: `ambiguous`, `models disagree`, `unfamiliar`, `column income out of range`.

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

    Returns:
        The number of inputs.

    Raises:
        RunError: If `out` has another ending, if the run is not evaluated, or if `coverage` is given and it has no
            calibration rows.
        DataError: If the inputs can't be read or don't fit the model.
    """
    out = Path(out)
    if out.suffix not in FORMATS:
        raise RunError(f"{out}: expected a file name that ends in .csv or .parquet")
    level = _threshold(run)
    trained = run.load()
    examples, names = trained.inputs.read(list(paths))
    rule = rule_for(run, trained, samples, coverage)
    p = trained.predict(examples, samples)
    abstain, why = _abstain(p, level, trained, examples, run)
    familiarity = {} if p.familiarity is None else {"familiarity": p.familiarity.numpy()}
    conformal = {} if rule is None else conformal_columns(rule, p, trained.targets)
    columns = {"input": names, **_columns(p, trained.targets), **conformal, **familiarity}
    columns |= {"abstain": abstain, "why": why}
    _require_finite(columns, run)
    _write(columns, out)
    return len(names)


def _threshold(run: Run) -> dict[str, Any]:
    """The score and the value above which the model abstains; the total uncertainty in runs of earlier versions."""
    known = run.metrics if (run.folder / "metrics.json").is_file() else {}
    if not known.get("threshold"):
        raise RunError(
            f"{run.folder}: no metrics.json with the abstention threshold; run `bayesify evaluate {run.folder}`"
        )
    found: dict[str, Any] = known.get("abstain") or {"value": known["threshold"]["value"]}
    return found


def _columns(p: Prediction, targets: Targets) -> dict[str, Any]:
    if isinstance(p, Classification):
        return _class_columns(p, targets)
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
) -> tuple[Any, list[str]]:
    """From which rows the model abstains, and why."""
    known = scores(p)
    score = level.get("by") or next(iter(known))
    if score not in known:
        raise RunError(
            f"{run.folder}: it abstains by {score}, for which familiarity.safetensors is missing; get the file again, "
            f"or run `bayesify evaluate {run.folder}`"
        )
    why = reasons(p, score, level["value"], trained.familiarity)
    if score in ("doubt", "familiarity"):
        why = [columns + others for columns, others in zip(odd_columns(trained, examples), why, strict=True)]
    return np.array([bool(each) for each in why]), ["; ".join(each) for each in why]


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
    return [safe_cell(value) for value in values] if isinstance(values, list) else values
