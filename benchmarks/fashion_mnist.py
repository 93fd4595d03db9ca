"""Every method on Fashion-MNIST, out-of-distribution (MNIST, KMNIST, notMNIST), under corruptions and an attack.

Needs $BAYESIFY_DATA with the four sets, and about an hour on two cores. One plain LeNet is trained on 55,000 images;
each method fine-tunes it for five epochs with the library's default settings. The members of a deep ensemble are
trained like the plain network with different seeds, at half its learning rate: at 0.1 one of the five learnt nothing.
Nothing was chosen on the test images. Finished runs are not repeated. Writes benchmarks/results/fashion-mnist.json,
fashion-mnist.md and fashion-mnist.html. Options: --runs FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from bayesify import lab
from bayesify.lab.comparison import Comparison

RESULTS = Path(__file__).parent / "results" / "fashion-mnist.json"
OOD_SETS = ["mnist", "kmnist", "notmnist"]
BASE: dict[str, Any] = {
    "data": {"name": "fashion-mnist", "validation": 5000, "augment": ["flip"]},
    "model": {"name": "lenet"},
    "training": {"epochs": 15},
    "evaluation": {
        "samples": 20,
        "ood": OOD_SETS,
        "shift": ["mixing", "salt_and_pepper", "corruptions"],
        "attack": {"name": "pgd"},
        "rows": 200,
    },
}
TUNED = ("Rank1", "IBNN", "EMP", "ECMP", "MeanField", "LowRankEnsemble", "BatchEnsemble", "MCDropout", "DropConnect")
RECIPES: dict[str, dict[str, Any]] = {
    "plain longer": {"method": "none", "training": {"epochs": 5}},
    "temperature": {"method": "temperature"},
    "laplace": {"method": "laplace"},
    "swag": {"method": "swag", "training": {"epochs": 5}},
    "deep ensemble": {"method": "deep_ensemble", "training": {"epochs": 15, "lr": 0.05}},
    **{name: {"method": name, "training": {"epochs": 5}} for name in TUNED},
}


def table(comparison: Comparison) -> str:
    """The rows in Markdown."""
    heads = [
        "method",
        "top-1 %",
        "NLL",
        "ECE %",
        "AURC %",
        *(f"{name} AUROC" for name in OOD_SETS),
        "cNLL",
        "under PGD %",
    ]
    lines = [f"| {' | '.join(heads)} | added % |", "|---" * (len(heads) + 1) + "|"]
    for row in comparison.rows:
        metrics = row.runs[0].metrics
        test = metrics["test"]
        scores = [f"{_best_auroc(test['ood'][name])}" for name in OOD_SETS]
        cells = [row.name, f"{test['accuracy']:.2%}"[:-1], f"{test['nll']:.4f}", f"{test['ece']:.2%}"[:-1]]
        cells += [f"{test['aurc']:.2%}"[:-1], *scores, f"{test['corrupted']['nll']:.3f}"]
        cells += [f"{test['attack']['pgd']['robust_accuracy']:.1%}"[:-1], f"{metrics['overhead']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _best_auroc(scores: dict[str, dict[str, float] | None]) -> str:
    """By entropy and by mutual information, which a single network does not have."""
    shown = [scores["entropy"], scores["epistemic"]]
    return " / ".join("–" if each is None else f"{each['auroc']:.3f}" for each in shown)


def main() -> None:
    """Train what is missing, then write all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/fashion-mnist"))
    options = parser.parse_args()
    if "BAYESIFY_DATA" not in os.environ:
        sys.exit("set BAYESIFY_DATA to the folder that holds fashion-mnist, mnist, kmnist and notmnist")
    comparison = lab.compare(RECIPES, options.runs, seeds=1, base=BASE)
    made = f"python benchmarks/fashion_mnist.py: torch {torch.__version__}, {platform.machine()}, one seed, 20 draws"
    print(table(comparison))
    metrics = {row.name: row.runs[0].metrics for row in comparison.rows}
    RESULTS.write_text(json.dumps({"made": made, "metrics": metrics}, indent=1) + "\n")
    lab.write_report(comparison, RESULTS.with_suffix(".html"))
    words = f"# Fashion-MNIST\n\nLeNet, 10,000 test images. {made}. AUROC is by entropy / by mutual information; "
    words += (
        "corruptions (cNLL) and PGD (ε 0.031, 20 steps) on 200 test images. Every method but the deep ensemble starts "
    )
    words += (
        "from the plain network; the ensemble's five members are trained from scratch at half its learning rate, for "
    )
    words += "at the same rate one of them learnt nothing.\n\n"
    RESULTS.with_suffix(".md").write_text(words + table(comparison))


if __name__ == "__main__":
    main()
