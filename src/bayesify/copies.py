"""Copies of converted models with ordinary layers in place of the Bayesian ones."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from .layers import BayesianLayer, bayesian_layers
from .layers.scope import remove_scope

BAYESIAN_ATTRIBUTES = ("family", "scope", "site_name")


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy that shares the model's parameters, and has buffers of its own."""
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    # An activation that a module kept can't be copied; what it is does not matter to the copy.
    kept = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    shared |= {id(value): value.detach() for value in kept if not value.is_leaf}
    # Modules have a dozen containers for hooks, mostly empty; torch's copying would take most of its time for them.
    values = (value for module in model.modules() for value in vars(module).values())
    shared |= {id(value): type(value)() for value in values if type(value) in (OrderedDict, dict, set) and not value}
    for layer in bayesian_layers(model).values():
        shared[id(layer.scope)] = layer.scope
        shared[id(layer.posterior)] = layer.posterior
    network = copy.deepcopy(model, shared)
    for layer in list(bayesian_layers(network).values()):
        plain_again(layer)
    for module in network.modules():
        remove_scope(module)
    return network


def plain_again(layer: nn.Module) -> None:
    """Turn a Bayesian layer back into an ordinary one; its base tensors stay."""
    assert isinstance(layer, BayesianLayer)
    del layer._modules["posterior"]
    for attribute in BAYESIAN_ATTRIBUTES:
        layer.__dict__.pop(attribute, None)
    object.__setattr__(layer, "__class__", layer.plain)
