"""The loss between components: on the line through two, on the plane through three or more (iBNN, figure 2).

Networks in between have weighted sums of the components' weights. Batch norms keep the statistics of the trained model,
which all components share (those of an `Ensemble` are blended like its weights); if batches are given, the statistics
are estimated anew at every point. A result says which of these was done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import bayesify as by
from bayesify.batches import input_of, mapped, run
from bayesify.lab.analyses.analysis import Analysis, AnalysisError
from bayesify.lab.analyses.style import INK, STYLE, axes_grid, colour
from bayesify.lab.analyses.weights import (
    WeightSpace,
    add_numbers,
    inner_products,
    principal_plane,
    require_components,
)
from bayesify.prediction.likelihood import Likelihood

Pairs = tuple[Tensor, Tensor] | Iterable[tuple[Any, Tensor]]
Score = tuple[float, float | None]
LOSS, ACCURACY = "loss, nats a row", "accuracy, %"
LEVELS = 21
FLATTEST = 0.4
"""The smallest ratio of height to width of a plane, and of width to height."""


@dataclass(frozen=True)
class LossLine(Analysis):
    """Loss and, for classes, accuracy by `position` between the components `ends[0]` (0) and `ends[1]` (1)."""

    ends: tuple[int, int]
    position: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray | None
    statistics: str

    @property
    def barrier(self) -> float:
        """The largest excess of the loss over linear interpolation between the ends."""
        inside = (self.position >= 0) & (self.position <= 1)
        straight = np.interp(self.position, [0, 1], np.interp([0, 1], self.position, self.loss))
        return float((self.loss - straight)[inside].max())

    def columns(self) -> dict[str, np.ndarray]:
        table = {"position": self.position, "loss": self.loss}
        return table if self.accuracy is None else table | {"accuracy": self.accuracy}

    @matplotlib.rc_context(STYLE)
    def figure(self) -> Figure:
        """Loss and accuracy along the line, with the components marked."""
        curves = {LOSS: self.loss} | ({} if self.accuracy is None else {ACCURACY: 100 * self.accuracy})
        figure, grid = axes_grid(1, len(curves))
        for i, (axes, (name, values)) in enumerate(zip(grid.flat, curves.items(), strict=True)):
            axes.plot(self.position, values, color=colour(i), lw=1.8)
            at_ends = np.interp([0, 1], self.position, values)
            axes.plot([0, 1], at_ends, "o", ms=6, color=INK)
            axes.set(ylabel=name, xticks=[0, 1], xlabel="from one component to the other")
            axes.set_xticklabels([f"component {k}" for k in self.ends])
        figure.suptitle(f"batch statistics: {self.statistics}", fontsize=9)
        return figure


@dataclass(frozen=True)
class LossPlane(Analysis):
    """Loss and, for classes, accuracy (len(y), len(x)) on the plane of the components' two principal axes.

    `points` are the coordinates of `components`, `explained` is the share of their variance in the plane: 1 for three.
    """

    components: tuple[int, ...]
    points: np.ndarray
    x: np.ndarray
    y: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray | None
    explained: float
    statistics: str

    def columns(self) -> dict[str, np.ndarray]:
        x, y = np.meshgrid(self.x, self.y)
        table = {"x": x.ravel(), "y": y.ravel(), "loss": self.loss.ravel()}
        return table if self.accuracy is None else table | {"accuracy": self.accuracy.ravel()}

    @matplotlib.rc_context({**STYLE, "axes.grid": False})
    def figure(self) -> Figure:
        """Loss and accuracy as filled contours, the loss on a logarithmic scale because it grows fast outside."""
        figure, grid = axes_grid(1, 1 if self.accuracy is None else 2)
        loss = self.loss.clip(1e-9)
        levels = np.geomspace(loss.min(), max(float(loss.max()), 1.0001 * float(loss.min())), LEVELS)
        shown = grid[0, 0].contourf(self.x, self.y, loss, levels, norm=LogNorm(), cmap="viridis_r")
        ticks = levels[:: LEVELS // 5]
        figure.colorbar(shown, ax=grid[0, 0], label=LOSS, ticks=ticks).ax.set_yticklabels([f"{t:.2g}" for t in ticks])
        if self.accuracy is not None:
            shown = grid[0, 1].contourf(self.x, self.y, 100 * self.accuracy, LEVELS, cmap="viridis")
            figure.colorbar(shown, ax=grid[0, 1], label=ACCURACY)
        for axes in grid.flat:
            axes.scatter(*self.points.T, s=60, color=INK, lw=0)
            add_numbers(axes, self.points, self.components)
            axes.set(xlabel="first principal axis", ylabel="second principal axis")
        held = f"{100 * self.explained:.0f}% of the components' variance"
        figure.suptitle(f"in the plane: {held}; batch statistics: {self.statistics}", fontsize=9)
        return figure


def loss_line(
    model: nn.Module,
    data: Pairs,
    a: int = 0,
    b: int = 1,
    *,
    steps: int = 21,
    beyond: float = 0.25,
    seed: int | None = None,
    likelihood: Likelihood | None = None,
    recalibrate: Iterable[Any] | None = None,
) -> LossLine:
    """The loss on the line from component a to component b.

    Args:
        model: A converted network with at least two components.
        data: A pair (inputs, targets), or batches of such pairs.
        a: The component at position 0.
        b: The component at position 1.
        steps: The number of points from end to end.
        beyond: How far the line extends past either end, as a share of its length.
        seed: If given, components are single draws (without dropout) instead of their means.
        likelihood: What the outputs mean; `by.Categorical()` by default.
        recalibrate: Batches of training inputs, to estimate batch statistics at every point.

    Returns:
        Loss and accuracy along the line.

    Raises:
        AnalysisError: If the model has too few components, or an argument is not allowed.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.BatchEnsemble(4))
    >>> found = loss_line(model, (torch.randn(50, 4), torch.randint(3, (50,))), 0, 2)
    >>> found.loss.shape, found.statistics
    ((31,), 'none')
    """
    _check(steps, beyond)
    blend = _Blend(model, [a, b], seed, recalibrate)
    position, pairs = _line(steps, beyond), _pairs(data)
    found = [blend.score([1 - t, t], pairs, likelihood) for t in position]
    loss, accuracy = _arrays(found, (len(position),))
    return LossLine((a, b), position, loss, accuracy, blend.statistics)


def loss_plane(
    model: nn.Module,
    data: Pairs,
    components: Sequence[int] | None = None,
    *,
    steps: int = 15,
    beyond: float = 0.25,
    seed: int | None = None,
    likelihood: Likelihood | None = None,
    recalibrate: Iterable[Any] | None = None,
) -> LossPlane:
    """The loss on the plane of the two principal axes of three or more components, which are projected onto it.

    Args:
        model: A converted network with at least three components.
        data: A pair (inputs, targets), or batches of such pairs.
        components: The components that define the plane; all by default.
        steps: The number of points along each axis.
        beyond: How far the grid extends past the components, as a share of its width.
        seed, likelihood, recalibrate: As in `loss_line`.

    Returns:
        Loss and accuracy on the grid.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.BatchEnsemble(4))
    >>> found = loss_plane(model, (torch.randn(50, 4), torch.randint(3, (50,))), [0, 1, 3], steps=5)
    >>> found.loss.shape, round(found.explained, 6)
    ((5, 5), 1.0)
    """
    _check(steps, beyond)
    chosen = list(range(require_components(model, 3))) if components is None else list(components)
    if len(set(chosen)) < 3:
        raise AnalysisError(f"components={chosen}: a plane needs at least three; use loss_line for two")
    blend = _Blend(model, chosen, seed, recalibrate)
    plane = principal_plane(inner_products(blend.space, blend.values))
    x, y = _grid(plane.points.numpy(), steps, beyond)
    shares = [1 / len(chosen) + plane.directions @ torch.tensor([u, v]) for v in y for u in x]
    pairs = _pairs(data)
    found = [blend.score(each.tolist(), pairs, likelihood) for each in shares]
    loss, accuracy = _arrays(found, (len(y), len(x)))
    explained = float(plane.explained[:2].sum())
    return LossPlane(tuple(chosen), plane.points.numpy(), x, y, loss, accuracy, explained, blend.statistics)


class _Blend:
    """A plain copy of a model, to which weighted sums of its components' weights are written."""

    def __init__(
        self, model: nn.Module, chosen: Sequence[int], seed: int | None, recalibrate: Iterable[Any] | None
    ) -> None:
        _check_components(require_components(model, 2), chosen)
        self.space = WeightSpace(model)
        self.values = [self.space.member(k) if seed is None else self.space.draw(seed, k) for k in chosen]
        has_norms = any(isinstance(module, _BatchNorm) for module in self.space.drawn.network.modules())
        device = next(self.space.drawn.network.parameters()).device
        self.batches = None
        if recalibrate is not None and has_norms:
            self.batches = [mapped(input_of(batch), lambda tensor: tensor.to(device)) for batch in recalibrate]
        kept = "kept" if all(self.space.is_weight) else "blended"
        self.statistics = "none" if not has_norms else kept if self.batches is None else "estimated anew"

    @torch.no_grad()
    def score(
        self, shares: Sequence[float], pairs: Iterable[tuple[Any, Tensor]], likelihood: Likelihood | None
    ) -> Score:
        """Loss and accuracy of the weighted sum with these shares."""
        each = zip(self.space.names, zip(*self.values, strict=True), strict=True)
        sums = [_sum(name.rpartition(".")[2], tensors, shares) for name, tensors in each]
        network = self.space.write(sums)
        if self.batches is not None:
            by.recalibrate(network, self.batches)
        return _score(network, pairs, likelihood or by.Categorical())


def _sum(name: str, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Σ share · tensor; a running variance stays above the smallest one, even past the ends."""
    total = torch.stack([share * tensor for share, tensor in zip(shares, tensors, strict=True)]).sum(0)
    return torch.maximum(total, torch.stack(list(tensors)).amin(0)) if name == "running_var" else total


def _score(network: nn.Module, pairs: Iterable[tuple[Any, Tensor]], likelihood: Likelihood) -> Score:
    device = next(network.parameters()).device
    loss, right, rows = 0.0, 0.0, 0
    for x, y in pairs:
        output, y = run(network, mapped(x, lambda tensor: tensor.to(device))), y.to(device)
        loss -= float(likelihood.log_prob(output, y).double().sum())
        rows += len(y)
        if isinstance(likelihood, by.Categorical):
            hits = output.argmax(likelihood.class_dim) == y
            right += float(hits.double().reshape(len(y), -1).mean(1).sum())
    if not rows:
        raise AnalysisError("data has no rows; give (inputs, targets), or a loader of such pairs")
    return loss / rows, right / rows if isinstance(likelihood, by.Categorical) else None


def _pairs(data: Pairs) -> Iterable[tuple[Any, Tensor]]:
    """Batches that can be read again for every point."""
    if isinstance(data, tuple):
        return [data]  # a tuple is one pair; batches come in a list or a loader
    return list(data) if isinstance(data, Iterator) else data


def _arrays(found: Sequence[Score], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    loss = np.array([each for each, _ in found]).reshape(shape)
    accuracy = None if found[0][1] is None else np.array([each for _, each in found]).reshape(shape)
    return loss, accuracy


def _line(steps: int, beyond: float) -> np.ndarray:
    """Positions from 0 to 1 inclusive, and beyond with the same spacing."""
    past = int(np.ceil(beyond * (steps - 1)))
    return np.arange(-past, steps + past) / (steps - 1)


def _grid(points: np.ndarray, steps: int, beyond: float) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates along both axes that cover all points."""
    low, high = points.min(0), points.max(0)
    half = (0.5 + beyond) * np.maximum(high - low, FLATTEST * (high - low).max())
    x, y = (middle + width * np.linspace(-1, 1, steps) for middle, width in zip((low + high) / 2, half, strict=True))
    return x, y


def _check(steps: int, beyond: float) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise AnalysisError(f"steps={steps!r}: expected an integer >= 2")
    if not 0 <= beyond < float("inf"):
        raise AnalysisError(f"beyond={beyond!r}: expected a number >= 0")


def _check_components(count: int, chosen: Sequence[int]) -> None:
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(count)):
        raise AnalysisError(f"components {list(chosen)}: expected distinct numbers from 0 to {count - 1}")
