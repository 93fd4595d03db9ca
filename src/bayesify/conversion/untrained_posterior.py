"""Posteriors that training never moves, as with an optimizer that was made before `convert`: named by `check`, and
warned of by `predict` and `save`, which compare each tensor's norm with that at the first call in training."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bayesify.conversion.drawn_network import rescaled_weights
from bayesify.errors import BayesifyError
from bayesify.layers import bayesian_layers
from bayesify.layers.base import has_scope, unwrapped
from bayesify.layers.call_scope import CloseScope, Norms, Scope

REMEDY = "make the optimizer after by.convert, from by.parameter_groups(model, lr=…) or model.parameters()"
UNTRAINED = (
    "training has changed the network's weights, but none of its {} posterior tensors, so its uncertainty is that of "
    f"an untrained posterior. If the optimizer was made before by.convert, {REMEDY} and train again; "
    "by.check(model, x, optimizer=…) tells. If the posterior is to stay, give its tensors requires_grad=False"
)


def require_posterior_in(optimizer: Optimizer | Iterable[Optimizer], model: nn.Module) -> None:
    """Raise unless the optimizer, or several together, have every posterior tensor that requires a gradient."""
    optimizers: list[Any] = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if wrong := [each for each in optimizers if not isinstance(each, Optimizer)]:
        raise BayesifyError(f"optimizer={type(wrong[0]).__name__}: expected a torch.optim.Optimizer, or a list of them")
    trained = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    posterior = _posterior(model)
    missing = [name for name, p in model.named_parameters() if id(p) in posterior and id(p) not in trained]
    if missing:
        raise BayesifyError(
            f"the optimizer does not have {len(missing)} of {len(posterior)} posterior tensors, such as "
            f"{missing[0]!r}, so it never trains them: {REMEDY}; or give those that are to stay requires_grad=False"
        )


def note_start(model: nn.Module) -> None:
    """Note the norms of a converted model's trained tensors at its first call in training, without waiting for them."""
    for hook in model._forward_hooks.values():
        if model.training and isinstance(hook, CloseScope) and hook.scope.norms is None:
            hook.scope.norms = _norms(model)


def warn_if_untrained(model: nn.Module) -> None:
    """Warn once if training has moved tensors of a model, but none of its posterior."""
    for part in filter(has_scope, unwrapped(model).modules()):
        scope = next(hook.scope for hook in part._forward_hooks.values() if isinstance(hook, CloseScope))
        if scope.norms and (count := _untrained(part, scope)):
            warnings.warn(UNTRAINED.format(count), stacklevel=4)


def _untrained(model: nn.Module, scope: Scope) -> int:
    """The number of posterior tensors if training has moved others only, else 0; forgets the norms if that is known."""
    norms, posterior, rescaled = scope.norms or Norms(), _posterior(model), rescaled_weights(model)
    named = {name: p for name, p in model.named_parameters() if name in norms and id(p) not in rescaled}
    own = {name: p for name, p in named.items() if id(p) in posterior}
    is_trained = scope.training_calls > 1 or any(p.grad is not None for p in own.values())
    if not own or _moved(own, norms):
        scope.norms = Norms()
    elif is_trained and _moved({name: p for name, p in named.items() if name not in own}, norms):
        scope.norms = Norms()
        return len(own)
    return 0


def _posterior(model: nn.Module) -> set[int]:
    """The ids of the posterior's trained tensors."""
    layers = bayesian_layers(model).values()
    return {id(p) for layer in layers for p in layer.posterior.parameters() if p.requires_grad}


@torch.no_grad()
def _norm(p: nn.Parameter) -> tuple[torch.dtype, torch.Tensor]:
    """Its type and its norm, in which the smallest step shows."""
    return p.dtype, torch.linalg.vector_norm(p, dtype=torch.float32 if p.device.type == "mps" else torch.float64)


def _norms(model: nn.Module) -> Norms:
    return Norms({name: _norm(p) for name, p in model.named_parameters() if p.requires_grad})


def _moved(parameters: dict[str, nn.Parameter], before: Norms) -> bool:
    """Whether one of the tensors has another norm, though its type is the same."""
    for name, p in parameters.items():
        (dtype, norm), (dtype_before, norm_before) = _norm(p), before[name]
        if dtype == dtype_before and bool(norm.cpu() != norm_before.cpu()):
            return True
    return False
