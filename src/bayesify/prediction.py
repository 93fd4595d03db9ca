"""What many draws say together, gathered as they stream by."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from .errors import BayesifyError

P = TypeVar("P", bound="Prediction")


@dataclass(frozen=True)
class Prediction:
    """The posterior predictive of a batch from `samples` draws; `draws` (S, B, …) are the outputs, if kept."""

    samples: int
    draws: Tensor | None

    @classmethod
    def join(cls: type[P], parts: list[P], dim: int = 0) -> P:
        """One prediction from those of consecutive batches, whose rows are in dimension `dim`."""
        if not parts:
            raise BayesifyError("nothing to predict: the data has no batch")
        values = {}
        for field in fields(parts[0]):
            each = [getattr(part, field.name) for part in parts]
            values[field.name] = each[0]
            if isinstance(each[0], Tensor):
                values[field.name] = torch.cat(each, dim + (field.name in ("draws", "draw_stds")))
        return cls(**values)


@dataclass(frozen=True)
class Classification(Prediction):
    """Classes: `log_probs` is the log-mean-exp over draws; `aleatoric` the mean entropy of the draws (iBNN, eq. 26).

    >>> from bayesify import Categorical
    >>> p = Categorical().predictive(torch.tensor([[[9.0, -9.0]], [[-9.0, 9.0]]]))
    >>> p.probs, round(float(p.epistemic), 3)
    (tensor([[0.5000, 0.5000]]), 0.693)
    """

    log_probs: Tensor
    aleatoric: Tensor
    votes: Tensor
    """How many draws find each class the most probable."""
    variance: Tensor
    """The variance over draws of a class's probability, its mean over the classes."""

    @property
    def probs(self) -> Tensor:
        """The predictive probabilities."""
        return self.log_probs.exp()

    @property
    def label(self) -> Tensor:
        """The most probable class."""
        return self.log_probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class."""
        return self.probs.max(-1).values

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty, in nats."""
        return entropy(self.log_probs)

    @property
    def epistemic(self) -> Tensor:
        """The mutual information of label and draw: entropy - aleatoric (iBNN, eq. 27)."""
        return (self.entropy - self.aleatoric).clamp_min(0)

    @property
    def disagreement(self) -> Tensor:
        """The fraction of pairs of draws whose labels differ."""
        return _disagreement(self.votes, self.samples)


@dataclass(frozen=True)
class BinaryPrediction(Prediction):
    """Independent yes-or-no labels: `log_probs` and `log_not_probs` of yes and no, each a log-mean-exp over draws."""

    log_probs: Tensor
    log_not_probs: Tensor
    aleatoric: Tensor
    disagreement: Tensor

    @property
    def probs(self) -> Tensor:
        """The predictive probability of yes."""
        return self.log_probs.exp()

    @property
    def label(self) -> Tensor:
        """1 where yes is at least as probable as no."""
        return (self.log_probs >= self.log_not_probs).long()

    @property
    def confidence(self) -> Tensor:
        """The probability of the more probable answer."""
        return torch.maximum(self.log_probs, self.log_not_probs).exp()

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty of each label, in nats."""
        return entropy(torch.stack([self.log_probs, self.log_not_probs], -1))

    @property
    def epistemic(self) -> Tensor:
        """The mutual information of each label and the draw."""
        return (self.entropy - self.aleatoric).clamp_min(0)


@dataclass(frozen=True)
class Regression(Prediction):
    """Real targets: a mixture of one Gaussian per draw, with the draws' means in `draws` and widths in `draw_stds`.

    Without kept draws `interval` and `log_prob` use the Gaussian of the same mean and variance.
    """

    mean: Tensor
    epistemic_std: Tensor
    aleatoric_std: Tensor
    draw_stds: Tensor | None

    @property
    def std(self) -> Tensor:
        """The predictive standard deviation: variance of the means plus mean of the variances."""
        return (self.epistemic_std.square() + self.aleatoric_std.square()).sqrt()

    def log_prob(self, target: Tensor) -> Tensor:
        """The log-density of targets, summed over a row's dimensions: a log-mean-exp over draws."""
        if target.shape != self.mean.shape:
            raise BayesifyError(f"targets have shape {tuple(target.shape)}, predictions {tuple(self.mean.shape)}")
        if self.draws is None or self.draw_stds is None:
            return gaussian_log_prob(target, self.mean, self.std)
        each = gaussian_log_prob(target.unsqueeze(0), self.draws, self.draw_stds, batch_dims=2)
        return each.logsumexp(0) - math.log(self.samples)

    def interval(self, p: float) -> tuple[Tensor, Tensor]:
        """The bounds between which a target lies with probability p, as much below as above."""
        if not 0 < p < 1:
            raise BayesifyError(f"interval({p!r}): expected a probability between 0 and 1")
        return self._quantile((1 - p) / 2), self._quantile((1 + p) / 2)

    def _quantile(self, q: float) -> Tensor:
        if self.draws is None or self.draw_stds is None:
            return self.mean + self.std * math.sqrt(2) * torch.erfinv(self.mean.new_tensor(2 * q - 1))
        low = (self.draws - 12 * self.draw_stds).amin(0)
        high = (self.draws + 12 * self.draw_stds).amax(0)
        for _ in range(60):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle - self.draws) / self.draw_stds).mean(0) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


class Tally:
    """Sums over draws for one batch, so that no draw needs to be kept."""

    def __init__(self, keep: bool) -> None:
        self.count = 0
        self.kept: list[Tensor] | None = [] if keep else None

    def add(self, output: Tensor) -> None:
        """Take in one draw's output."""
        self.count += 1
        if self.kept is not None:
            self.kept.append(output)

    def result(self) -> Prediction:
        """What the draws say together."""
        raise NotImplementedError

    @property
    def draws(self) -> Tensor | None:
        """The kept outputs (S, B, …)."""
        return None if self.kept is None else torch.stack(self.kept)


class LabelTally(Tally):
    """Running log-mean-exp, mean entropy and votes; labels in the last dimension."""

    def add_log_probs(self, log_probs: Tensor) -> None:
        """Take in one draw's log-probabilities."""
        if self.count == 1:
            self.log_sum, self.entropies = log_probs, entropy(log_probs)
            self.votes = torch.zeros_like(log_probs, dtype=torch.int32)
        else:
            self.log_sum = torch.logaddexp(self.log_sum, log_probs)
            self.entropies = self.entropies + entropy(log_probs)
        label = log_probs.argmax(-1, keepdim=True)
        self.votes.scatter_add_(-1, label, torch.ones_like(label, dtype=torch.int32))

    def shares(self) -> tuple[Tensor, Tensor]:
        """Mean log-probabilities and mean entropy."""
        return self.log_sum - math.log(self.count), self.entropies / self.count


class ClassTally(LabelTally):
    """One of C classes, with the running mean and variance of their probabilities (Welford)."""

    def add(self, output: Tensor) -> None:
        super().add(output)
        log_probs = output.float().log_softmax(-1)
        self.add_log_probs(log_probs)
        probs = log_probs.exp()
        if self.count == 1:
            self.mean, self.squares = probs, torch.zeros_like(probs[..., 0])
            return
        step = probs - self.mean
        self.mean = self.mean + step / self.count
        self.squares = self.squares + (step * (probs - self.mean)).mean(-1)

    def result(self) -> Classification:
        votes = self.votes.short() if self.count < 2**15 else self.votes
        return Classification(self.count, self.draws, *self.shares(), votes, self.squares / self.count)


class BinaryTally(LabelTally):
    """Labels that are each yes or no."""

    def add(self, output: Tensor) -> None:
        super().add(output)
        sides = torch.stack([output.float(), -output.float()], -1)
        self.add_log_probs(torch.nn.functional.logsigmoid(sides))

    def result(self) -> BinaryPrediction:
        log_probs, aleatoric = self.shares()
        disagreement = _disagreement(self.votes, self.count)
        return BinaryPrediction(self.count, self.draws, log_probs[..., 0], log_probs[..., 1], aleatoric, disagreement)


class GaussianTally(Tally):
    """Running mean and variance of the means (Welford) and mean of the variances."""

    def __init__(self, keep: bool) -> None:
        super().__init__(keep)
        self.stds: list[Tensor] = []

    def add_gaussian(self, mean: Tensor, std: Tensor) -> None:
        """Take in one draw's mean and standard deviation."""
        super().add(mean)
        std = std.expand_as(mean)
        if self.kept is not None:
            self.stds.append(std)
        if self.count == 1:
            self.mean, self.squares, self.noise = mean, torch.zeros_like(mean), std.square()
            return
        step = mean - self.mean
        self.mean = self.mean + step / self.count
        self.squares = self.squares + step * (mean - self.mean)
        self.noise = self.noise + std.square()

    def result(self) -> Regression:
        return Regression(
            self.count,
            self.draws,
            self.mean,
            (self.squares / self.count).sqrt(),
            (self.noise / self.count).sqrt(),
            torch.stack(self.stds) if self.stds else None,
        )


def entropy(log_probs: Tensor) -> Tensor:
    """-Σ p log p over the last dimension, where 0 log 0 = 0.

    >>> entropy(torch.tensor([0.0, -torch.inf]))
    tensor(0.)
    """
    return 0 - (log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)


def gaussian_log_prob(target: Tensor, mean: Tensor, std: Tensor, batch_dims: int = 1) -> Tensor:
    """The log-density of a Gaussian, summed over all but the batch's dimensions."""
    each = -0.5 * ((target - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    return each.flatten(batch_dims).sum(-1) if each.dim() > batch_dims else each


def _disagreement(votes: Tensor, count: int) -> Tensor:
    if count < 2:
        return torch.zeros(votes.shape[:-1], device=votes.device)
    votes = votes.long()
    agreeing = (votes * (votes - 1)).sum(-1) / (count * (count - 1))
    return 1 - agreeing
