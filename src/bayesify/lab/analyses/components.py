"""Each component by itself beside their mixture, and how much they differ (Rank-1, figures 3 to 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import bayesify as by
from bayesify.lab.analyses.analysis import Analysis, AnalysisError
from bayesify.lab.analyses.sample_sizes import HEADS
from bayesify.lab.analyses.style import STYLE, add_legend, axes_grid, colour
from bayesify.lab.metrics import accuracy, ece, nll
from bayesify.lab.runs import Run
from bayesify.lab.trained import Trained
from bayesify.layers import bayesian_layers
from bayesify.prediction.results import Classification

NAMES = ("accuracy", "nll", "ece")
Measured = tuple[dict[str, float], dict[str, Tensor], float]
"""The metrics of a mixture, those (K,) of its components, and how much these disagree."""


@dataclass(frozen=True)
class ComponentCurves(Analysis):
    """Metrics of the mixture, and of its components by themselves, over epochs or numbers of components.

    `mixture` has a value for each x, `components` the values (K,) of the components for each. `disagreement` is the
    share of inputs on which two components differ, averaged over pairs and divided by their mean error; it is NaN where
    none errs or there is one component.
    """

    x: np.ndarray
    over: str
    mixture: Mapping[str, np.ndarray]
    components: Mapping[str, Sequence[np.ndarray]]
    disagreement: np.ndarray

    def columns(self) -> dict[str, np.ndarray]:
        table = {self.over: self.x, **self.mixture}
        for name, values in self.components.items():
            for how, summary in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                table[f"{name}_component_{how}"] = np.array([summary(each) for each in values])
        return table | {"disagreement": self.disagreement}

    @matplotlib.rc_context(STYLE)
    def figure(self) -> Figure:
        """Each metric over x, and the disagreement against accuracy and NLL."""
        figure, grid = axes_grid(1, len(NAMES) + 2)
        for axes, name in zip(grid[0], NAMES, strict=False):
            self._draw(axes, name)
        for axes, name in zip(grid[0, len(NAMES) :], ("accuracy", "nll"), strict=True):
            scale = 100 if HEADS[name].endswith("%") else 1
            axes.plot(scale * self.mixture[name], self.disagreement, "o", ms=4, color=colour(2))
            axes.set(xlabel=HEADS[name], ylabel="disagreement / error")
        add_legend(figure, grid[0, 0])
        return figure

    def _draw(self, axes: Axes, name: str) -> None:
        scale = 100 if HEADS[name].endswith("%") else 1
        for x, values in zip(self.x, self.components[name], strict=True):
            axes.plot([x] * len(values), scale * values, ".", color=colour(1), alpha=0.5)
        means = [scale * values.mean() for values in self.components[name]]
        axes.plot(self.x, means, color=colour(1), lw=1, label="components")
        axes.plot(self.x, scale * self.mixture[name], "o-", ms=3, color=colour(0), label="mixture")
        axes.set(xlabel=self.over, ylabel=HEADS[name])


def component_curves(runs: Sequence[Run], *, samples: int | None = None, seed: int = 0) -> ComponentCurves:
    """The mixture and its components in runs with different numbers of components (Rank-1, figures 3 and 4).

    Args:
        runs: Trained runs, such as those of `ablation(recipe, "method.components", …)`.
        samples: The number of draws, a multiple of the number of components; as in `by.predict` by default.
        seed: The seed of the draws.

    Returns:
        The curves, over the number of components.

    Raises:
        AnalysisError: If there are no runs, or one does not predict classes or has no components.
    """
    if not runs:
        raise AnalysisError("no runs: give at least one")
    found = []
    for run in runs:
        trained = run.load()
        found.append((_components(trained), _measure(trained, run, samples, seed)))
    found.sort(key=lambda each: each[0])
    return _curves([count for count, _ in found], "components", [each for _, each in found])


def checkpoint_curves(run: Run, *, samples: int | None = None, seed: int = 0) -> ComponentCurves:
    """The mixture and its components over the epochs that `training.keep_epochs` kept (Rank-1, figure 5).

    Args:
        run: A trained run.
        samples: The number of draws, a multiple of the number of components; as in `by.predict` by default.
        seed: The seed of the draws.

    Returns:
        The curves, over epochs.

    Raises:
        AnalysisError: If no epochs were kept, or the run does not predict classes or has no components.
    """
    epochs = run.kept_epochs
    if not epochs:
        raise AnalysisError(f"{run.folder}: kept no epochs; train with training.keep_epochs=10, for the last ten")
    return _curves(epochs, "epoch", [_measure(run.load_epoch(epoch), run, samples, seed) for epoch in epochs])


def component_metrics(p: Classification, y: Tensor, components: int) -> Measured:
    """Metrics of a prediction, of the draws of each of K components by themselves, and the components' disagreement.

    Args:
        p: A prediction with `draws=True`; draw s is of component s modulo K.
        y: The true labels (N,).
        components: The number K of components.

    Returns:
        The metrics of the mixture, those of the components (K,), and the normalised disagreement.

    Raises:
        AnalysisError: If the draws were not kept, or are not a multiple of K.
    """
    if p.draws is None or len(p.draws) % components:
        kept = "none" if p.draws is None else len(p.draws)
        raise AnalysisError(f"{kept} draws were kept; expected a multiple of {components}, the number of components")
    y = y.to(p.draws.device)
    each = p.draws.double().log_softmax(-1).unflatten(0, (-1, components))
    members = each.logsumexp(0) - np.log(len(each))  # (K, N, classes)
    found = [_metrics(member, y) for member in members]
    labels = members.argmax(-1)
    differing = (labels[:, None] != labels[None]).double().mean(-1).sum() / max(components * (components - 1), 1)
    errors = (labels != y).double().mean()
    disagreement = float(differing / errors) if components > 1 and errors > 0 else float("nan")
    return _metrics(p.log_probs, y), {name: torch.tensor([one[name] for one in found]) for name in NAMES}, disagreement


def _metrics(log_probs: Tensor, y: Tensor) -> dict[str, float]:
    probs = log_probs.exp()
    return {
        "accuracy": float(accuracy(probs, y)),
        "nll": float(nll(log_probs, y)),
        "ece": float(ece(probs, y)),
    }


def _components(trained: Trained) -> int:
    """The number of components that rows keep through all layers."""
    methods = [layer.method for layer in bayesian_layers(trained.model).values()]
    counts = {method.components for method in methods if method.ties_components}
    if len(counts) != 1:
        raise AnalysisError(
            f"the model has {sorted(counts) or 'no'} components that rows keep in all layers; expected a method such "
            "as Rank1, IBNN, BatchEnsemble, LowRankEnsemble or Ensemble"
        )
    return counts.pop()


def _measure(trained: Trained, run: Run, samples: int | None, seed: int) -> Measured:
    count, test = _components(trained), run.data().test
    batches = trained.prepared_batches(test, trained.recipe.evaluation.batch_size)
    p = by.predict(trained.model, batches, samples, seed=seed, likelihood=trained.likelihood, draws=True)
    if not isinstance(p, Classification):
        raise AnalysisError(f"{run.folder}: predicts real numbers; components are compared by classes")
    return component_metrics(p, test.targets, count)


def _curves(x: Sequence[int], over: str, found: Sequence[Measured]) -> ComponentCurves:
    return ComponentCurves(
        np.array(x),
        over,
        {name: np.array([mixture[name] for mixture, _, _ in found]) for name in NAMES},
        {name: [components[name].numpy() for _, components, _ in found] for name in NAMES},
        np.array([disagreement for _, _, disagreement in found]),
    )
