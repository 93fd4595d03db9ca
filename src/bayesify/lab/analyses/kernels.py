"""The posterior mean and variance of a convolution's kernels, as images (BayesAdapter, figure 7)."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from bayesify.conversion.drawn_network import seeded_draws
from bayesify.lab.analyses.analysis import Analysis, AnalysisError
from bayesify.lab.analyses.style import STYLE, WIDTH
from bayesify.layers import BayesianLayer, bayesian_layers
from bayesify.layers.base import unwrapped
from bayesify.methods.draw_design import DrawDesign

DRAWS = 1000
"""The number of draws from which moments without a closed form are estimated."""


@dataclass(frozen=True)
class KernelMoments(Analysis):
    """Mean and variance (out, in, height, width) of a layer's weight; `draws` is 0 if they are exact."""

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
        """An image for each output channel: in colour for three input channels, else of one input channel."""
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
    """The posterior mean and variance of a convolution's weight.

    They are exact for `MeanField`, and for methods whose components are points. Others are estimated from draws, so
    that the relative error of a variance is about sqrt(2 / draws).

    Args:
        model: A converted network.
        layer: The name of a converted convolution; the first one by default.
        draws: The number of draws, if they are needed.
        seed: The seed of the draws.

    Returns:
        The moments.

    Raises:
        AnalysisError: If there is no such layer.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Conv2d(3, 64, 7), nn.ReLU()), by.MeanField())
    >>> found = kernel_moments(model)
    >>> found.mean.shape, found.draws
    ((64, 3, 7, 7), 0)
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
        what = (
            "no such layer"
            if name not in layers
            else f"a {layers[name].plain.__name__}, which is not a two-dimensional convolution"
        )
        found = "there is none" if not fitting else f"there are {', '.join(fitting[:5])}"
        asked = "" if name is None else f"layer={name!r} is {what}; "
        raise AnalysisError(f"{asked}expected a converted two-dimensional convolution: {found}")
    return name, layers[name]


def _moments(layer: BayesianLayer, draws: int, seed: int) -> tuple[Tensor, Tensor, int]:
    (site,) = layer.sites().values()
    log_std = site.posterior.get("weight_log_std")
    if log_std is not None:
        return site.base["weight"].detach(), (2 * log_std).exp(), 0
    if not layer.method.noisy:
        perturbation, count = layer.method.mean(site), 0
    elif isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise AnalysisError(f"draws={draws!r}: expected an integer >= 2")
    else:
        request = seeded_draws(layer.method, site, layer.site_name, DrawDesign(seed, kind="independent"), range(draws))
        perturbation, count = layer.method.draw(site, request), draws
    weights = layer.operation.folded(site.base, perturbation).get("weight", site.base["weight"].unsqueeze(0))
    return *_mean_and_variance(weights), count


def _mean_and_variance(stack: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance of equally likely values."""
    return stack.mean(0), stack.var(0, correction=0)


def _tiles(pictures: np.ndarray) -> np.ndarray:
    """Images (n, height, width, …) tiled in a square, one pixel apart; gaps are NaN."""
    columns = int(np.ceil(np.sqrt(len(pictures))))
    rows = -(-len(pictures) // columns)
    padded = np.full((rows * columns, pictures.shape[1] + 1, pictures.shape[2] + 1, *pictures.shape[3:]), np.nan)
    padded[: len(pictures), :-1, :-1] = pictures
    grid = padded.reshape(rows, columns, *padded.shape[1:])
    mosaic: np.ndarray = np.concatenate([np.concatenate(list(row), 1) for row in grid], 0)[:-1, :-1]
    return mosaic
