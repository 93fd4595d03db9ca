"""Copies of converted models with ordinary layers in place of the Bayesian ones."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from .layers import BayesianLayer
from .layers.scope import remove_scope

BAYESIAN_ATTRIBUTES = ("family", "scope", "site_name")


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy that shares the model's parameters, and has buffers of its own."""
    modules = list(model.modules())
    shared: dict[int, Any] = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    values = [value for module in modules for value in vars(module).values()]
    # An activation that a module kept can't be copied; what it is does not matter to the copy.
    shared |= {id(value): value.detach() for value in values if isinstance(value, Tensor) and not value.is_leaf}
    # Modules have a dozen containers for hooks, mostly empty; torch's copying would take most of its time for them.
    shared |= {id(value): type(value)() for value in values if type(value) in (OrderedDict, dict, set) and not value}
    for layer in modules:
        if isinstance(layer, BayesianLayer):
            shared |= {id(layer.scope): layer.scope, id(layer.posterior): layer.posterior}
    network = copy.deepcopy(model, shared)
    for module in list(network.modules()):
        if isinstance(module, BayesianLayer):
            plain_again(module)
        remove_scope(module)
    return network


def plain_again(layer: nn.Module) -> None:
    """Turn a Bayesian layer back into an ordinary one; its base tensors stay."""
    assert isinstance(layer, BayesianLayer)
    del layer._modules["posterior"]
    for attribute in BAYESIAN_ATTRIBUTES:
        layer.__dict__.pop(attribute, None)
    object.__setattr__(layer, "__class__", layer.plain)
