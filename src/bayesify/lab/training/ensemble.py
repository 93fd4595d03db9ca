"""`joined`: join separately trained networks into one Ensemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

import bayesify as by
from bayesify.errors import BayesifyError
from bayesify.layers import bayesian_layers


def joined(networks: Sequence[nn.Module]) -> nn.Module:
    """Join K trained networks of one architecture into one Bayesian network with K components.

    Args:
        networks: The trained networks. The first one is converted in place.

    Returns:
        The first network, converted with `by.Ensemble(K)`.

    Raises:
        BayesifyError: If the networks differ in a parameter that an Ensemble can't hold copies of.

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
    _require_no_other_differences(model, states, layers)
    return model


def _require_no_other_differences(
    model: nn.Module, states: list[dict[str, torch.Tensor]], layers: Mapping[str, nn.Module]
) -> None:
    """Raise if a parameter outside the converted layers differs, as only that of the first network is kept."""
    plain = dict(model.named_parameters())
    for key, tensor in states[0].items():
        if key in plain and key.rpartition(".")[0] not in layers and not torch.equal(tensor, plain[key]):
            raise BayesifyError(
                f"{key!r} differs between the networks, and an Ensemble can't hold copies of its layer; train them as "
                "separate runs instead"
            )
