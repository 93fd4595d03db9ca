"""Teach a network to be uncertain of what it has not seen (BayesAdapter, section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .batches import run
from .errors import BayesifyError
from .layers import bayesian_layers
from .layers.scope import CYCLE
from .prediction import entropy
from .selection import unwrapped


def uniform_noise(x: Tensor, epsilon: float = 0.031, *, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Inputs with noise from Uniform(±epsilon), clamped to their range: a cheap stand-in for attacks.

    >>> bool((uniform_noise(torch.ones(2, 3)) <= 1).all())
    True
    """
    return (x + epsilon * (2 * torch.rand_like(x) - 1)).clamp(low, high)


def uncertainty_loss(model: nn.Module, x: Any, *, gamma: float = 0.75, alpha: float = 3.0, draws: int = 2) -> Tensor:
    """alpha · relu(gamma - MI).mean(): on unfamiliar inputs the draws' mutual information should reach gamma (eq. 9).

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.LowRankEnsemble(20))
    >>> by.uncertainty_loss(model, torch.randn(8, 4)) > 0
    tensor(True)

    Every draw uses another component. Two draws bound MI by ln 2 = 0.693, which is below the paper's gamma, so with its
    settings the hinge never closes; more draws allow up to ln(draws).
    """
    if not isinstance(draws, int) or draws < 2:
        raise BayesifyError(f"draws={draws!r}: the mutual information needs at least 2 draws")
    with _statistics_kept(unwrapped(model)):
        outputs = _drawn_apart(model, x, draws)
    log_probs = torch.stack([logits.float().log_softmax(-1) for logits in outputs])
    mean = log_probs.logsumexp(0) - torch.tensor(float(draws)).log()
    information = entropy(mean) - entropy(log_probs).mean(0)
    return alpha * torch.relu(gamma - information).mean()


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Unfamiliar inputs must not enter the running statistics, which are of the training data."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in before:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count


def _drawn_apart(model: nn.Module, x: Any, draws: int) -> list[Tensor]:
    """Outputs of several calls whose rows have consecutive components, so that no two are of the same one."""
    scopes = {layer.scope for layer in bayesian_layers(unwrapped(model)).values()}
    if not scopes:
        raise BayesifyError("the model has no Bayesian layer: use by.convert(model, family) first")
    start = int(torch.randint(CYCLE, ()))
    try:
        outputs = []
        for index in range(draws):
            for scope in scopes:
                scope.start = torch.tensor([start + index])
            outputs.append(run(model, x))
        return outputs
    finally:
        for scope in scopes:
            scope.start = None
