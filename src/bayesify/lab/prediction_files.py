"""Predictions for new inputs as a table: CSV or Parquet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesify.lab.data import Reals, Targets
from bayesify.lab.data.errors import need
from bayesify.lab.evaluation import predictive
from bayesify.lab.metrics import INTERVAL, scores
from bayesify.lab.runs import Run, RunError
from bayesify.prediction import Classification, Prediction, Regression

MOST_CLASSES = 20
"""With more classes the table has no column for each one's probability."""
FORMATS = (".csv", ".parquet")


def predict_files(run: Run, paths: Sequence[str | Path], out: str | Path, *, samples: int | None = None) -> int:
    """Predict new inputs from files and folders into a table with a row for each, and return how many there are.

    Classes give `label`, its `probability`, `entropy` with its parts `aleatoric` and `epistemic` in nats, and up to 20
    classes a column `p_CLASS` each. Real targets give `mean`, `std` with its parts `aleatoric_std` and `epistemic_std`,
    and `low` and `high`, between which the target lies with probability 0.9, all in the target's own units; with
    several targets each column's name ends in the target's.

    `abstain` says that the total uncertainty (`entropy`, or the deviation) is above the threshold in the run's
    metrics.json, which the recipe's `evaluation.abstain` share of the validation inputs exceeded: better ask a person.
    """
    out = Path(out)
    if out.suffix not in FORMATS:
        raise RunError(f"{out}: the table's format is known by its name; expected one that ends in .csv or .parquet")
    level = _threshold(run)
    trained = run.load()
    examples, names = trained.inputs.read(list(paths))
    p = predictive(trained, examples, samples=samples)
    columns = {"input": names, **_columns(p, trained.targets), "abstain": _abstain(p, level)}
    _write(columns, out)
    return len(names)


def _threshold(run: Run) -> float:
    if not (run.folder / "metrics.json").is_file():
        raise RunError(
            f"{run.folder}: no metrics.json to say when to abstain; `bayesify evaluate {run.folder}` makes it"
        )
    return float(run.metrics["threshold"]["value"])


def _columns(p: Prediction, targets: Targets) -> dict[str, Any]:
    if isinstance(p, Classification):
        return _class_columns(p, targets)
    assert isinstance(p, Regression) and isinstance(targets, Reals), "predictive() has refused the others"
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


def _abstain(p: Prediction, level: float) -> Any:
    total = next(iter(scores(p).values()))
    return (total > level).numpy()


def _write(columns: dict[str, Any], out: Path) -> None:
    """Whole or not at all."""
    table = need("pyarrow", "writing tables").table(columns)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    if out.suffix == ".csv":
        need("pyarrow.csv", "writing CSV files").write_csv(table, part)
    else:
        need("pyarrow.parquet", "writing Parquet files").write_table(table, part)
    os.replace(part, out)
