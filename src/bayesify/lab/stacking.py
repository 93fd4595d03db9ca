"""Stacking: weights for the draws of a prediction, chosen on held-out rows after training (Yao et al. 2018).

EMP names it among its future work: mixing probabilities that are reweighted after inference instead of uniform.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.methods.distributions import entropy
from bayesify.prediction.results import Classification, Prediction, Regression, gaussian_log_prob

STEPS = 2000
CLOSE = 1e-9
"""The weights have converged if none changes by more than this in a step."""


@dataclass(frozen=True)
class Stacking:
    """The weights (S,) of the S draws of a prediction, which add up to 1.

    `before` and `after` are the mean log predictive densities of the held-out rows, with equal weights and with these.
    """

    weights: Tensor
    before: float
    after: float

    def predict(self, p: Prediction) -> Prediction:
        """The same prediction with weighted draws.

        Of classes, probabilities and uncertainties are weighted, votes and standard errors stay those of the draws. A
        regression becomes the Gaussian with the mixture's mean and variance.

        Args:
            p: A prediction with `draws=True`, from the same model, seed and number of draws as the held-out rows.

        Returns:
            The weighted prediction.

        Raises:
            BayesifyError: If the prediction has kept no draws, or another number of them.
        """
        draws = _kept(p)
        if len(draws) != len(self.weights):
            raise BayesifyError(f"stacking has weights for {len(self.weights)} draws; the prediction has {len(draws)}")
        w = self.weights.to(draws.device).reshape(-1, *[1] * (draws.dim() - 1))
        if isinstance(p, Regression):
            assert p.draw_stds is not None
            mean = (w * draws).sum(0)
            spread, noise = (w * (draws - mean).square()).sum(0), (w * p.draw_stds.square()).sum(0)
            changed = {"mean": mean, "epistemic_std": spread.sqrt(), "aleatoric_std": noise.sqrt()}
            real: dict[str, Any] = {name: value.to(p.mean.dtype) for name, value in changed.items()}
            return replace(p, **real, draws=None, draw_stds=None)
        assert isinstance(p, Classification)
        each = draws.double().log_softmax(-1)
        mixed = (each + w.log()).logsumexp(0)
        spread = (w * (each.exp() - mixed.exp()).square()).sum(0).mean(-1)
        own = {"aleatoric": (w[..., 0] * entropy(each)).sum(0), "variance": spread}
        own |= {"log_probs": mixed, "mean_log_probs": (w * each).sum(0)}
        classes: dict[str, Any] = {name: value.to(p.log_probs.dtype) for name, value in own.items()}
        return replace(p, **classes)


def stack(p: Prediction, y: Tensor, *, components: int | None = None) -> Stacking:
    """Choose the weights with which held-out targets are most probable: max Σ_i log Σ_s w_s p_s(y_i), a convex problem.

    Args:
        p: A prediction of held-out rows with `draws=True`. Draws that a seed makes are the same functions for other
            rows, so any method can be stacked.
        y: Their targets.
        components: Give one weight to all draws of the same of K components, which draw s modulo K uses; by default
            each draw has its own.

    Returns:
        The weights.

    Raises:
        BayesifyError: If the prediction kept no draws, or the targets don't fit it.

    >>> import bayesify as by
    >>> p = by.Categorical().predictive(torch.tensor([[[2.0, 0.0]] * 4, [[0.0, 2.0]] * 4]), keep=True)
    >>> stack(p, torch.tensor([0, 0, 0, 1])).weights.round(decimals=2)  # probabilities of 0.88 and 0.12
    tensor([0.8300, 0.1700], dtype=torch.float64)
    """
    logs = _log_densities(p, y)
    count = len(logs) if components is None else components
    if count < 1 or len(logs) % count:
        raise BayesifyError(f"components={components}: expected a number that divides the {len(logs)} draws")
    groups = logs.reshape(-1, count, logs.shape[1])  # draw s has component s modulo K
    densities = (groups - logs.amax(0)).exp().mean(0)
    weights = torch.full((count,), 1 / count, dtype=torch.float64, device=logs.device)
    before = densities.mean(0)
    for _ in range(STEPS):  # expectation maximisation, which never lowers the density
        share = weights[:, None] * densities
        new = (share / share.sum(0)).mean(1)
        done = bool((new - weights).abs().max() <= CLOSE)
        weights = new
        if done:
            break
    levels = logs.amax(0)
    found = [float((each.log() + levels).mean()) for each in (before, weights @ densities)]
    return Stacking(weights.repeat(len(groups)) / len(groups), *found)


def _log_densities(p: Prediction, y: Tensor) -> Tensor:
    """log p_s(y_i) of each draw and row: (S, N)."""
    draws = _kept(p)
    wanted = p.mean.shape if isinstance(p, Regression) else draws.shape[1:-1]
    if y.shape != wanted or not len(y):
        raise BayesifyError(f"targets of shape {tuple(y.shape)}: expected {tuple(wanted)}, and at least one row")
    y = y.to(draws.device)
    if isinstance(p, Regression):
        assert p.draw_stds is not None
        return gaussian_log_prob(y.double()[None], draws.double(), p.draw_stds.double(), batch_dims=2)
    index = y[None, ..., None].expand(len(draws), *y.shape, 1)
    return draws.double().log_softmax(-1).gather(-1, index).flatten(1)


def _kept(p: Prediction) -> Tensor:
    if not isinstance(p, Classification | Regression):
        raise BayesifyError(f"{type(p).__name__}: stacking is for classes and real numbers")
    if p.draws is None:
        raise BayesifyError("the prediction has no draws; use by.predict(…, draws=True)")
    return p.draws
