"""Temperature scaling (Guo et al. 2017)."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from bayesify.lab.baselines.errors import BaselineError

WIDEST = 100.0
"""The temperature is looked for between 1/100 and 100."""
HALVINGS = 60


@torch.no_grad()
def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T that minimises the negative log-likelihood of softmax(logits / T), in double precision.

    >>> logits, labels = torch.tensor([[2.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
    >>> round(best_temperature(logits, labels), 4)  # 2 / T = log(3 / 1)
    1.8205

    In β = 1/T the loss is convex, with the derivative mean(E_p[z] - z_y), so halving the interval of its sign finds the
    minimum. Where every row is right, more confidence is better without end, and T = 1 is kept, with a warning.
    """
    if not len(labels):
        raise BaselineError("a temperature is fitted to validation rows, and there are none; set data.validation")
    z = logits.detach().cpu().double()
    right = z.gather(1, labels.cpu().unsqueeze(1)).squeeze(1)
    if bool((right == z.max(1).values).all()):
        warnings.warn(
            "every validation row is classified rightly, so no temperature is best: 1 is kept; more validation rows "
            "(data.validation) can tell",
            stacklevel=2,
        )
        return 1.0
    low, high = -math.log(WIDEST), math.log(WIDEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        slope = ((math.exp(middle) * z).softmax(1) * z).sum(1).mean() - right.mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp(-(low + high) / 2)
