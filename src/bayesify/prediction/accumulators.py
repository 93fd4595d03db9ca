"""Running sums over draws, from which a prediction is made, so that no draw needs to be kept."""

import copy
import math
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.methods.distributions import entropy
from bayesify.methods.draw_design import Blocks, BlockSums, independent_variance, moments
from bayesify.prediction.results import (
    BinaryPrediction,
    Classification,
    Prediction,
    Regression,
    disagreement_of,
    student_quantile,
)

FEWEST_DEGREES = 3
"""With fewer degrees of freedom, intervals from blocks are wider than those from draws taken for independent."""
BALANCED_SQUARES = 1.5  # how many times as large the variance of a mean over squares of balanced draws may be


class Accumulator:
    """Running sums over the draws for one batch, so that no draw needs to be kept.

    Draws come in stacks (M, B, …). `mean` and `squares` are the running mean of their probabilities or values and the
    sum of squared deviations from it.
    """

    def __init__(self, keep: bool, blocks: Blocks | None = None) -> None:
        self.count = 0
        self.blocks = None if blocks is None else BlockSums(blocks)
        self.mean = self.squares = torch.zeros(())
        self.kept: list[Tensor] | None = [] if keep else None
        self.kept_stds: list[Tensor] = []

    def add(self, outputs: Tensor, meaning: Tensor) -> None:
        """Add some draws: their outputs, and the log-probabilities or the standard deviations that these stand for."""
        raise NotImplementedError

    def result(self, dim: int = 0) -> Prediction:
        """The prediction from all draws so far; rows are in dimension `dim`."""
        raise NotImplementedError

    def unit(self) -> Tensor | float:
        """What the tolerance of a mean is relative to."""
        return 1.0

    def within_tolerance(self, error: float, tolerance: float) -> Tensor:
        """Where label and uncertainty are known to ±tolerance, by intervals that fail with probability `error`."""
        raise NotImplementedError

    def mean_within_tolerance(self, error: float, tolerance: float) -> Tensor:
        """Where the mean is known to ±tolerance, by the prediction's own margin."""
        found, freedom = self.standard_error()
        return found * student_quantile(1 - error / 2, freedom) <= tolerance * self.unit()

    def rows(self, index: Tensor, dim: int) -> Self:
        """The sums of some of the rows; only without kept draws."""
        some = copy.copy(self)
        vars(some).update({k: v.index_select(dim, index) for k, v in vars(self).items() if isinstance(v, Tensor)})
        some.blocks = None if self.blocks is None else self.blocks.rows(index, dim)
        return some

    def variances(self) -> list[tuple[Tensor, int]]:
        """Estimates of the variance of the mean over draws, with their degrees of freedom: see `BlockSums`."""
        if self.blocks is not None:
            return self.blocks.variances(self.count, self.mean, self.squares)
        return [independent_variance(self.squares, self.count)]

    def standard_error(self) -> tuple[Tensor, int]:
        """The standard error of the mean over draws, from blocks if there are enough, and its degrees of freedom."""
        independent, *blocks = self.variances()
        variance, freedom = blocks[0] if blocks and blocks[0][1] >= FEWEST_DEGREES else independent
        return variance.sqrt(), freedom

    def reach(self, error: float) -> Tensor:
        """How far off the mean may be: the smaller of two intervals, which together fail with probability `error`."""
        found = self.variances()
        half = error / 2 / len(found)
        reaches = [variance.sqrt() * student_quantile(1 - half, freedom) for variance, freedom in found]
        return torch.minimum(reaches[0], reaches[-1])

    def _add_values(self, outputs: Tensor, values: Tensor) -> None:
        if self.blocks is not None:
            self.blocks.add(values)
        earlier = (self.mean, self.squares) if self.count else None
        self.count += len(values)
        self.mean, self.squares = moments(values, earlier, self.count)
        if self.kept is not None:
            self.kept.append(outputs)

    def _draws(self, dim: int) -> dict[str, Any]:
        """What every prediction has: the number of draws, their outputs (S, B, …) if kept, and its standard error."""
        used = torch.full((self.mean.shape[dim],), self.count, device=self.mean.device)
        error, freedom = self.standard_error()
        rows = [size if place == dim else 1 for place, size in enumerate(error.shape)]
        return {
            "samples": self.count,
            "draws_used": used,
            "draws": None if self.kept is None else torch.cat(self.kept),
            "standard_error": error,
            "freedom": torch.full(rows, freedom, device=error.device),
        }


class ClassAccumulator(Accumulator):
    """Running log-mean-exp, mean log-probabilities and entropy, and votes; classes are in the last dimension."""

    log_sum, logs, entropies = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(())

    def add(self, outputs: Tensor, meaning: Tensor) -> None:
        probs, labels = meaning.exp(), meaning.argmax(-1).movedim(0, -1)
        if not self.count:
            self.votes = torch.zeros_like(meaning[0], dtype=torch.int32)
        self.log_sum = torch.logaddexp(self.log_sum, meaning.logsumexp(0))
        self.logs, self.entropies = self.logs + meaning.sum(0), self.entropies + entropy(meaning, probs).sum(0)
        self.votes.scatter_add_(-1, labels, torch.ones_like(labels, dtype=torch.int32))
        self._add_values(outputs, probs)

    def result(self, dim: int = 0) -> Prediction:
        return Classification(
            log_probs=self.log_sum - math.log(self.count),
            mean_log_probs=self.logs / self.count,
            aleatoric=self.entropies / self.count,
            votes=self.votes.short() if self.count < 2**15 else self.votes,
            variance=self.squares.mean(-1) / self.count,
            **self._draws(dim),
        )

    def within_tolerance(self, error: float, tolerance: float) -> Tensor:
        """Whether no class can be more probable than the label by the tolerance, and the label's probability and the
        entropy, as a fraction of its maximum, are known.
        """
        reach = self.reach(error)
        label = self.mean.argmax(-1, keepdim=True)
        own = reach.gather(-1, label).squeeze(-1)
        lowest = self.mean.max(-1).values - own
        rival = (self.mean + reach).scatter(-1, label, -math.inf).max(-1).values
        entropy_known = entropy_reach(self.mean, reach) <= tolerance * math.log(self.mean.shape[-1])
        return (rival - lowest <= tolerance) & (own <= tolerance) & entropy_known


class BinaryAccumulator(ClassAccumulator):
    """The same for labels that are each yes or no."""

    def result(self, dim: int = 0) -> Prediction:
        given = self._draws(dim)
        return BinaryPrediction(
            log_probs=self.log_sum[..., 0] - math.log(self.count),
            log_not_probs=self.log_sum[..., 1] - math.log(self.count),
            aleatoric=self.entropies / self.count,
            disagreement=disagreement_of(self.votes),
            **given | {name: given[name][..., 0] for name in ("standard_error", "freedom")},
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


def entropy_reach(probs: Tensor, reach: Tensor) -> Tensor:
    """How far off the entropy may be, to first order, if each probability may be off by `reach`.

    As probabilities sum to 1, dH = -Σ (log p + H) dp; with two classes the bound is exact.

    >>> entropy_reach(torch.tensor([0.9, 0.1]), torch.tensor([0.01, 0.01]))  # 0.01 log 9
    tensor(0.0220)
    """
    log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return ((log_probs + entropy(log_probs).unsqueeze(-1)).abs() * reach).sum(-1)
