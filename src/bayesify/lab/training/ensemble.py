"""Separately trained networks as one Ensemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

import bayesify as by
from bayesify.errors import BayesifyError
from bayesify.layers import bayesian_layers


def joined(networks: Sequence[nn.Module]) -> nn.Module:
    """One Bayesian network whose K components are K trained networks of the same architecture; the first is changed.

    >>> nets = [nn.Linear(2, 1) for _ in range(3)]
    >>> outputs = torch.stack([net(torch.ones(1, 2)) for net in nets])
    >>> model = joined(nets)
    >>> torch.allclose(torch.stack([net(torch.ones(1, 2)) for net in by.members(model)]), outputs)
    True
    """
    first, *others = networks
    states = [network.state_dict() for network in others]
    model = by.convert(first, by.Ensemble(len(networks)))
    layers = bayesian_layers(model)
    with torch.no_grad():
        for name, layer in layers.items():
            for tensor, copies in layer.posterior.tensors().items():
                key = f"{name}.{tensor}" if name else tensor
                copies.copy_(torch.stack([state[key] for state in states]))
    _require_all_joined(model, states, layers)
    return model


def _require_all_joined(
    model: nn.Module, states: list[dict[str, torch.Tensor]], layers: Mapping[str, nn.Module]
) -> None:
    """A tensor that no converted layer holds would be the first network's alone."""
    plain = dict(model.named_parameters())
    for key, tensor in states[0].items():
        if key in plain and key.rpartition(".")[0] not in layers and not torch.equal(tensor, plain[key]):
            raise BayesifyError(
                f"{key!r} belongs to a layer that an Ensemble can't hold copies of, so the networks can't be joined; "
                "train them as runs of their own"
            )
