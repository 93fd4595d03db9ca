"""The figures of the papers on data that comes with the package: scikit-learn's digits, and curves of one input.

Trains small networks and writes each figure as PNG, with its data as CSV, to runs/figures. Takes one to two minutes on
two cores. The papers' networks and data are hundreds of times larger: this shows what the figures look like, not the
papers' numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import bayesify as by
from bayesify import lab
from bayesify.lab import analyses
from bayesify.lab.recipes import Recipe

FOLDER = Path("runs/figures")
DIGITS = {
    "data": {"name": "digits", "limit": 200, "batch_size": 50, "validation": 0.1, "test": 0.4},
    "model": {"name": "cnn", "options": {"pool": "flatten"}},
    "evaluation": {"samples": 8},
}
IBNN = {**DIGITS, "method": {"name": "IBNN", "components": 8, "mean_std": 0.5}, "training": {"epochs": 40}}
RANK1 = {**DIGITS, "method": {"name": "Rank1", "mean_std": 0.3}, "training": {"epochs": 20, "lr": 0.02}}


def main() -> None:
    torch.set_num_threads(1)  # small networks are not faster with more
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for name, found, figure in figures():
        figure.savefig(FOLDER / f"{name}.png", dpi=150)
        found.to_csv(FOLDER / f"{name}.csv")
        print(FOLDER / f"{name}.png", flush=True)


def figures() -> Iterator[tuple[str, analyses.Analysis, Figure]]:
    yield from model_figures()
    yield from ablation_figures()
    yield from curve_figures()


def model_figures() -> Iterator[tuple[str, analyses.Analysis, Figure]]:
    """The figures of one trained model, on the test images of its run."""
    run = lab.train(Recipe.of(IBNN), FOLDER / "runs" / "ibnn", progress=False)
    trained, data = run.load(), run.data()
    model, raw, y = trained.model, data.test.raw(torch.arange(len(data.test))), data.test.targets
    x = trained.inputs.prepare(raw)
    p = by.predict(model, x, 80, draws=True)
    mean = by.Categorical().predictive(by.draw(model, None)(x)[None])
    yield with_figure("sample_sizes", analyses.sample_sizes(p, y, mean_network=mean))
    yield with_figure("extremes", analyses.extremes(p, raw, y))
    yield with_figure("component_weights", analyses.component_weights(model))
    train = trained.inputs.prepare(data.train.raw(torch.arange(len(data.train))))
    yield with_figure("loss_line", analyses.loss_line(model, (x, y), 0, 2, recalibrate=[train]))
    yield with_figure("loss_plane", analyses.loss_plane(model, (x, y), recalibrate=[train]))
    recipe = Recipe.of({**DIGITS, "method": "MeanField", "training": {"epochs": 20}})
    bayesian = lab.train(recipe, FOLDER / "runs" / "mean_field", progress=False).load().model
    yield with_figure("kernel_moments", analyses.kernel_moments(bayesian))


def ablation_figures() -> Iterator[tuple[str, analyses.Analysis, Figure]]:
    """One option of Rank-1 at several values, each trained for two seeds."""
    replicated = {**RANK1, "training": {"epochs": 20, "lr": 0.02, "mixture": "replicate"}}
    for recipe, key, values in (
        (RANK1, "method.components", [1, 2, 4, 8]),
        (RANK1, "method.factors", ["input", "output", "both"]),
        (replicated, "training.bound", ["average", "mixture"]),
    ):
        name = key.partition(".")[2]
        found = analyses.ablation(recipe, key, values, FOLDER / "runs" / name, seeds=2, progress=False)
        yield with_figure(name, found)
        if name == "components":
            runs = [row.runs[0] for row in found.comparison.rows]
            yield with_figure("component_curves", analyses.component_curves(runs))
    kept = Recipe.of({**RANK1, "training": {"epochs": 20, "lr": 0.02, "keep_epochs": 10}})
    run = lab.train(kept, FOLDER / "runs" / "kept", progress=False)
    yield with_figure("checkpoint_curves", analyses.checkpoint_curves(run))


def curve_figures() -> Iterator[tuple[str, analyses.Analysis, Figure]]:
    """Functions of one input: fitted with one to three hidden layers, and drawn from priors."""
    x, y = analyses.toy_curve()
    methods: dict[str, Any] = {
        "IBNN": by.IBNN(8, prior_std=0.3, mean_std=0.5),
        "MeanField": by.MeanField(estimator="local"),
    }
    bands = {
        f"{name}, hidden layers: {depth}": analyses.fit_curve(method, x, y, hidden=[256] * depth, steps=400).bands()
        for name, method in methods.items()
        for depth in (1, 2, 3)
    }
    yield "bands", bands["IBNN, hidden layers: 1"], analyses.panels(bands)
    grid = torch.linspace(-10, 10, 500)[:, None]
    priors = {
        title: analyses.prior_functions(analyses.sign_network(), method, grid)
        for title, method in {"DropConnect(0.5)": by.DropConnect(0.5), "EMP(5)": by.EMP(5)}.items()
    }
    yield "prior_functions", priors["EMP(5)"], analyses.panels(priors)
    factors: dict[str, Any] = {
        "Normal": by.Rank1(prior_std=0.5),
        "Cauchy": by.Rank1(posterior="cauchy", prior_std=0.5),
        "Student": analyses.student_factor(3.0),
    }
    yield with_figure("induced_priors", analyses.induced_priors(factors))


def with_figure(name: str, found: analyses.Analysis) -> tuple[str, analyses.Analysis, Figure]:
    return name, found, found.figure()


if __name__ == "__main__":
    main()
