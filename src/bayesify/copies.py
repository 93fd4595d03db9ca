"""Copies of converted models with ordinary layers in place of the Bayesian ones."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .layers import BayesianLayer, named_modules
from .layers.hooked import keep_what_hooks_make
from .layers.scope import hooks_of_scope_alone, remove_scope

ATOMS, CONTAINERS = {bool, int, float, str, NoneType}, {OrderedDict, dict, set}
REGISTRIES = {"_parameters", "_buffers", "_modules"}
COPYING_RULES = (
    "__deepcopy__",
    "__reduce_ex__",
    "__reduce__",
    "__getstate__",
    "__setstate__",
    "__new__",
    "__hash__",
)
BAYESIAN_ATTRIBUTES = ("family", "scope", "site_name")


def plain_copy(model: nn.Module, modules: list[nn.Module] | None = None) -> nn.Module:
    """A copy that shares the model's parameters, and has buffers of its own; its `modules`, if known, each once."""
    modules = list(named_modules(model).values()) if modules is None else modules
    memo = _known(modules)
    if are_ordinary(modules):
        network = _copied_in_parts(model, modules, memo)
    else:
        memo |= _activations([value for module in modules for value in vars(module).values()])
        network = copy.deepcopy(model, memo)
    for module in named_modules(network).values():
        if isinstance(module, BayesianLayer):
            plain_again(module)
            keep_what_hooks_make(module)
        if module._forward_pre_hooks or module._forward_hooks:
            remove_scope(module)
    return network


def _known(modules: list[nn.Module]) -> dict[int, Any]:
    """What is to stand in the copy for what modules have, as `copy.deepcopy` takes it: parameters for themselves."""
    memo: dict[int, Any] = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    for module in modules:
        if isinstance(module, BayesianLayer):
            memo |= {id(part): part for part in (module.scope, module.posterior, module.family)}
        if module._forward_pre_hooks:
            memo |= {id(hooks): type(hooks)() for hooks in hooks_of_scope_alone(module)}
    return memo


def _activations(values: list[Any]) -> dict[int, Tensor]:
    """What stands for those among values: they can't be copied, and what they are does not matter to the copy."""
    return {id(value): value.detach() for value in values if isinstance(value, Tensor) and not value.is_leaf}


def are_ordinary(modules: list[nn.Module]) -> bool:
    """Whether to copy them is to copy their attributes: none has a word of its own to say about that."""
    alone = any("__deepcopy__" in vars(module) for module in modules)
    return not alone and all(map(_is_ordinary, {type(module) for module in modules}))


def _is_ordinary(kind: type[nn.Module]) -> bool:
    ruled = any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in COPYING_RULES)
    ruled = ruled or kind in copyreg.dispatch_table
    return not ruled and kind.__basicsize__ == nn.Module.__basicsize__  # or else it has slots, or is a list too


def _copied_in_parts(model: nn.Module, modules: list[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """What `copy.deepcopy` gives for ordinary modules, in a third of its time.

    What else modules keep comes last: it may look at modules while it is copied.
    """
    own = [module for module in modules if id(module) not in memo]
    memo |= {id(module): object.__new__(type(module)) for module in own}
    for module in own:
        if isinstance(module, _BatchNorm):
            memo |= {id(t): t.clone() for t in module._buffers.values() if type(t) is Tensor and _stands_alone(t)}
    registries: list[tuple[dict[str, Any], str, Any]] = []
    rest: list[tuple[dict[str, Any], str, Any]] = []
    for module in own:
        made = vars(memo[id(module)])
        for name, value in vars(module).items():
            kind = type(value)
            if kind in ATOMS:
                made[name] = value
            elif name == "_compiled_call_impl":  # of `module.compile()`, which calls the module itself
                continue
            elif kind in CONTAINERS and not value:  # a module has a dozen for hooks
                if id(value) not in memo:
                    memo[id(value)] = kind()
                made[name] = memo[id(value)]
            else:
                (registries if name in REGISTRIES else rest).append((made, name, value))
    memo |= _activations([value for _, _, value in rest])
    for made, name, value in registries:
        made[name] = _registry(value, memo)
    for made, name, value in rest:
        made[name] = _value(value, memo)
    copied: nn.Module = memo[id(model)]
    return copied


def _registry(given: Any, memo: dict[int, Any]) -> Any:
    """A copy of a module's parameters, buffers or submodules by name."""
    made = memo.get(id(given))
    if made is None and type(given) is dict:
        made = memo[id(given)] = {name: _value(value, memo) for name, value in given.items()}
    return copy.deepcopy(given, memo) if made is None else made


def _value(given: Any, memo: dict[int, Any]) -> Any:
    """A deep copy; what was copied before is looked up here, as a call for each would take longer than all else."""
    made = memo.get(id(given))
    return copy.deepcopy(given, memo) if made is None else made


def _stands_alone(buffer: Tensor) -> bool:
    """Whether a clone is a copy of it."""
    return not buffer.requires_grad and buffer._base is None and not vars(buffer)


def plain_again(layer: nn.Module) -> None:
    """Turn a Bayesian layer back into an ordinary one; its base tensors stay."""
    assert isinstance(layer, BayesianLayer)
    del layer._modules["posterior"]
    for attribute in BAYESIAN_ATTRIBUTES:
        layer.__dict__.pop(attribute, None)
    object.__setattr__(layer, "__class__", layer.plain)
