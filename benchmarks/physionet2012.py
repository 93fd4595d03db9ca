"""The recurrent networks of the Rank-1 paper's table 4, on PhysioNet's mortality challenge of 2012.

Needs $BAYESIFY_DATA with physionet2012/hourly48.npz. Every recipe in recipes/physionet2012 is trained from scratch for
each seed, on set a; settings were chosen on set b; the results are on set c. Runs that are finished are not repeated.
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

import torch

from bayesify.lab.compare import compare
from bayesify.lab.comparison import Comparison, Row
from bayesify.lab.measures import Column
from bayesify.lab.recipes import Recipe

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "physionet2012.json"
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


def table(splits: dict[str, Comparison]) -> str:
    """The rows in Markdown, with the figures of each split side by side."""
    heads = [f"{split} {column.head}" for split in splits for column in COLUMNS]
    lines = [f"| method | draws | {' | '.join(heads)} | parameters |", "|---" * (len(heads) + 3) + "|"]
    for rows in zip(*(comparison.rows for comparison in splits.values()), strict=True):
        cells = [_cell(row, column) for row in rows for column in COLUMNS]
        metrics = rows[0].runs[0].metrics
        size = sum(metrics["parameters"].values())
        lines.append(f"| {NAMES[rows[0].name]} | {metrics['draws']} | {' | '.join(cells)} | {size:,} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row, column: Column) -> str:
    return row.cell(column).replace("±", " ± ")


def judgement(comparison: Comparison) -> Iterator[str]:
    """For each method, by how much it is better than the plain network with the same seed, mean and deviation."""
    plain = next(row for row in comparison.rows if row.name == PLAIN)
    for row in comparison.rows:
        if row.name != PLAIN:
            yield f"- {NAMES[row.name]}: " + "; ".join(_compared(row, plain, column) for column in COLUMNS[:3]) + "."


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
    tested = compare(recipes, options.runs, seeds=options.seeds)
    splits = {"test": tested, "validation": Comparison.of({row.name: row.runs for row in tested.rows}, "validation")}
    machine = f"torch {torch.__version__}, {platform.machine()}"
    made = f"python benchmarks/physionet2012.py: {machine}, mean ± sd over {options.seeds} seeds"
    RESULTS.write_text(json.dumps({"made": made, **{name: each.to_dict() for name, each in splits.items()}}, indent=1))
    against = (
        "Against the deterministic network of the same seed, on the test set (mean ± sd of the differences over the"
    )
    against += " seeds; better or worse where the mean is more than one sd from 0):"
    parts = ["# PhysioNet 2012, in-hospital mortality", WORDS.format(made=made), table(splits), against]
    RESULTS.with_suffix(".md").write_text("\n\n".join(parts) + "\n\n" + "\n".join(judgement(tested)) + "\n")
    print(RESULTS.with_suffix(".md").read_text())


WORDS = """The experiment of the Rank-1 paper's table 4 (there on MIMIC-III). {made}.

One LSTM for all rows reads 48 hours of 37 variables and 5 static ones: their numbers, whether each was
measured, and the sum of an embedding of each one's bin. Trained on set a (4,000 stays), settings chosen on set
b ("validation", 4,000) and nowhere else, results on set c ("test", 4,000; 585 deaths). A method's draws are
those of the posterior, but for BatchEnsemble and the deep ensemble, of which each member counts once. ECE has
15 bins; AUC-PR is the average precision."""

if __name__ == "__main__":
    main()
