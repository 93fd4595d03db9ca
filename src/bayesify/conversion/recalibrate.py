"""`recalibrate`: estimate the statistics of batch norms anew."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayesify.batches import batches, call_with, first_tensor, input_of
from bayesify.errors import BayesifyError
from bayesify.layers import BayesianLayer
from bayesify.layers.norm import STATISTICS


@torch.no_grad()
def recalibrate(model: nn.Module, loader: Iterable[Any]) -> nn.Module:
    """Estimate the statistics of all batch norms anew, as the average over a loader's batches under training draws.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), by.IBNN(4))
    >>> model = by.recalibrate(model, [torch.randn(16, 4) for _ in range(3)])

    Args:
        model: A network, converted or not.
        loader: Batches; of (input, target) pairs the input is used.

    Returns:
        The same network.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.running_mean is not None]
    if not norms:
        return model
    own = [norm.method.components for norm in norms if isinstance(norm, BayesianLayer) and _own_statistics(norm)]
    with _kept_if_it_fails(model, norms):
        for norm in norms:
            _forget(norm)
        model.train()
        count = 0
        for batch in batches(loader, None):
            count += 1
            first = first_tensor(input_of(batch))
            if own and first is not None and first.shape[0] < max(own):  # a member would keep those of other batches
                raise BayesifyError(f"recalibrate got {first.shape[0]} rows for {max(own)} members; use larger batches")
            call_with(model, input_of(batch))
        if not count:
            raise BayesifyError("recalibrate got no batch; the statistics were left as they were")
    return model


@contextmanager
def _kept_if_it_fails(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Restore modes and momenta and, after an error, the statistics."""
    modes = {module: module.training for module in model.modules()}
    before = [(norm, norm.momentum, {name: buffer.clone() for name, buffer in norm.named_buffers()}) for norm in norms]
    try:
        yield
    except BaseException:
        for norm, _, statistics in before:
            norm.load_state_dict(statistics, strict=False)
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, momentum, _ in before:
            norm.momentum = momentum


def _own_statistics(norm: BayesianLayer) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in norm.posterior.named_buffers() if name in STATISTICS}


def _forget(norm: _BatchNorm) -> None:
    norm.reset_running_stats()
    norm.momentum = None
    if isinstance(norm, BayesianLayer):
        for name, buffer in _own_statistics(norm).items():
            buffer.copy_(getattr(norm, name).expand_as(buffer))
