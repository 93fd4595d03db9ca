"""The posterior mean and variance of a convolution's kernels as pictures (BayesAdapter, figure 7)."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from bayesify.lab.analyses.analysis import Analysis, AnalysisError
from bayesify.lab.analyses.style import STYLE, WIDTH
from bayesify.layers import BayesianLayer, bayesian_layers
from bayesify.selection import unwrapped
from bayesify.values import Wanted, draws_into, member_into

DRAWS = 1000
"""So many draws are measured where the moments are in no closed form here."""


@dataclass(frozen=True)
class KernelMoments(Analysis):
    """Mean and variance (out, in, height, width) of a layer's weight; `draws` of them, or 0 where they are exact."""

    layer: str
    mean: np.ndarray
    variance: np.ndarray
    draws: int

    def columns(self) -> dict[str, np.ndarray]:
        places = np.indices(self.mean.shape).reshape(4, -1)
        named = dict(zip(("output", "input", "y", "x"), places, strict=True))
        return named | {"mean": self.mean.ravel(), "variance": self.variance.ravel()}

    @matplotlib.rc_context({**STYLE, "axes.grid": False})
    def figure(self, channel: int = 0) -> Figure:
        """A picture for each output channel, in colours where there are three inputs, else of one input channel."""
        if not 0 <= channel < self.mean.shape[1]:
            raise AnalysisError(f"channel={channel!r}: expected 0 to {self.mean.shape[1] - 1}")
        figure = Figure(figsize=(2 * WIDTH + 1.4, WIDTH + 0.6), layout="constrained")
        grid = figure.subplots(1, 2)
        highest = float(np.abs(self.mean).max()) or 1.0
        self._mosaic(grid[0], self.mean, (-highest, highest), "RdBu_r", channel, "posterior mean")
        top = float(self.variance.max()) or 1.0
        self._mosaic(grid[1], self.variance, (0, top), "viridis", channel, "posterior variance")
        counted = "" if not self.draws else f", from {self.draws} draws"
        seen = "" if self.mean.shape[1] in (1, 3) else f", input channel {channel}"
        figure.suptitle(f"{self.layer or 'the layer'}: {len(self.mean)} output channels{seen}{counted}", fontsize=9)
        return figure

    def _mosaic(
        self, axes: Axes, values: np.ndarray, limits: tuple[float, float], palette: str, channel: int, title: str
    ) -> None:
        low, high = limits
        if values.shape[1] == 3:
            axes.imshow(_tiles(np.moveaxis((values - low) / (high - low), 1, -1)), interpolation="nearest")
            axes.set_xlabel(f"colours from {low:.2g} to {high:.2g}", fontsize=9)
        else:
            shown = axes.imshow(_tiles(values[:, channel]), vmin=low, vmax=high, cmap=palette, interpolation="nearest")
            bar = axes.figure.colorbar(shown, ax=axes, shrink=0.8)
            bar.ax.ticklabel_format(axis="y", scilimits=(-2, 3))
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, fontsize=10)
        axes.spines[:].set_visible(False)


def kernel_moments(model: nn.Module, layer: str | None = None, *, draws: int = DRAWS, seed: int = 0) -> KernelMoments:
    """The moments of a Bayesian convolution's weight under the posterior; the first convolution's unless named.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Conv2d(3, 64, 7), nn.ReLU()), by.MeanField())
    >>> found = kernel_moments(model)
    >>> found.mean.shape, found.draws
    ((64, 3, 7, 7), 0)

    They are exact for a `MeanField`, μ and exp(2ψ), and where components are points, over these. Other families'
    are measured on `draws` draws, so that a variance is right to about sqrt(2/draws) of itself.
    """
    name, chosen = _convolution(model, layer)
    with torch.no_grad():
        mean, variance, count = _moments(chosen, draws, seed)
    return KernelMoments(name, mean.cpu().numpy(), variance.cpu().numpy(), count)


def _convolution(model: nn.Module, name: str | None) -> tuple[str, BayesianLayer]:
    layers = bayesian_layers(unwrapped(model))
    fitting = [each for each, layer in layers.items() if layer.plain is nn.Conv2d]
    if name is None and fitting:
        name = fitting[0]
    if name not in fitting:
        what = "no such layer" if name not in layers else f"a {layers[name].plain.__name__}, which has no picture"
        found = "no Bayesian layer is one" if not fitting else f"there are {', '.join(fitting[:5])}"
        asked = "" if name is None else f"layer={name!r} is {what}; "
        raise AnalysisError(f"{asked}expected a two-dimensional convolution that was converted: {found}")
    return name, layers[name]


def _moments(layer: BayesianLayer, draws: int, seed: int) -> tuple[Tensor, Tensor, int]:
    log_std = layer.posterior.tensors().get("weight_log_std")
    if log_std is not None:
        return layer.weight.detach(), (2 * log_std).exp(), 0
    if not layer.family.noisy:
        members = [member_into(layer, k).get("weight", layer.weight) for k in range(layer.family.components)]
        return *_over(torch.stack(members)), 0
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise AnalysisError(f"draws={draws!r}: expected a whole number >= 2")
    return *_over(draws_into(layer, Wanted(seed, range(draws))).get("weight", layer.weight.unsqueeze(0))), draws


def _over(stack: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance of what may come, each as likely."""
    return stack.mean(0), stack.var(0, correction=0)


def _tiles(pictures: np.ndarray) -> np.ndarray:
    """Pictures (n, height, width, …) in a mosaic about as wide as high, one pixel apart; NaN is nothing."""
    columns = int(np.ceil(np.sqrt(len(pictures))))
    rows = -(-len(pictures) // columns)
    padded = np.full((rows * columns, pictures.shape[1] + 1, pictures.shape[2] + 1, *pictures.shape[3:]), np.nan)
    padded[: len(pictures), :-1, :-1] = pictures
    grid = padded.reshape(rows, columns, *padded.shape[1:])
    mosaic: np.ndarray = np.concatenate([np.concatenate(list(row), 1) for row in grid], 0)[:-1, :-1]
    return mosaic
