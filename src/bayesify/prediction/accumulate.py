"""Running sums over draws, the prediction that they give, and whether it is known precisely enough."""

from __future__ import annotations

import copy
import math
from typing import TypeVar

import torch
from torch import Tensor

from bayesify.methods.distributions import entropy
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression, disagreement_of

T = TypeVar("T", bound="Accumulator")


class Accumulator:
    """Running sums over the draws for one batch, so that no draw needs to be kept.

    Draws come in stacks (M, B, …). `mean` and `squares` are the running mean of their probabilities or values and the
    sum of squared deviations from it.
    """

    mean: Tensor
    squares: Tensor

    def __init__(self, keep: bool) -> None:
        self.count = 0
        self.kept: list[Tensor] | None = [] if keep else None

    def add(self, outputs: Tensor) -> None:
        """Add the outputs of some draws."""
        self.count += outputs.shape[0]
        if self.kept is not None:
            self.kept.append(outputs)

    def result(self, dim: int = 0) -> Prediction:
        """The prediction from all draws so far; rows are in dimension `dim`."""
        raise NotImplementedError

    def within_tolerance(self, width: float, tolerance: float) -> Tensor:
        """Where label and uncertainty are known to ±tolerance, by intervals of ±`width` standard errors."""
        raise NotImplementedError

    def rows(self: T, index: Tensor, dim: int) -> T:
        """The sums of some of the rows; only without kept draws."""
        some = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(some, name, value.index_select(dim, index))
        return some

    @property
    def draws(self) -> Tensor | None:
        """The kept outputs (S, B, …)."""
        return None if self.kept is None else torch.cat(self.kept)

    def standard_error(self, squares: Tensor) -> Tensor:
        """The standard error of a mean over draws, from the sum of squared deviations.

        Too large for draws that cycle through components, as their mean varies less than that of independent draws.
        """
        return (squares / (max(self.count - 1, 1) * self.count)).sqrt()

    def _add_values(self, values: Tensor) -> None:
        earlier = (self.mean, self.squares) if self.count > len(values) else None
        self.mean, self.squares = moments(values, earlier, self.count)

    def _used(self, dim: int) -> Tensor:
        return torch.full((self.mean.shape[dim],), self.count, device=self.mean.device)


class LabelAccumulator(Accumulator):
    """Running log-mean-exp, mean entropy and votes; classes are in the last dimension."""

    log_sum: Tensor
    entropies: Tensor

    def add_log_probs(self, log_probs: Tensor) -> None:
        """Add the log-probabilities of some draws."""
        probs = log_probs.exp()
        log_sum, entropies = log_probs.logsumexp(0), entropy(log_probs, probs).sum(0)
        if self.count > len(log_probs):
            log_sum, entropies = torch.logaddexp(self.log_sum, log_sum), self.entropies + entropies
        else:
            self.votes = torch.zeros_like(log_sum, dtype=torch.int32)
        self.log_sum, self.entropies = log_sum, entropies
        labels = log_probs.argmax(-1).movedim(0, -1)
        self.votes.scatter_add_(-1, labels, torch.ones_like(labels, dtype=torch.int32))
        self._add_values(probs)

    def shares(self) -> tuple[Tensor, Tensor]:
        """Mean log-probabilities and mean entropy."""
        return self.log_sum - math.log(self.count), self.entropies / self.count

    def within_tolerance(self, width: float, tolerance: float) -> Tensor:
        """For the label, its probability, and the entropy as a fraction of its maximum."""
        reach = width * self.standard_error(self.squares)
        certain = _label_within_tolerance(self.mean, reach, tolerance)
        return certain & (entropy_reach(self.mean, reach) <= tolerance * math.log(self.mean.shape[-1]))


class ClassAccumulator(LabelAccumulator):
    """One of C classes."""

    def add(self, outputs: Tensor) -> None:
        super().add(outputs)
        self.add_log_probs(outputs.float().log_softmax(-1))

    def result(self, dim: int = 0) -> Classification:
        votes = self.votes.short() if self.count < 2**15 else self.votes
        variance = self.squares.mean(-1) / self.count
        return Classification(self.count, self.draws, *self.shares(), votes, variance, draws_used=self._used(dim))


class BinaryAccumulator(LabelAccumulator):
    """Labels that are each yes or no."""

    def add(self, outputs: Tensor) -> None:
        super().add(outputs)
        sides = torch.stack([outputs.float(), -outputs.float()], -1)
        self.add_log_probs(torch.nn.functional.logsigmoid(sides))

    def result(self, dim: int = 0) -> BinaryPrediction:
        log_probs, aleatoric = self.shares()
        return BinaryPrediction(
            self.count,
            self.draws,
            log_probs[..., 0],
            log_probs[..., 1],
            aleatoric,
            disagreement_of(self.votes),
            draws_used=self._used(dim),
        )


class GaussianAccumulator(Accumulator):
    """Mean and variance of the draws' means, mean of their variances."""

    noise: Tensor
    noise_squares: Tensor

    def __init__(self, keep: bool) -> None:
        super().__init__(keep)
        self.stds: list[Tensor] = []

    def add_gaussian(self, means: Tensor, stds: Tensor) -> None:
        """Add the means and standard deviations of some draws."""
        super().add(means)
        stds = stds.expand_as(means)
        if self.kept is not None:
            self.stds.append(stds)
        self._add_values(means)
        earlier = (self.noise, self.noise_squares) if self.count > len(stds) else None
        self.noise, self.noise_squares = moments(stds.square(), earlier, self.count)

    def result(self, dim: int = 0) -> Regression:
        return Regression(
            self.count,
            self.draws,
            self.mean,
            (self.squares / self.count).sqrt(),
            self.noise.sqrt(),
            torch.cat(self.stds) if self.stds else None,
            draws_used=self._used(dim),
        )

    def within_tolerance(self, width: float, tolerance: float) -> Tensor:
        """For the mean, in units of the predictive standard deviation, and for that deviation, relative to itself.

        The sample variance of n Gaussian means with variance v has the standard error v √(2 / (n - 1)).
        """
        spread = self.squares / (self.count - 1)
        variance = spread + self.noise
        doubt = spread * math.sqrt(2 / (self.count - 1)) + self.standard_error(self.noise_squares)
        mean_known = width * self.standard_error(self.squares) <= tolerance * variance.sqrt()
        return mean_known & (width * doubt <= 2 * tolerance * variance)


def moments(values: Tensor, earlier: tuple[Tensor, Tensor] | None, count: int) -> tuple[Tensor, Tensor]:
    """The mean and sum of squared deviations of `count` values: these (M, …) merged with the moments of earlier ones.

    >>> first = moments(torch.tensor([1.0, 3.0]), None, 2)
    >>> moments(torch.tensor([8.0]), first, 3)  # of 1, 3 and 8
    (tensor(4.), tensor(26.))
    """
    mean = values.mean(0)
    squares = (values - mean).square().sum(0)
    if earlier is None:
        return mean, squares
    step, share = mean - earlier[0], len(values) / count
    return earlier[0] + step * share, earlier[1] + squares + step.square() * (len(values) * (1 - share))


def entropy_reach(probs: Tensor, reach: Tensor) -> Tensor:
    """How far off the entropy may be, to first order, if each probability may be off by `reach`.

    As probabilities sum to 1, dH = -Σ (log p + H) dp; with two classes the bound is exact.

    >>> entropy_reach(torch.tensor([0.9, 0.1]), torch.tensor([0.01, 0.01]))  # 0.01 log 9
    tensor(0.0220)
    """
    log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return ((log_probs + entropy(log_probs).unsqueeze(-1)).abs() * reach).sum(-1)


def _label_within_tolerance(probs: Tensor, reach: Tensor, tolerance: float) -> Tensor:
    """Whether no class can be more probable than the label by the tolerance, and the label's probability is known."""
    label = probs.argmax(-1, keepdim=True)
    own = reach.gather(-1, label).squeeze(-1)
    lowest = probs.max(-1).values - own
    rival = (probs + reach).scatter(-1, label, -math.inf).max(-1).values
    return (rival - lowest <= tolerance) & (own <= tolerance)
