"""The recurrent networks of the Rank-1 paper's table 4, on PhysioNet's mortality challenge of 2012.

Needs $BAYESIFY_DATA with physionet2012/hourly48.npz. Every recipe in recipes/physionet2012 is trained from scratch for
each seed, on set a; settings were chosen on set b; the results are on set c. Finished runs are not repeated.
Writes benchmarks/results/physionet2012.json and physionet2012.md. Options: --runs FOLDER, --seeds N.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import bayesify as by
from bayesify import lab
from bayesify.lab.comparison import Comparison, Row
from bayesify.lab.comparison.columns import Column
from bayesify.lab.data import Data, Series, load
from bayesify.lab.data.inputs import moments
from bayesify.lab.metrics import classification_metrics
from bayesify.lab.recipes import Recipe

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "physionet2012.json"
SPLITS = ("test", "validation")
PLAIN = "deterministic"
NAMES = {
    PLAIN: "Deterministic",
    "batch_ensemble": "BatchEnsemble",
    "bayesian_embeddings": "Bayesian embeddings",
    "fully_bayesian": "Fully Bayesian",
    "rank1_normal": "Rank-1, Normal",
    "rank1_cauchy": "Rank-1, Cauchy",
    "deep_ensemble": "Deep ensemble",
}
"""The recipes in the order of the paper's table."""
COLUMNS = (
    Column("nll", "NLL", ("nll",), min, 4),
    Column("average_precision", "AUC-PR", ("average_precision",), max, 4),
    Column("ece", "ECE", ("ece",), min, 4),
    Column("auroc", "AUROC", ("auroc",), max, 4),
)


def table(splits: dict[str, Comparison], reference: dict[str, dict[str, float | None]]) -> str:
    """The rows in Markdown, with the figures of each split side by side, and last the logistic regression."""
    heads = [f"{split} {column.head}" for split in splits for column in COLUMNS]
    lines = [f"| method | epochs | draws | {' | '.join(heads)} | parameters |", "|---" * (len(heads) + 4) + "|"]
    for rows in zip(*(comparison.rows for comparison in splits.values()), strict=True):
        cells = [_cell(row, column) for row in rows for column in COLUMNS]
        run = rows[0].runs[0]
        cells = [NAMES[rows[0].name], str(run.recipe.training.epochs), str(run.metrics["draws"]), *cells]
        lines.append(f"| {' | '.join(cells)} | {sum(run.metrics['parameters'].values()):,} |")
    cells = [column.format(column.of(reference[split]) or 0.0) for split in splits for column in COLUMNS]
    lines.append(f"| Logistic regression on summaries | | 1 | {' | '.join(cells)} | |")
    return "\n".join(lines)


def _cell(row: Row, column: Column) -> str:
    return row.cell(column).replace("±", " ± ")


def figures(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """The values of each method, one for each seed."""
    return {row.name: {column.key: row.measured_values[column.key] for column in COLUMNS} for row in comparison.rows}


def summaries(data: Data, split: str) -> Tensor:
    """Of each variable of a stay: the mean, least, greatest and last value, and how often it was measured."""
    assert isinstance(data.inputs, Series)
    rows = getattr(data, split)
    x = data.inputs.prepare(rows.raw(torch.arange(len(rows))))
    values, measured = x.chunk(2, -1)
    times = measured.sum(1)
    least, greatest = values.where(measured > 0, torch.inf).amin(1), values.where(measured > 0, -torch.inf).amax(1)
    each = [(values * measured).sum(1) / times, least, greatest]
    return torch.cat([*(part.where(times > 0, 0.0) for part in each), values[:, -1], times], 1)


def logistic(data: Data) -> dict[str, dict[str, float | None]]:
    """The metrics of a logistic regression on summaries, its regularisation chosen on the validation split."""
    mean, std = (torch.tensor(each) for each in moments([summaries(data, "train")]))
    x = {split: ((summaries(data, split) - mean) / std).numpy() for split in ("train", "validation", "test")}
    labels = data.train.targets.numpy()
    models = [LogisticRegression(C=c, max_iter=2000).fit(x["train"], labels) for c in (0.003, 0.01, 0.03, 0.1)]
    every = [{split: _measured(model, x[split], getattr(data, split).targets) for split in SPLITS} for model in models]
    return min(every, key=lambda metrics: metrics["validation"]["nll"] or torch.inf)


def _measured(model: LogisticRegression, x: np.ndarray, y: Tensor) -> dict[str, float | None]:
    odds = torch.from_numpy(model.decision_function(x))
    return classification_metrics(by.Categorical().predictive(torch.stack([torch.zeros_like(odds), odds], -1)[None]), y)


def judgement(comparison: Comparison, reference: dict[str, float | None]) -> Iterator[str]:
    """For each method, by how much it is better than the plain network with the same seed, mean and deviation.

    Last, which methods have a lower NLL than the logistic regression.
    """
    plain = next(row for row in comparison.rows if row.name == PLAIN)
    for row in comparison.rows:
        if row.name != PLAIN:
            yield f"- {NAMES[row.name]}: " + "; ".join(_compared(row, plain, column) for column in COLUMNS[:3]) + "."
    nll = COLUMNS[0]
    lower = [NAMES[row.name] for row in comparison.rows if (row.mean(nll.key) or 0.0) < (nll.of(reference) or 0.0)]
    yield f"- A lower NLL than the logistic regression's: {', '.join(lower) or 'none of the networks'}."


def _compared(row: Row, plain: Row, column: Column) -> str:
    sign = 1 if column.best is max else -1
    gains = torch.tensor([sign * (ours - theirs) for ours, theirs in row.pairs(plain, column.key)])
    mean, sd = float(gains.mean()), float(gains.std())
    verdict = "not told apart" if abs(mean) <= sd else "better" if mean > 0 else "worse"
    return f"{column.head} {verdict} ({sign * mean:+.4f} ± {sd:.4f})"


def main() -> None:
    """Train what is missing, then write all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/physionet2012"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if "BAYESIFY_DATA" not in os.environ:
        sys.exit("set BAYESIFY_DATA to the folder that holds physionet2012/hourly48.npz")
    recipes = {name: Recipe.read(HERE.parent / "recipes" / "physionet2012" / f"{name}.yaml") for name in NAMES}
    tested = lab.compare(recipes, options.runs, seeds=options.seeds)
    splits = {split: Comparison.of({row.name: row.runs for row in tested.rows}, split) for split in SPLITS}
    reference = logistic(load("physionet2012"))
    machine = f"torch {torch.__version__}, {platform.machine()}"
    made = f"python benchmarks/physionet2012.py: {machine}, mean ± sd over {options.seeds} seeds"
    chosen = {split: {column.key: column.of(reference[split]) for column in COLUMNS} for split in SPLITS}
    found = {"made": made, "logistic": chosen, **{split: figures(each) for split, each in splits.items()}}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    parts = ["# PhysioNet 2012, in-hospital mortality", WORDS.format(made=made), table(splits, reference), AGAINST]
    RESULTS.with_suffix(".md").write_text(
        "\n\n".join(parts) + "\n\n" + "\n".join(judgement(tested, reference[tested.split])) + "\n"
    )
    print(RESULTS.with_suffix(".md").read_text())


WORDS = """The experiment of the Rank-1 paper's table 4 (there on MIMIC-III). {made}.

One LSTM for all rows reads 48 hours of 37 variables and 5 static ones: their numbers, whether each was measured,
and the sum of an embedding of each one's bin. It is trained on set a (4,000 stays); results are on set c ("test",
4,000 stays, 585 deaths). Settings were chosen on set b ("validation") and nowhere else, with one seed and few
trials: the network (its embeddings are as small as they are to save time), its rate and epochs for the
deterministic one; the posterior's rate for Rank-1, Normal; the KL's weight for the fully Bayesian one, 0.1, since 1
underfits. The others have what these have. 25 draws, but for BatchEnsemble and the deep ensemble, of which each of
the four members counts once. ECE has 15 bins; AUC-PR is the average precision. The logistic regression is on the
mean, least, greatest and last value of each variable and how often it was measured: what a person would try first."""

AGAINST = """Against the deterministic network of the same seed, on the test set (mean ± sd of the differences over the
seeds; better or worse where the mean is more than one sd from 0, which with few seeds is a hint, not a proof):"""

if __name__ == "__main__":
    main()
