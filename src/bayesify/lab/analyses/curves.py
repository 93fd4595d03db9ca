"""Regression curves: aleatoric and epistemic uncertainty over one input (iBNN, figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.analyses.analysis import AnalysisError, Chart
from bayesify.lab.analyses.style import INK, colour
from bayesify.lab.models.mlp import mlp
from bayesify.methods.base import Method
from bayesify.prediction.results import Prediction, Regression

GAP = (-1.5, 1.5)
RANGE = 4.0
ROOM = 0.75
BEYOND = 0.25
"""How far a default grid extends past the data on either side, as a share of their range."""


@dataclass(frozen=True)
class Bands(Chart):
    """A predicted curve over x: its mean and standard deviations; `points` (N, 2) are the data."""

    x: np.ndarray
    mean: np.ndarray
    epistemic_std: np.ndarray
    aleatoric_std: np.ndarray
    points: np.ndarray

    @property
    def axis_names(self) -> tuple[str, str]:
        return ("x", "y")

    @classmethod
    def of(cls, p: Prediction, x: Tensor, points: Tensor | None = None) -> Bands:
        """The bands of a prediction for inputs x (N, 1) of a single real target."""
        if not isinstance(p, Regression) or p.mean[0].numel() != 1 or x.numel() != len(p.mean):
            raise AnalysisError(
                f"{type(p).__name__} for inputs of shape {tuple(x.shape)}: expected one real target over one input"
            )
        known = torch.zeros(0, 2) if points is None else points
        each = [part.detach().cpu().flatten().numpy() for part in (x, p.mean, p.epistemic_std, p.aleatoric_std)]
        return cls(each[0], each[1], each[2], each[3], known.cpu().numpy())

    @property
    def std(self) -> np.ndarray:
        """The total predictive standard deviation."""
        total: np.ndarray = np.hypot(self.epistemic_std, self.aleatoric_std)
        return total

    def columns(self) -> dict[str, np.ndarray]:
        names = ("x", "mean", "epistemic_std", "aleatoric_std", "std")
        return {name: getattr(self, name) for name in names}

    def draw(self, axes: Axes) -> None:
        """±2 standard deviations: epistemic only (inner band), and total (outer band)."""
        for std, alpha, label in ((self.std, 0.18, "±2σ, total"), (self.epistemic_std, 0.35, "±2σ, epistemic")):
            axes.fill_between(
                self.x, self.mean - 2 * std, self.mean + 2 * std, color=colour(0), alpha=alpha, lw=0, label=label
            )
        axes.plot(self.x, self.mean, color=colour(0), lw=1.6, label="mean")
        axes.plot(*self.points.T, ".", ms=5, color=colour(1), label="data")
        seen = self.points[:, 1] if len(self.points) else self.mean
        room = ROOM * np.ptp(seen)  # the bands may be far wider
        axes.set_ylim(seen.min() - room, seen.max() + room)
        axes.axhline(0, color=INK, lw=0.4)


def toy_curve(
    points: int = 30, *, gap: tuple[float, float] | None = GAP, noise: float = 3.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs in [-4, 4] outside a gap, and targets y = x³ + noise, each (points, 1).

    Args:
        points: The number of points.
        gap: The interval without points, or None.
        noise: The standard deviation of the noise.
        seed: The seed of points and noise.

    Returns:
        Inputs and targets.

    Raises:
        AnalysisError: If there are fewer than 2 points, or the gap is not inside [-4, 4].

    >>> x, y = toy_curve(30)
    >>> x.shape, bool(((x > -1.5) & (x < 1.5)).any())
    (torch.Size([30, 1]), False)

    iBNN uses 30 points and does not state the noise; a standard deviation of 3 is from Hernández-Lobato and Adams
    (2015).
    """
    low, high = (0.0, 0.0) if gap is None else gap
    if points < 2 or not -RANGE <= low <= high <= RANGE or high - low >= 2 * RANGE:
        raise AnalysisError(
            f"points={points!r}, gap={gap!r}: expected at least 2 points, and a gap inside [-{RANGE}, {RANGE}]"
        )
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(points, 1, generator=generator) * (2 * RANGE - (high - low)) - RANGE).sort(0).values
    x = torch.where(x < low, x, x + high - low)
    return x, x**3 + noise * torch.randn(points, 1, generator=generator)


@dataclass(frozen=True)
class FittedCurve:
    """A Bayesian network with one input and one output, trained on standardised data."""

    model: nn.Module
    likelihood: by.Gaussian
    x: Tensor
    y: Tensor

    def bands(self, grid: Tensor | None = None, *, samples: int = 200, seed: int = 0) -> Bands:
        """The bands over a grid (N, 1), in the data's own units; by default over the data and somewhat beyond."""
        if grid is None:
            low, high = float(self.x.min()), float(self.x.max())
            past = BEYOND * (high - low)
            grid = torch.linspace(low - past, high + past, 200).to(self.x)[:, None]
        inputs = _standard(grid, self.x)
        p = by.predict(self.model, inputs, samples, seed=seed, likelihood=self.likelihood)
        found = Bands.of(p, grid, torch.cat([self.x, self.y], 1))
        mean, std = float(self.y.mean()), float(self.y.std(correction=0))
        return replace(
            found,
            mean=mean + std * found.mean,
            epistemic_std=std * found.epistemic_std,
            aleatoric_std=std * found.aleatoric_std,
        )


def fit_curve(
    method: Method,
    x: Tensor,
    y: Tensor,
    *,
    hidden: Sequence[int] = (256,),
    steps: int = 1000,
    lr: float = 0.01,
    seed: int = 0,
) -> FittedCurve:
    """Fit a curve with a ReLU network that has a method on every layer, with Adam on the ELBO and learned noise.

    The weight of the KL grows over the first two thirds of training.

    Args:
        method: The method, such as `by.IBNN(4)`.
        x: Inputs (N, 1).
        y: Targets (N, 1).
        hidden: The sizes of the hidden layers; the paper has one to five layers of 256.
        steps: The number of training steps, each on all data.
        lr: The learning rate.
        seed: The seed of weights and noise.

    Returns:
        The trained network; `bands()` are its predictions.

    Raises:
        AnalysisError: If x and y are not of shape (N, 1).
    """
    if x.shape != y.shape or x.dim() != 2 or x.shape[1] != 1:
        raise AnalysisError(f"x has shape {tuple(x.shape)}, y {tuple(y.shape)}: expected (N, 1) for both")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = by.convert(mlp(1, 1, hidden=hidden), {"*": method}).to(x.device)
        likelihood = by.Gaussian("learned").to(x.device)
        groups = [*by.parameter_groups(model, lr=lr), {"params": list(likelihood.parameters())}]
        optimizer = torch.optim.Adam(groups, lr=lr)
        inputs, targets = _standard(x, x), _standard(y, y)
        for step in range(steps):
            optimizer.zero_grad()
            beta = by.anneal(step, 2 * steps / 3)
            by.elbo(model, inputs, targets, n=len(x), likelihood=likelihood, beta=beta).loss.backward()
            optimizer.step()
    return FittedCurve(model.eval(), likelihood, x, y)


def _standard(values: Tensor, like: Tensor) -> Tensor:
    return (values - like.mean(0)) / like.std(0, correction=0)
