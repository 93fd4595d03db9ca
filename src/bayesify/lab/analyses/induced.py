"""The prior of a weight that rank-1 factors induce (Rank-1, figure 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.distributions import Distribution, InverseGamma, PowerTransform, TransformedDistribution

import bayesify as by
from bayesify.lab.analyses.analysis import AnalysisError, Chart
from bayesify.lab.analyses.style import INK, colour
from bayesify.methods.distributions import prior

SAMPLES = 50_000
"""The number of factors: evenly spread quantiles, where the distribution has them, else draws."""
AT_ONCE = 2_000_000


@dataclass(frozen=True)
class InducedPriors(Chart):
    """The densities of a weight w' = w r s over a grid, by the prior of its factors; `normal` is that of w alone."""

    grid: np.ndarray
    densities: Mapping[str, np.ndarray]
    normal: np.ndarray

    @property
    def axis_names(self) -> tuple[str, str]:
        return ("weight", "density")

    def columns(self) -> dict[str, np.ndarray]:
        return {"weight": self.grid, **self.densities, "no factors": self.normal}

    def draw(self, axes: Axes) -> None:
        axes.plot(self.grid, self.normal, color=INK, ls="--", lw=1, label="no factors")
        for i, (name, density) in enumerate(self.densities.items()):
            axes.plot(self.grid, density, color=colour(i), lw=1.4, label=name)


def student_factor(freedom: float) -> Distribution:
    """The factor r with which w' = w r has Student's t: r² is inverse-gamma with ν/2 and ν/2.

    Args:
        freedom: The degrees of freedom ν.

    Returns:
        The distribution of r.
    """
    if not freedom > 0:
        raise AnalysisError(f"freedom={freedom!r}: expected a number > 0")
    half = torch.tensor(freedom / 2)
    return TransformedDistribution(InverseGamma(half, half), PowerTransform(torch.tensor(0.5)))


def induced_priors(
    priors: Mapping[str, by.Rank1 | Distribution],
    *,
    weight_std: float = 1.0,
    both: bool = False,
    grid: Tensor | None = None,
    seed: int = 0,
) -> InducedPriors:
    """The density of w' = w r s where w ~ Normal(0, weight_std²), and r, or both r and s, have a prior.

    It is the mean of Normal(0, (weight_std · r s)²) over draws of the factors. Where factors may be zero it is infinite
    at a weight of zero, so that the grid should leave that out.

    Args:
        priors: By name, `Rank1`, whose options say which prior, or any distribution of a factor.
        weight_std: The standard deviation of w.
        both: Whether s has the prior too, instead of being 1.
        grid: The weights at which densities are computed; by default an even number from -4 to 4 standard deviations.
        seed: The seed of the draws.

    Returns:
        The densities.

    Raises:
        AnalysisError: If there are no priors, or a `Rank1` is not sized: its `prior_std` must be given.

    >>> found = induced_priors(
    ...     {"Normal": by.Rank1(prior_std=1.0), "Cauchy": by.Rank1(posterior="cauchy", prior_std=1.0)}
    ... )
    >>> bool(found.densities["Cauchy"][0] > found.densities["Normal"][0] > found.normal[0])  # heavier tails
    True
    """
    if not priors or not weight_std > 0:
        raise AnalysisError(
            f"weight_std={weight_std!r} and {len(priors)} priors: expected a number > 0, and at least one"
        )
    w = torch.linspace(-4 * weight_std, 4 * weight_std, 200) if grid is None else grid.flatten()
    w = w.double()
    densities = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, given in priors.items():
            factor = _factor(name, given)
            draws = _spread(factor)
            if both:
                draws = draws * _spread(factor)
            densities[name] = _scale_mixture(w, weight_std * draws.abs()).numpy()
    return InducedPriors(w.numpy(), densities, _scale_mixture(w, torch.tensor([weight_std]).double()).numpy())


def _factor(name: str, given: by.Rank1 | Distribution) -> Distribution:
    if isinstance(given, Distribution):
        return given
    if given.prior_std is None:
        raise AnalysisError(f"{name}: {given} has no prior_std; give it, as there is no network to derive it from")
    return prior(given.prior or given.posterior, given.prior_mean, given.prior_std, torch.zeros(1))


def _spread(factor: Distribution) -> Tensor:
    """Values of a distribution in random order."""
    try:
        found = factor.icdf((torch.arange(SAMPLES).double() + 0.5) / SAMPLES)
    except NotImplementedError:
        found = factor.sample(torch.Size([SAMPLES]))
    return found.double().flatten()[torch.randperm(SAMPLES)]


def _scale_mixture(w: Tensor, scales: Tensor) -> Tensor:
    """The mean density of Normal(0, scale²) over the scales, at each weight."""
    parts = scales.clamp_min(1e-12).split(max(1, AT_ONCE // len(w)))
    total = sum((torch.exp(-0.5 * (w[:, None] / part).square()) / part).sum(1) for part in parts)
    return torch.as_tensor(total) / (len(scales) * math.sqrt(2 * math.pi))
