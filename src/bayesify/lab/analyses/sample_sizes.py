"""How many draws a prediction needs (EMP, figure 6; BayesAdapter, figure 5a; Rank-1 v1, table 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from bayesify.lab.analyses.analysis import Analysis, AnalysisError
from bayesify.lab.analyses.style import INK, STYLE, add_legend, axes_grid, colour
from bayesify.lab.metrics import accuracy, ece, nll
from bayesify.prediction.gaussian import GaussianAccumulator
from bayesify.prediction.likelihood import Accumulator, Categorical, ClassAccumulator
from bayesify.prediction.results import Classification, Prediction, Regression

POINTS = 12
"""The default number of sizes."""
HEADS = {
    "accuracy": "accuracy, %",
    "nll": "NLL, nats",
    "ece": "ECE, %",
    "rmse": "RMSE",
    "log_density": "log density, nats",
}


@dataclass(frozen=True)
class SampleSizes(Analysis):
    """Metrics of the first s draws in several orders, (orders, sizes), and of each single draw, (draws,)."""

    sizes: np.ndarray
    curves: Mapping[str, np.ndarray]
    single: Mapping[str, np.ndarray]
    mean_network: Mapping[str, float]

    def columns(self) -> dict[str, np.ndarray]:
        orders = len(next(iter(self.curves.values())))
        table = {"order": np.repeat(np.arange(orders), len(self.sizes)), "draws": np.tile(self.sizes, orders)}
        return table | {name: values.ravel() for name, values in self.curves.items()}

    @matplotlib.rc_context(STYLE)
    def figure(self) -> Figure:
        """Each metric against the number of draws: the mean and range over orders, and single draws as dots."""
        figure, grid = axes_grid(1, len(self.curves))
        for axes, name in zip(grid.flat, self.curves, strict=True):
            self._draw(axes, name)
        add_legend(figure, grid[0, 0])
        return figure

    def _draw(self, axes: Axes, name: str) -> None:
        scale = 100 if HEADS[name].endswith("%") else 1
        values, single = scale * self.curves[name], scale * self.single[name]
        axes.plot(np.arange(1, len(single) + 1), single, ".", color=colour(1), alpha=0.4, label="single draws")
        axes.fill_between(self.sizes, values.min(0), values.max(0), color=colour(0), alpha=0.2, lw=0)
        axes.plot(self.sizes, values.mean(0), "o-", ms=3, color=colour(0), label="first s draws")
        if name in self.mean_network:
            level = scale * self.mean_network[name]
            axes.axhline(level, color=INK, ls="--", lw=1, label="the mean network")
            axes.set_title(f"the mean network: {level:.3g}{'%' if scale == 100 else ''}", fontsize=9)
        shown = np.concatenate([values.ravel(), single])  # without the mean network, which may be far off
        room = 0.08 * np.ptp(shown) or 0.1
        axes.set_ylim(shown.min() - room, shown.max() + room)
        axes.set(xscale="log", xlabel="number of draws", ylabel=HEADS[name])
        ticks = [size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if size <= self.sizes[-1]]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()


def sample_sizes(
    predictions: Prediction | Sequence[Prediction],
    y: Tensor,
    *,
    sizes: Sequence[int] | None = None,
    orders: int = 10,
    seed: int = 0,
    mean_network: Prediction | None = None,
) -> SampleSizes:
    """Metrics against the number of draws, from a prediction that kept its draws.

    Nothing is predicted again: draws are added one by one, first in their own order, then in random orders. As all
    orders of the same draws agree at the last size, the spread is too small there; predictions from several seeds show
    the real one.

    Args:
        predictions: One prediction with `draws=True`, or several with different seeds.
        y: The targets.
        sizes: Increasing numbers of draws to measure at; spread from 1 to all by default.
        orders: How many orders of each prediction's draws.
        seed: The seed of the random orders.
        mean_network: The prediction of the mean network, `by.draw(model, None)`, to compare with.

    Returns:
        Accuracy, NLL and ECE for classes; RMSE and log density for real numbers.

    Raises:
        AnalysisError: If the predictions kept no draws, or don't fit `y` or each other.

    >>> import bayesify as by
    >>> x, y = torch.randn(50, 4), torch.randint(3, (50,))
    >>> model = by.convert(torch.nn.Linear(4, 3), by.Rank1(4))
    >>> found = sample_sizes(by.predict(model, x, 20, draws=True), y, sizes=[1, 5, 20])
    >>> found.curves["nll"].shape
    (10, 3)
    """
    some = [predictions] if isinstance(predictions, Prediction) else list(predictions)
    count = _draws(some, y)
    chosen = _sizes(sizes, count)
    rows = [_metrics(p, y, order, chosen) for p in some for order in _orders(count, orders, seed)]
    single = [_metrics(p, y, [s], [1])[0] for p in some for s in range(count)]
    return SampleSizes(
        np.array(chosen),
        {name: np.array([[each[name] for each in row] for row in rows]) for name in rows[0][0]},
        {name: np.array([each[name] for each in single]) for name in single[0]},
        {} if mean_network is None else _basic_metrics(mean_network, y),
    )


def _draws(some: Sequence[Prediction], y: Tensor) -> int:
    """The number of draws that all predictions have kept."""
    for p in some:
        if not isinstance(p, Classification | Regression):
            raise AnalysisError(f"{type(p).__name__}: expected a prediction of classes or of real numbers")
        if p.draws is None:
            raise AnalysisError("the prediction kept no draws; use by.predict(..., draws=True)")
        rows = p.log_probs.shape[:-1] if isinstance(p, Classification) else p.mean.shape
        if y.shape != rows:
            raise AnalysisError(f"predictions are for targets of shape {tuple(rows)}; got {tuple(y.shape)}")
    counts = {p.samples for p in some}
    if len(counts) != 1:
        raise AnalysisError(f"predictions of {sorted(counts)} draws: expected the same number for all")
    return counts.pop()


def _sizes(given: Sequence[int] | None, count: int) -> list[int]:
    if given is None:
        return sorted({round(float(size)) for size in np.geomspace(1, count, POINTS)})
    if not given or list(given) != sorted(set(given)) or given[0] < 1 or given[-1] > count:
        raise AnalysisError(f"sizes={list(given)}: expected increasing numbers from 1 to {count}, the number of draws")
    return list(given)


def _orders(count: int, orders: int, seed: int) -> Iterator[list[int]]:
    """The order of drawing, then random orders."""
    if isinstance(orders, bool) or not isinstance(orders, int) or orders < 1:
        raise AnalysisError(f"orders={orders!r}: expected an integer >= 1")
    yield list(range(count))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(orders - 1):
        yield torch.randperm(count, generator=generator).tolist()


def _metrics(p: Prediction, y: Tensor, order: Sequence[int], sizes: Sequence[int]) -> list[dict[str, float]]:
    """The metrics of the first draws of an order, at each size."""
    accumulator: Accumulator = GaussianAccumulator(keep=True)
    if isinstance(p, Classification):
        accumulator = ClassAccumulator(keep=False)
    found = []
    for s in order[: sizes[-1]]:
        _add(accumulator, p, s)
        if accumulator.count in sizes:
            found.append(_basic_metrics(accumulator.result(), y))
    return found


def _add(accumulator: Accumulator, p: Prediction, s: int) -> None:
    assert p.draws is not None
    if isinstance(accumulator, GaussianAccumulator):
        assert isinstance(p, Regression) and p.draw_stds is not None
        accumulator.add(p.draws[s : s + 1], p.draw_stds[s : s + 1])
    else:
        Categorical().add(accumulator, p.draws[s : s + 1])


def _basic_metrics(p: Prediction, y: Tensor) -> dict[str, float]:
    if isinstance(p, Classification):
        y = y.to(p.log_probs.device)
        found = {"accuracy": accuracy(p.probs, y), "nll": nll(p.log_probs, y), "ece": ece(p.probs, y)}
    else:
        assert isinstance(p, Regression)
        y = y.to(p.mean.device)
        found = {"rmse": (p.mean - y).square().mean().sqrt(), "log_density": p.log_prob(y).mean()}
    return {name: float(value) for name, value in found.items()}
