"""What the converted layers share during one call of the model: which component each row gets, and the draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayesify.batches import first_tensor
from bayesify.errors import BayesifyError
from bayesify.methods.base import Draws, Method

START_BOUND = 232_792_560
"""The first position is uniform below this: a multiple of 1 to 22, so that all of K components are equally likely."""


class Scope:
    """One tensor decides which component each row gets in a call: `position`, whose entry i belongs to row i.

    In training there is a position for each row of the batch, counting up from a random start; a row's component is its
    position modulo K, so any batch size works and all components get rows. In evaluation there is one position for the
    call. `start`, unless None, sets the first position; `per_row` gives each row its own position in evaluation too.
    `drawn` keeps each weight's perturbation, so that a layer called twice is the same function both times (except for
    an embedding drawn per occurrence, and for local noise, which is on activations). `skipped` says why layers stayed
    plain.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        self.skipped: dict[str, str] = {}
        self.start: Tensor | None = None
        self.per_row = False
        self.position: Tensor | None = None
        self.drawn: dict[str, Any] = {}

    def positions(self, name: str) -> Tensor:
        """The positions of this call; raises outside of a call."""
        if self.position is None:
            raise BayesifyError(
                f"layer {name!r} was called outside its model, so it can't know which draw to use. Call the converted "
                "model itself, or by.draw(model) for a frozen copy whose parts can be called alone. (Activation "
                "checkpointing calls layers again in backward: leave converted layers out of it.)"
            )
        return self.position

    def draws(self, method: Method, name: str, device: torch.device | None) -> Draws:
        """The draws that a method makes in this call."""
        position = self.positions(name) if self.position is None else self.position
        if method.draws_per != "row":
            position = position[: 1 if method.draws_per == "batch" else method.components]
        return Draws(position.to(device or position.device))


class OpenScope:
    """A forward pre-hook of the converted model: reads the batch size and starts a call."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        scope, first = self.scope, args[0] if args else None
        if not isinstance(first, Tensor) or not first.dim():
            first = first_tensor((args, kwargs))
        if first is None:
            raise BayesifyError("a Bayesian model was called without any tensor, so its batch size is unknown")
        per_row = module.training or scope.per_row
        if first.is_nested and per_row:
            raise BayesifyError(
                "a Bayesian model was called with a nested tensor, whose rows can't have a draw each; use a padded "
                "one and a mask, or call it in evaluation"
            )
        start = torch.randint(START_BOUND, (1,), device=first.device) if scope.start is None else scope.start
        start = start.to(first.device, non_blocking=True)
        if per_row:
            rows = first.shape[min(scope.batch_dim, first.dim() - 1)]
            start = start + torch.arange(rows, device=first.device)
        scope.position, scope.drawn = start, {}


class CloseScope:
    """A forward hook of the converted model: ends the call."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.scope.position, self.scope.drawn = None, {}


def remove_scope(module: nn.Module) -> Scope | None:
    """Remove the hooks of a scope from a module, and return the scope, if there is one."""
    found = None
    # A hook's key is unique only within its dict: after unpickling, new hooks may get the keys of old ones.
    before: list[dict[int, Any]] = [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]
    after: list[dict[int, Any]] = [module._forward_hooks, module._forward_hooks_always_called]
    for kind, places in ((OpenScope, before), (CloseScope, after)):
        for key, hook in list(places[0].items()):
            if isinstance(hook, kind):
                found = hook.scope
                for place in places:
                    place.pop(key, None)
    return found
