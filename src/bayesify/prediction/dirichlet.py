"""A network whose outputs are a distribution over class probabilities: its mean, and how sure of that mean it is."""

import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from bayesify.prediction.likelihood import Categorical, ClassAccumulator
from bayesify.prediction.results import Classification, Prediction

LOG_PRECISIONS = (-4.0, 14.0)
"""The range of log α₀ that `log_precision_of` searches: from nearly all uncertainty in the model to nearly none."""
SERIES_FROM = math.log(8.0)  # from x = 8 on, three terms of the series of `excess` are exact to float32


class DirichletAccumulator(ClassAccumulator):
    """Running sums over draws that are Dirichlet distributions, of the draws' means and of the spread within each."""

    within: Tensor | float = 0.0  # the variance in each draw, which says nothing about the error of their mean

    def add(self, outputs: Tensor, meaning: Tensor) -> None:
        super().add(outputs, meaning)
        log_precision = outputs.float().logsumexp(-1)
        self.entropies = self.entropies - mutual_information(meaning, log_precision).sum(0)
        variance = (meaning.exp() * -torch.expm1(meaning)).mean(-1) / (1 + log_precision.exp())
        self.within = self.within + variance.sum(0)

    def result(self, dim: int = 0) -> Prediction:
        found = cast(Classification, super().result(dim))
        return replace(found, variance=found.variance + self.within / self.count)


class Dirichlet(Categorical):
    """One of C classes; outputs are logarithms of a Dirichlet's concentrations: log α, with classes in `class_dim`.

    >>> p = Dirichlet().interpret(torch.tensor([[5.0, 5.0], [0.0, 0.0]]))
    >>> p.probs, p.epistemic
    (tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]]), tensor([0.0017, 0.1931]))

    The softmax of the outputs is the mean, and so the predictive probability of each class, as with `Categorical`. What
    a softmax leaves open, adding a number to all logits, is the precision: log α₀ = logsumexp(outputs). One network has
    both kinds of uncertainty then: `epistemic` is the mutual information of the label and the Dirichlet's
    probabilities. `by.distill(…, into=by.Dirichlet())` trains such a network.
    """

    sums = DirichletAccumulator

    def __init__(self, class_dim: int = -1) -> None:
        super().__init__(class_dim)


def excess(log_x: Tensor) -> Tensor:
    """ψ(x + 1) - log x, from log x: positive, and 1/(2x) for large x, where the difference itself would be rounded.

    >>> excess(torch.tensor([0.0, 10.0]))  # 1 - γ at x = 1
    tensor([4.2278e-01, 2.2700e-05])
    """
    small, inverse = log_x.clamp_max(SERIES_FROM), (-log_x.clamp_min(SERIES_FROM)).exp()
    series = inverse / 2 - inverse.square() / 12 + inverse.pow(4) / 120
    return torch.where(log_x > SERIES_FROM, series, torch.digamma(1 + small.exp()) - small)


def mutual_information(log_probs: Tensor, log_precision: Tensor) -> Tensor:
    """The mutual information of a label and the probabilities that it is drawn with, which have a Dirichlet.

    With mean p and precision α₀ it is H(p) - (ψ(α₀ + 1) - Σ p ψ(α₀ p + 1)) = Σ p g(α₀ p) - g(α₀), with g = `excess`
    (Malinin et al. 2020, eq. 7, without the difference of large numbers). It falls from H(p) to 0 as α₀ rises.

    >>> uniform = torch.full((2,), 0.5).log()
    >>> mutual_information(uniform, torch.tensor(2.0).log())  # of Beta(1, 1): log 2 - 1/2
    tensor(0.1931)

    Args:
        log_probs: log p (…, C).
        log_precision: log α₀ (…).

    Returns:
        Nats (…).
    """
    log_probs = log_probs.clamp_min(torch.finfo(log_probs.dtype).min / 2)  # 0 times infinity is not 0
    each = log_probs.exp() * excess(log_probs + log_precision.unsqueeze(-1))
    return (each.sum(-1) - excess(log_precision)).clamp_min(0)


def log_precision_of(log_probs: Tensor, information: Tensor) -> Tensor:
    """The log α₀ with which a Dirichlet of mean p has this mutual information, by bisection.

    >>> uniform = torch.full((2,), 0.5).log()
    >>> found = log_precision_of(uniform, mutual_information(uniform, torch.tensor(3.0)))
    >>> round(float(found), 4)
    3.0

    Args:
        log_probs: log p (…, C).
        information: Nats (…), between 0 and the entropy of p.

    Returns:
        log α₀ (…), at the bounds of `LOG_PRECISIONS` for information that is out of their reach.
    """
    low, high = (torch.full_like(information, bound) for bound in LOG_PRECISIONS)
    for _ in range(24):
        middle = (low + high) / 2
        above = mutual_information(log_probs, middle) > information
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2
