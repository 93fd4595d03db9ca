"""What `bayesify tune` gains, and why every candidate gets all epochs: `python -m benchmarks.tune`.

Rank1 is trained from scratch by Adam in an MLP of two hidden layers of 100 units, and its noise is tuned, three seeds:
12 epochs of 2,000 images of Fashion-MNIST, with 1,000 validation rows; 30 epochs of 250 of scikit-learn's digits, with
250 validation rows, a tenth of which have a random label, as in training, but no test row; and 60 epochs of UCI's table
energy. Shown are the noise that was chosen, and the NLL of the test rows with it and with the default.

To see whether fewer epochs could select candidates first, the same is tuned with a third of the epochs; shown is the
place that the noise with the lowest validation NLL of all epochs has then.

Needs $BAYESIFY_DATA. Runs are kept in FOLDER (default: runs/benchmark-tune) and not repeated. Results are written to
benchmarks/results/tune.json and tune.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from bayesify import lab
from bayesify.lab.tuning.tune_recipe import Tuned, tune
from benchmarks.draws import data_folder
from benchmarks.speed.tables import markdown

RESULTS = Path(__file__).parent / "results" / "tune.json"
SEEDS, ROWS, WRONG = (0, 1, 2), 500, 0.1
TASKS: dict[str, tuple[int, dict[str, Any]]] = {
    "Fashion-MNIST": (12, {"name": "fashion-mnist", "limit": 2000, "validation": 1000, "batch_size": 64}),
    "noisy digits": (30, {"name": "npz", "path": "digits.npz", "validation": 0.5, "batch_size": 32}),
    "energy": (60, {"name": "uci", "path": "uci/energy", "validation": 0.15, "batch_size": 32}),
}
"""How many epochs, and the data."""


def write_digits(path: Path) -> None:
    """Digits of which some training labels are wrong, and no test label."""
    digits, random = load_digits(), np.random.default_rng(0)
    order = random.permutation(len(digits.target))
    x, y = (digits.images[order] / 16).astype(np.float32)[:, None], digits.target[order]
    wrong = random.random(ROWS) < WRONG
    y[:ROWS][wrong] = random.integers(0, 10, wrong.sum())
    np.savez(path, x_train=x[:ROWS], y_train=y[:ROWS], x_test=x[ROWS:], y_test=y[ROWS:])


def recipe_of(task: str, seed: int, folder: Path, share: int) -> lab.Recipe:
    """The recipe of a task with 1/share of its epochs."""
    epochs, data = TASKS[task]
    if "path" in data:
        data = {**data, "path": str((folder if data["name"] == "npz" else data_folder()) / data["path"])}
    training = {
        "epochs": epochs // share,
        "optimizer": "adam",
        "lr": 1e-3,
        "schedule": "constant",
        "posterior_lr": None,
    }
    model = {"name": "mlp", "options": {"hidden": [100, 100]}}
    return lab.Recipe.of({"data": data, "model": model, "method": "Rank1", "training": training, "seed": seed})


def test_nll(run: lab.Run) -> float:
    """The NLL of the test rows."""
    known = lab.evaluate(run, splits=["test"])["test"]
    return known["nll"] if "nll" in known else -known["log_density"]


def measured(task: str, seed: int, folder: Path) -> dict[str, Any]:
    """What is chosen and what it gains, and the place of the best among candidates with a third of the epochs."""
    place = folder / f"{task}-{seed}"
    full: Tuned = tune(recipe_of(task, seed, folder, 1), place, progress=False)
    short = tune(recipe_of(task, seed, folder, 3), folder / f"{task}-{seed}-short", progress=False)
    given = next((place / "trials").glob("*as-given"), place / "best")
    order = [row["name"].split()[0] for row in short.choice.rows()]
    return {
        "why": full.choice.why,
        "validation": {row["name"].split()[0]: row["nll"] for row in full.choice.rows()},
        "short": {row["name"].split()[0]: row["nll"] for row in short.choice.rows()},
        "chosen": full.choice.chosen.name.split()[0],
        "test": test_nll(full.run),
        "default": test_nll(lab.Run(given)),
        "place": 1 + order.index(full.choice.lowest.name.split()[0]),
    }


def page(results: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown."""
    rows = []
    for key, each in results.items():
        gain = each["default"] - each["test"]
        figures = [f"{each['default']:.3f}", f"{each['test']:.3f}", f"{gain:.3f}", str(each["place"])]
        rows.append([*key.split("/"), each["chosen"].removeprefix("noise="), *figures])
    gains = {task: [] for task in TASKS}
    for key, each in results.items():
        gains[key.split("/")[0]].append(each["default"] - each["test"])
    means = ", ".join(f"{fmean(values):.3f} ({task})" for task, values in gains.items() if values)
    words = [" ".join(part.split()) for part in (__doc__ or "").split("\n\n")]
    head = ["task", "seed", "noise chosen", "test NLL, default", "test NLL, tuned", "gain", "place after a third"]
    return "\n".join(
        [
            "# Tuning\n",
            f"Written by `python -m benchmarks.tune`. {words[1]}\n",
            f"{words[2]}\n",
            markdown(head, rows),
            f"Mean gain over seeds: {means}.\n",
        ]
    )


def main() -> None:
    """Measure what is missing, and write the results."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/benchmark-tune").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if not (folder / "digits.npz").exists():
        write_digits(folder / "digits.npz")
    results = {}
    for task in TASKS:
        for seed in SEEDS:
            results[f"{task}/{seed}"] = measured(task, seed, folder)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            RESULTS.with_suffix(".md").write_text(page(results), encoding="utf-8")
            print(task, seed, results[f"{task}/{seed}"]["why"], flush=True)


if __name__ == "__main__":
    main()
