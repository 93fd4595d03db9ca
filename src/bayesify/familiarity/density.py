"""Gaussian densities of features, and the rank of a value among held-out ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SHRINKAGE = 1e-4
"""Covariances are shrunk at least so much, which keeps those of features without full rank positive."""
QUANTILES = 1001
"""Held-out values are kept as so many of their quantiles, the lowest and the highest included."""
TAIL = 0.1
"""Above the quantile that this share of the held-out values exceeds, an exponential tail continues their ranks."""
LEAST_SQUARE, MOST_SQUARE = 1e-12, 1e30
"""Squared distances are clamped to these, so that their logarithms are finite."""


@dataclass(frozen=True)
class Density:
    """Gaussians around one centre for each class, with one covariance for all, in one layer's features.

    Features are standardised by `mean` and `scale`, then decorrelated by the matrix `whiten`; the squared distance to
    the nearest of the `centres` is that of Mahalanobis.
    """

    mean: Tensor
    scale: Tensor
    whiten: Tensor
    centres: Tensor

    def log_distance(self, features: Tensor) -> Tensor:
        """The logarithm of each row's squared distance to the nearest centre."""
        white = ((features - self.mean) / self.scale) @ self.whiten.T
        nearest = torch.cdist(white, self.centres, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
        return nearest.square().nan_to_num(MOST_SQUARE).clamp(LEAST_SQUARE, MOST_SQUARE).log()


def fit_density(features: Tensor, labels: Tensor | None = None) -> Density:
    """Fit one Gaussian, or one for each label with a shared covariance, to features (N, D).

    The covariance is shrunk towards a multiple of the identity by the amount of Ledoit and Wolf (2004), after the
    features are standardised. A feature that is the same in all rows has the scale of the widest one.

    >>> density = fit_density(torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    >>> density.log_distance(torch.tensor([[0.0, 2.0]])).exp()
    tensor([8.0000], dtype=torch.float64)
    """
    x = features.double()
    mean, spread = x.mean(0), x.std(0, correction=0)
    widest = spread.amax()
    scale = torch.where(spread > 1e-6 * widest, spread, torch.where(widest > 0, widest, 1.0))
    z = (x - mean) / scale
    classes, own = (
        (None, torch.zeros(len(z), dtype=torch.long)) if labels is None else labels.unique(return_inverse=True)
    )
    count = 1 if classes is None else len(classes)
    sums = z.new_zeros(count, z.shape[1]).index_add_(0, own, z)
    centres = sums / own.bincount(minlength=count).unsqueeze(1)
    lower = torch.linalg.cholesky(shrunk_covariance(z - centres[own]))
    whiten = torch.linalg.solve_triangular(lower, torch.eye(len(lower), dtype=z.dtype), upper=False)
    return Density(mean, scale, whiten, centres @ whiten.T)


def shrunk_covariance(centred: Tensor) -> Tensor:
    """The covariance of centred rows (N, D), shrunk as in Ledoit and Wolf (2004), lemma 3.1 and section 3.2.

    >>> shrunk_covariance(torch.zeros(1, 2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    n, d = centred.shape
    sample = centred.T @ centred / n
    level = sample.trace() / d
    identity = torch.eye(d, dtype=sample.dtype)
    if float(level) <= 0:
        return identity
    distance = (sample - level * identity).square().sum() / d
    squares = centred.square()
    noise = ((squares.T @ squares) / n - sample.square()).sum() / (n * d)
    shrinkage = float((noise / distance).clamp(0, 1)) if float(distance) > 0 else 1.0
    shrinkage = max(shrinkage, LEAST_SHRINKAGE)
    return (1 - shrinkage) * sample + shrinkage * level * identity


@dataclass(frozen=True)
class Ranks:
    """The quantiles of held-out values, by which others are ranked; high values are the unusual ones."""

    quantiles: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Ranks:
        """The ranks of some held-out values."""
        levels = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
        return cls(values.double().cpu().flatten().quantile(levels).float())

    def surprise(self, values: Tensor) -> Tensor:
        """-log of the share of held-out values that are higher, continued by an exponential tail.

        >>> Ranks.of(torch.arange(101.0)).surprise(torch.tensor([-5.0, 50.0, 90.0, 95.0])).exp()
        tensor([ 1.0000,  2.0000, 10.0000, 27.1828])
        """
        known = self.quantiles
        above = known[int((1 - TAIL) * (len(known) - 1)) :]
        start = above[0]
        excess = torch.trapezoid(above - start) / (len(above) - 1)  # the mean one
        excess = excess.clamp_min(1e-3 * (known[-1] - known[0]) + 1e-6 * start.abs() + 1e-12)
        place = torch.searchsorted(known, values.contiguous()).clamp(1, len(known) - 1)
        low, high = known[place - 1], known[place]
        part = ((values - low) / (high - low).clamp_min(1e-30)).clamp(0, 1)
        share = 1 - (place - 1 + part) / (len(known) - 1)
        tail = -math.log(TAIL) + (values - start) / excess
        return torch.where(values > start, tail, -share.clamp(TAIL, 1).log())
