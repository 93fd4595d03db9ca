"""Uncertainty regularisation on out-of-distribution inputs (BayesAdapter, section 3)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.batches import first_tensor, run
from bayesify.conversion.drawn_network import require_layers
from bayesify.errors import BayesifyError
from bayesify.layers.base import unwrapped
from bayesify.layers.call_scope import START_BOUND
from bayesify.methods.distributions import entropy


def uniform_noise(x: Tensor, epsilon: float = 0.031, *, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Inputs with noise from Uniform(±epsilon), clamped to their range: a cheap stand-in for attacks.

    >>> bool((uniform_noise(torch.ones(2, 3)) <= 1).all())
    True

    Args:
        x: Inputs.
        epsilon: The largest change.
        low: The smallest value of an input.
        high: The largest value of an input.

    Returns:
        Inputs of the same shape.
    """
    return (x + epsilon * (2 * torch.rand_like(x) - 1)).clamp(low, high)


def uncertainty_loss(model: nn.Module, x: Any, *, gamma: float = 0.75, alpha: float = 3.0, draws: int = 2) -> Tensor:
    """alpha · relu(gamma - MI).mean(): on out-of-distribution inputs, mutual information should reach gamma (eq. 9).

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.LowRankEnsemble(20))
    >>> by.uncertainty_loss(model, torch.randn(8, 4)) > 0
    tensor(True)

    Every draw uses a different component. With two draws MI is at most ln 2 = 0.693, below the paper's gamma, so
    with its settings the loss never reaches 0; in general MI is at most ln(draws).

    Args:
        model: A converted classifier.
        x: A batch of out-of-distribution inputs.
        gamma: The mutual information to reach, in nats.
        alpha: The weight of the loss.
        draws: The number of draws, at least 2.

    Returns:
        A scalar to add to the training loss.
    """
    if not isinstance(draws, int) or draws < 2:
        raise BayesifyError(f"draws={draws!r}: the mutual information needs at least 2 draws")
    first = first_tensor(x)
    if first is not None and first.numel() == 0:
        raise BayesifyError(f"the batch has no rows: its input has shape {tuple(first.shape)}. Skip empty batches")
    scopes, start = {layer.scope for layer in require_layers(model).values()}, int(torch.randint(START_BOUND, ()))
    outputs = []
    with _statistics_kept(unwrapped(model)):
        try:
            for index in range(draws):
                for scope in scopes:  # a row has the next component in each call, so that no two calls use the same one
                    scope.start = torch.tensor([start + index])
                outputs.append(run(model, x))
        finally:
            for scope in scopes:
                scope.start = None
    log_probs = torch.stack([logits.float().log_softmax(-1) for logits in outputs])
    mean = log_probs.logsumexp(0) - torch.tensor(float(draws)).log()
    information = entropy(mean) - entropy(log_probs).mean(0)
    return alpha * torch.relu(gamma - information).mean()


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Keep out-of-distribution inputs out of the running statistics, which describe the training data."""
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
