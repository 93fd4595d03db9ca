"""What the converted layers of one model share during one call of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import BayesifyError
from ..family import Draws, Family, Perturbation
from ..noise import is_eager

CYCLE = 232_792_560
"""The first position is uniform below this; a multiple of all numbers to 22, so every component is as likely."""


class Scope:
    """One tensor decides the components of a call: `position`, whose entry i is of row i.

    In training there is a position for each row of the batch, counting up from a random start; a row's component is its
    position modulo K, so any batch size works and none starves. In evaluation there is one position for the call.
    `start` fixes the first position where it is not None; `by_rows` gives a call in evaluation a position for each row
    too. `drawn` keeps each layer's perturbation, so that a layer called twice is the same function both times (but for
    an embedding drawn per occurrence, and for local noise, which is on activations). `waiting` says in what mode a
    perturbation was made that came with another layer's and is not used yet. `folded` keeps weights made of factors for
    several layers at once. `root` is the model during a call.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        self.skipped: dict[str, str] = {}
        self.start: Tensor | None = None
        self.by_rows = False
        self.position: Tensor | None = None
        self.root: nn.Module | None = None
        self.drawn: dict[str, Perturbation] = {}
        self.waiting: dict[str, object] = {}
        self.folded: dict[tuple[str, object], Tensor] = {}
        self.asked: dict[tuple[int, torch.device, bool], Draws] = {}

    def draws(self, family: Family, name: str, device: torch.device | None) -> Draws:
        """The draws that a family makes for this call; layers that ask for the same share them."""
        if self.position is None:
            raise BayesifyError(
                f"layer {name!r} was called outside its model, so nothing says which draw to use. Call the converted "
                "model itself, or by.draw(model) for a frozen copy whose parts can be called alone. (Activation "
                "checkpointing calls layers again in backward: leave converted layers out of it.)"
            )
        size = {"batch": 1, "component": family.components, "row": self.position.shape[0]}[family.grain]
        key = (size, device or self.position.device, torch.is_grad_enabled())
        if key not in self.asked:
            whole = is_eager() and size == self.position.shape[0]  # each operation has its price
            self.asked[key] = Draws((self.position if whole else self.position[:size]).to(key[1]))
        return self.asked[key]

    def forget(self) -> None:
        """Drop what was drawn for a call."""
        self.root, self.drawn, self.waiting, self.folded, self.asked = None, {}, {}, {}, {}


class OpenScope:
    """A forward-pre-hook of the root: reads the batch's size and starts a call."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = first_tensor((args, kwargs))
        if first is None:
            raise BayesifyError("a Bayesian model was called without any tensor, so its batch size is unknown")
        by_rows = module.training or self.scope.by_rows
        if first.is_nested and by_rows:
            raise BayesifyError(
                "a Bayesian model was called with a nested tensor, whose rows can't have a draw each; give a padded "
                "one and a mask, or call it in evaluation"
            )
        given = self.scope.start
        start = torch.randint(CYCLE, (1,), device=first.device) if given is None else given.to(first.device)
        if by_rows:
            start = start + torch.arange(batch_size(first, self.scope.batch_dim), device=first.device)
        self.scope.position = start
        self.scope.forget()
        self.scope.root = module


class CloseScope:
    """A forward hook of the root: ends the call."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.scope.position = None
        self.scope.forget()


def remove_scope(module: nn.Module) -> Scope | None:
    """Take a scope's hooks off the module that opens it, if it is one."""
    found = None
    for kind, *places in _places(module):
        for key, hook in _of_kind(places[0], kind).items():
            found = hook.scope
            for place in places:
                place.pop(key, None)
    return found


def hooks_of_scope_alone(module: nn.Module) -> list[dict[int, Any]]:
    """The places where a module keeps hooks that have none but a scope's."""
    return [
        place
        for kind, *places in _places(module)
        for place in places
        if place and place.keys() <= _of_kind(places[0], kind).keys()
    ]


def _places(module: nn.Module) -> tuple[tuple[type, dict[int, Any], dict[int, Any]], ...]:
    """Each kind of a scope's hooks, where a module keeps them and where it keeps that they are special.

    Keys are of one kind alone: in another process than the one that made them, new hooks may get the same.
    """
    return (
        (OpenScope, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (CloseScope, module._forward_hooks, module._forward_hooks_always_called),
    )


def _of_kind(hooks: dict[int, Any], kind: type) -> dict[int, Any]:
    return {key: hook for key, hook in hooks.items() if isinstance(hook, kind)}


def batch_size(tensor: Tensor, batch_dim: int) -> int:
    """The number of rows of a tensor along the batch's dimension."""
    return tensor.shape[min(batch_dim, tensor.dim() - 1)]


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor with a dimension in nested containers; of packed sequences one entry for each."""
    if isinstance(value, Tensor):
        return value if value.dim() else None
    if isinstance(value, PackedSequence):  # as many entries as it has sequences
        return value.data.flatten()[: int(value.batch_sizes[0])]
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    for part in parts:
        found = first_tensor(part)
        if found is not None:
            return found
    return None
