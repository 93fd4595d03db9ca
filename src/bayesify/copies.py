"""Copies of converted models with ordinary layers in place of the Bayesian ones."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .layers import BayesianLayer
from .layers.scope import remove_scope

ATOMS, CONTAINERS = {bool, int, float, str, NoneType}, {OrderedDict, dict, set}
RULES_OF_COPYING = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__new__")
BAYESIAN_ATTRIBUTES = ("family", "scope", "site_name")


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy that shares the model's parameters, and has buffers of its own."""
    modules = list(model.modules())
    memo: dict[int, Any] = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    values = [value for module in modules for value in vars(module).values()]
    # An activation that a module kept can't be copied; what it is does not matter to the copy.
    memo |= {id(value): value.detach() for value in values if isinstance(value, Tensor) and not value.is_leaf}
    for layer in modules:
        if isinstance(layer, BayesianLayer):
            memo |= {id(part): part for part in (layer.scope, layer.posterior, layer.family)}
    for norm in modules:
        if isinstance(norm, _BatchNorm):  # a clone is what copying these comes to, in a tenth of the time
            memo |= {id(buffer): buffer.clone() for buffer in norm._buffers.values() if type(buffer) is Tensor}
    ordinary = [module for module in modules if id(module) not in memo and _is_ordinary(module)]
    memo |= {id(module): object.__new__(type(module)) for module in ordinary}
    for module in ordinary:
        own = {name: v if type(v) in ATOMS else _copied(v, memo) for name, v in vars(module).items()}
        vars(memo[id(module)]).update(own)
    network = copy.deepcopy(model, memo)
    for module in list(network.modules()):
        if isinstance(module, BayesianLayer):
            plain_again(module)
        remove_scope(module)
    return network


def _is_ordinary(module: nn.Module) -> bool:
    """Whether to copy it is to copy its attributes: none of its classes has a word of its own to say about that."""
    kind = type(module)
    ruled = any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in RULES_OF_COPYING)
    ruled = ruled or kind in copyreg.dispatch_table or "__deepcopy__" in vars(module)
    return not ruled and kind.__basicsize__ == nn.Module.__basicsize__  # or else it has slots, or is a list too


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """What `copy.deepcopy` gives, sooner for what modules have most of: empty containers for hooks."""
    kind = type(value)
    return memo.setdefault(id(value), kind()) if kind in CONTAINERS and not value else copy.deepcopy(value, memo)


def plain_again(layer: nn.Module) -> None:
    """Turn a Bayesian layer back into an ordinary one; its base tensors stay."""
    assert isinstance(layer, BayesianLayer)
    del layer._modules["posterior"]
    for attribute in BAYESIAN_ATTRIBUTES:
        layer.__dict__.pop(attribute, None)
    object.__setattr__(layer, "__class__", layer.plain)
