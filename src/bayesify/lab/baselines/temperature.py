"""Temperature scaling (Guo et al. 2017)."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from bayesify.lab.baselines.errors import BaselineError

HIGHEST = 100.0
"""The temperature is searched between 1/100 and 100."""
BISECTIONS = 60


@torch.no_grad()
def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T that minimises the negative log-likelihood of softmax(logits / T), in double precision.

    Args:
        logits: Logits (N, classes) of the validation rows.
        labels: Their true labels (N,).

    Returns:
        The temperature.

    Raises:
        BaselineError: If there are no rows.

    >>> logits, labels = torch.tensor([[2.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
    >>> round(best_temperature(logits, labels), 4)  # 2 / T = log(3 / 1)
    1.8205

    In β = 1/T the loss is convex, with the derivative mean(E_p[z] - z_y), so bisection finds the minimum. If
    every row is correct, no finite T is best, and T = 1 is kept with a warning.
    """
    if not len(labels):
        raise BaselineError("the temperature is fitted to validation rows, but there are none; set data.validation")
    z = logits.detach().cpu().double()
    right = z.gather(1, labels.cpu().unsqueeze(1)).squeeze(1)
    if bool((right == z.max(1).values).all()):
        warnings.warn(
            "every validation row is classified correctly, so no temperature is best: it stays 1; use more validation "
            "rows (data.validation)",
            stacklevel=2,
        )
        return 1.0
    low, high = -math.log(HIGHEST), math.log(HIGHEST)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        slope = ((math.exp(middle) * z).softmax(1) * z).sum(1).mean() - right.mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp(-(low + high) / 2)
