"""Draws × batches → a prediction, streamed; and draws as frozen networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .adaptive import Adaptive
from .batches import batches, input_of
from .draw_counts import components, families_of
from .errors import BayesifyError
from .likelihood import Categorical, Likelihood
from .memory import Memory, lent_memory
from .sampler import Call, Sampler
from .skeleton import Skeleton


def predict(
    model: nn.Module,
    data: Any,
    samples: int | Adaptive | None = None,
    *,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    batch_size: int | None = None,
    draws: bool | None = None,
    call: Call | None = None,
) -> Any:
    """The posterior predictive of a tensor, or of a loader's batches, from S draws of the whole network.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.Rank1(4))
    >>> p = by.predict(model, torch.randn(10, 4), samples=8)
    >>> p.probs.shape, p.epistemic.shape
    (torch.Size([10, 3]), torch.Size([10]))

    Draw s of a seed is the same function whatever the batches; it uses component s modulo K. `samples=None` is each
    component once if components are points (if layers have different numbers of them, until all come in the same order
    again), else a multiple of K of at least 20; `samples=by.Adaptive()` stops for each
    input once it is settled. Outputs mean what `likelihood` says (Categorical unless given). `draws=True` keeps every
    draw's output. Batches may be tensors, (input, target) pairs, whose input is used, or dicts of keyword arguments;
    `call(network, batch)` may say how to get an output otherwise, and is given the batch as it is.
    The model, its mode and the global random state stay as they are, and several threads may predict at once.
    """
    likelihood = likelihood or Categorical()
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise BayesifyError(f"seed={seed!r}: expected a whole number; by.draw(model, None) is the mean network")
    if isinstance(samples, Adaptive) and draws:
        raise BayesifyError(
            "draws=True with samples=Adaptive(…): inputs have different numbers of draws, so none is kept"
        )
    parts = []
    with torch.inference_mode(False), torch.no_grad(), lent_memory() as memory:
        memory = Memory(reused=False) if call else memory
        sampler = Sampler(model, samples, seed=seed, call=call, memory=memory)
        for batch in batches(data, batch_size, sampler.batch_dim):
            given = batch if call else input_of(batch)
            if isinstance(samples, Adaptive):
                parts.append(sampler.settled(given, likelihood, samples))
            else:
                parts.append(sampler.counted(given, likelihood, likelihood.keeps_draws if draws is None else draws))
        sampler.keep_copy()
    if not parts:
        raise BayesifyError("nothing to predict: the data has no batch")
    return type(parts[0]).join(parts, sampler.row_dim)


def draw(model: nn.Module, seed: int | None = 0, *, index: int = 0) -> nn.Module:
    """One draw (or with `seed=None` the mean) as an ordinary frozen network, to be called many times.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.IBNN(4))
    >>> by.draw(model, seed=1)
    Linear(in_features=4, out_features=3, bias=True)

    It shares no tensor with the model, so neither changes the other.
    """
    skeleton = Skeleton(model)
    skeleton.write(seed, index)
    return skeleton.alone()


def members(model: nn.Module) -> list[nn.Module]:
    """The mean of each of the K components as an ordinary network.

    >>> import bayesify as by
    >>> len(by.members(by.convert(nn.Linear(4, 3), by.BatchEnsemble(6))))
    6
    """
    skeletons = [Skeleton(model) for _ in range(components(families_of(model)))]
    for k, skeleton in enumerate(skeletons):
        skeleton.write_member(k)
    return [skeleton.alone() for skeleton in skeletons]
