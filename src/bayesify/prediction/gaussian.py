"""Real targets: a Gaussian density, and the sums over draws that give a mixture of Gaussians."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from bayesify.errors import BayesifyError
from bayesify.methods.base import at_least_float32
from bayesify.methods.draw_design import independent_variance, moments
from bayesify.prediction.calibrate import noise_factor
from bayesify.prediction.likelihood import BALANCED_SQUARES, Accumulator, Likelihood
from bayesify.prediction.results import (
    Prediction,
    Regression,
    gaussian_log_prob,
    student_quantile,
)


class GaussianAccumulator(Accumulator):
    """Mean and variance of the draws' means, mean of their variances."""

    noise: Tensor
    noise_squares: Tensor

    def add(self, outputs: Tensor, meaning: Tensor) -> None:
        earlier = (self.noise, self.noise_squares) if self.count else None
        self._add_values(outputs, outputs)
        self.noise, self.noise_squares = moments(meaning.square(), earlier, self.count)
        if self.kept is not None:
            self.kept_stds.append(meaning)

    def result(self, dim: int = 0) -> Prediction:
        return Regression(
            mean=self.mean,
            epistemic_std=(self.squares / self.count).sqrt(),
            aleatoric_std=self.noise.sqrt(),
            draw_stds=torch.cat(self.kept_stds) if self.kept_stds else None,
            **self._draws(dim),
        )

    def unit(self) -> Tensor:
        """The predictive standard deviation."""
        return (self.squares / self.count + self.noise).sqrt()

    def within_tolerance(self, error: float, tolerance: float) -> Tensor:
        """For the mean, in units of the predictive standard deviation, and for that deviation, relative to itself.

        The sample variance of n Gaussian means with variance v has the standard error v √(2 / (n - 1)); if they are
        balanced, the squares of neighbours in a chain are correlated by 1/4.
        """
        spread, factor = self.squares / (self.count - 1), 1.0 if self.blocks is None else BALANCED_SQUARES
        variance, (noise_doubt, freedom) = spread + self.noise, independent_variance(self.noise_squares, self.count)
        doubt = spread * math.sqrt(2 * factor / freedom) + noise_doubt.sqrt()
        doubt_known = student_quantile(1 - error / 2, freedom) * doubt <= 2 * tolerance * variance
        return (self.reach(error) <= tolerance * variance.sqrt()) & doubt_known


class Gaussian(Likelihood):
    """Real targets; the `precision` is a number (fixed), "learned" (one for the data) or "input" (one per input).

    >>> Gaussian(precision=4.0).log_prob(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([-0.2258])

    With "input" the outputs hold the means and, after them in the last dimension, as many log-precisions. Draws are
    kept unless told otherwise, for the exact density and quantiles of their mixture.
    """

    keeps_draws = True
    sums = GaussianAccumulator

    def __init__(self, precision: float | Literal["learned", "input"] = 1.0) -> None:
        super().__init__()
        if precision not in ("learned", "input") and (isinstance(precision, str) or not 0 < precision < float("inf")):
            raise BayesifyError(f"Gaussian(precision={precision!r}): expected a number > 0, 'learned' or 'input'")
        self.per_input = precision == "input"
        value = torch.tensor(0.0 if isinstance(precision, str) else math.log(precision))
        self.log_precision = nn.Parameter(value) if precision == "learned" else nn.Buffer(value)

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = at_least_float32(outputs)
        if not self.per_input:
            return outputs, (-0.5 * self.log_precision).exp().to(outputs).expand_as(outputs)
        if outputs.dim() == 0 or outputs.shape[-1] % 2:
            needed = "with precision='input' the last dimension has means and log-precisions, so it must be even"
            raise BayesifyError(f"outputs of shape {tuple(outputs.shape)}: {needed}")
        mean, log_precision = outputs.chunk(2, -1)
        return mean, (-0.5 * (log_precision + self.log_precision.to(outputs))).exp()

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        mean, std = self.split(output)
        if mean.shape != target.shape:
            raise BayesifyError(f"means have shape {tuple(mean.shape)}, targets {tuple(target.shape)}")
        return gaussian_log_prob(target, mean, std)

    @torch.no_grad()
    def calibrate(self, p: Regression, target: Tensor) -> None:
        """Set the noise by held-out rows, in place: its standard deviation is multiplied by one factor for all inputs.

        The variance is n / (n - 2) times the one with which n targets are most probable, as that one is an estimate:
        for Gaussian residuals, new rows then have the highest expected density.

        Args:
            p: The prediction of held-out rows with this likelihood, from `by.predict`.
            target: Their targets.

        >>> p, y = (likelihood := Gaussian(1.0)).predictive(torch.zeros(1, 5, 1)), torch.arange(-2.0, 3.0)[:, None]
        >>> likelihood.calibrate(p, y)
        >>> round(1 / float(likelihood.log_precision.exp()), 2)  # the mean square, 2, times 5 / (5 - 2)
        3.33
        """
        self.log_precision.sub_(2 * math.log(noise_factor(p, target)))
