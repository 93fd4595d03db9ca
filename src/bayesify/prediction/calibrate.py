"""What held-out rows say of the temperature of classes and of the noise of real targets."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.prediction.results import Prediction, Regression

FEWEST_TARGETS = 3
"""With fewer held-out targets than this, the noise of real targets can't be set by them."""


def temperature_factor(p: Prediction, target: Tensor) -> float:
    """How many times as large the temperature should be: see `Categorical.calibrate`."""
    if p.draws is None:
        raise BayesifyError("calibrate: the prediction has no draws; use by.predict(…, draws=True)")
    if p.draws.shape[1:-1] != target.shape or not target.numel():
        raise BayesifyError(
            f"calibrate: {tuple(target.shape)} labels for predictions of {tuple(p.draws.shape[1:-1])}; expected one "
            "for each, and at least one row"
        )
    logits = p.draws.double()
    if not bool(((target >= 0) & (target < logits.shape[-1])).all()):
        found = f"labels from {target.min()} to {target.max()}"
        raise BayesifyError(f"calibrate: {found}; expected integers from 0 to {logits.shape[-1] - 1}")
    index = target.unsqueeze(-1).expand(len(logits), *target.shape, 1)

    def log_density(log_factor: float) -> float:
        each = (logits / math.exp(log_factor)).log_softmax(-1).gather(-1, index)
        return float((each.logsumexp(0) - math.log(len(each))).mean() - log_factor**2 / (2 * target.numel()))

    return math.exp(_best(log_density))


def noise_factor(p: Regression, target: Tensor) -> float:
    """How many times as large the standard deviation of the noise should be: see `Gaussian.calibrate`."""
    if (n := target.numel()) < FEWEST_TARGETS or not bool(target.isfinite().all()):
        expected = f"expected at least {FEWEST_TARGETS}, better 100, and each of them finite"
        raise BayesifyError(f"calibrate: {n} targets; {expected}")

    def log_density(log_factor: float) -> float:
        stds = {"aleatoric_std": p.aleatoric_std, "draw_stds": p.draw_stds}
        changed: dict[str, Any] = {k: std * math.exp(log_factor) for k, std in stds.items() if std is not None}
        return float(replace(p, **changed).log_prob(target).double().mean())

    return math.exp(_best(log_density)) * math.sqrt(n / (n - 2))


def _best(log_density: Callable[[float], float]) -> float:
    """The logarithm of the best factor: one from 1/1000 to 1000, then ever finer ones around the best."""
    best = 0.0
    for width in (1.0, 1 / 7, 1 / 49, 1 / 343, 1 / 2401):
        best = max((best + width * step for step in range(-7, 8)), key=log_density)
    return best
