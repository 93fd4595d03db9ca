"""Fine-tune a pretrained CIFAR-10 ResNet-20 with every recipe in recipes/cifar10, and evaluate it.

Needs $BAYESIFY_DATA with cifar-10-batches-py, cifar-100-python and weights/resnet20-12fca82f.th, and two or three hours
on two cores. The pretrained network has seen all training images, so hyperparameters were chosen on test images 0 to
4999, and the results are on images 5000 to 9999, with 2,500 out-of-distribution images of CIFAR-100. Finished runs are
not repeated. Writes benchmarks/results/cifar10.json, cifar10.md and cifar10.html. Options: --runs FOLDER,
names of recipes (default: all).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from bayesify.lab.baselines.posthoc import needs_training
from bayesify.lab.comparison import Comparison
from bayesify.lab.evaluation import evaluate
from bayesify.lab.recipes import Recipe
from bayesify.lab.report import write_report
from bayesify.lab.runs import Run, build_network, load_data, make_likelihood

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes" / "cifar10").glob("*.yaml"))
RESULTS = Path(__file__).parent / "results" / "cifar10.json"
OOD_IMAGES = 2500
"""The number of CIFAR-100's test images, evenly spread."""
GOAL = {"accuracy": 0.915, "nll": 0.245, "ece": 0.010}


def pretrained(folder: Path) -> Run:
    """The pretrained network, evaluated like the others."""
    if (folder / "metrics.json").exists():
        return Run.open(folder)
    recipe = Recipe.of(json.loads(json.dumps(Recipe.read(RECIPES[0]).plain())), ["method={name: none}"])
    run, data = Run.create(folder, recipe), load_data(recipe)
    run.save(build_network(recipe, data.inputs, data.targets), make_likelihood(recipe, data.targets), data)
    run.note(seconds=0.0, status="finished")
    evaluate(run)
    return run


def fine_tuned(recipe: Path, folder: Path) -> Run:
    """Train a recipe with `bayesify train`, unless it is done."""
    if not (folder / "metrics.json").exists():
        start = ["--resume", str(folder)] if folder.exists() else [str(recipe), "--out", str(folder)]
        subprocess.run([sys.executable, "-m", "bayesify", "train", *start, "--quiet"], check=True)
    return Run.open(folder)


def with_ood_metrics(run: Run) -> Run:
    """The run, evaluated also on CIFAR-100."""
    if not {"cifar100"} <= set(run.metrics["test"]["ood"]):
        evaluate(run, splits=["test"], ood=[{"name": "cifar100", "limit": OOD_IMAGES}])
    return run


def row(name: str, run: Run) -> dict[str, object]:
    """A line of the table."""
    recipe, metrics = run.recipe, run.metrics
    return {
        "name": name,
        "method": recipe.method.model_dump(mode="json"),
        "epochs": recipe.training.epochs if name != "pretrained" and needs_training(recipe) else 0,
        "draws": metrics["draws"],
        "parameters_added_percent": metrics["overhead"],
        "test": metrics["test"],
        "validation": metrics["validation"],
        "training_seconds": round(run.facts["seconds"]),
        "versions": run.facts["versions"],
    }


def both(scores: dict[str, dict[str, float] | None]) -> str:
    """The AUROC by entropy and by mutual information, which a network without draws has not."""
    return " / ".join(
        "–" if each is None else f"{each['auroc']:.3f}" for each in (scores["entropy"], scores["epistemic"])
    )


def table(rows: list[dict[str, object]]) -> str:
    """The rows in Markdown."""
    heads = ("network", "epochs", "top-1", "NLL", "ECE", "AURC", "AUROC on CIFAR-100", "on noise", "added", "draws")
    heads = (*heads, "on images 0-4999: top-1, NLL, ECE")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in rows:
        test, chosen = each["test"], each["validation"]
        assert isinstance(test, dict) and isinstance(chosen, dict)
        ood = [both(test["ood"][name]) for name in ("cifar100", "noise")]
        lines.append(
            f"| {each['name']} | {each['epochs']} | {test['accuracy']:.2%} | {test['nll']:.4f} | {test['ece']:.4f} | "
            f"{test['aurc']:.4f} | {' | '.join(ood)} | {each['parameters_added_percent']:.2f}% | {each['draws']} | "
            f"{chosen['accuracy']:.2%}, {chosen['nll']:.4f}, {chosen['ece']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train what is missing, then write all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if "BAYESIFY_DATA" not in os.environ:
        sys.exit("set BAYESIFY_DATA to the folder that holds cifar-10-batches-py and weights/resnet20-12fca82f.th")
    chosen = [recipe for recipe in RECIPES if not options.names or recipe.stem in options.names]
    runs = {"pretrained": pretrained(options.runs / "pretrained")}
    runs |= {recipe.stem: fine_tuned(recipe, options.runs / recipe.stem) for recipe in chosen}
    runs = {name: with_ood_metrics(run) for name, run in runs.items()}
    rows = [row(name, run) for name, run in runs.items()]
    print(table(rows))
    if len(chosen) == len(RECIPES):
        made = f"python benchmarks/cifar10.py: torch {torch.__version__}, {platform.machine()}, one seed each"
        RESULTS.write_text(json.dumps({"made": made, "goal": GOAL, "rows": rows}, indent=1) + "\n")
        words = f"# CIFAR-10, ResNet-20 fine-tuned\n\nTest images 5000 to 9999. {made}. AUROC is by entropy / by "
        words += f"mutual information; the others are {OOD_IMAGES:,} test images of CIFAR-100.\n\n"
        RESULTS.with_suffix(".md").write_text(words + table(rows))
        write_report(Comparison.of({name: [run] for name, run in runs.items()}), RESULTS.with_suffix(".html"))


if __name__ == "__main__":
    main()
