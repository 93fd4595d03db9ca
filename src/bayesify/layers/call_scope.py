"""What the converted layers share during one call of the model: which component each row gets, and the draws."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.batches import first_tensor
from bayesify.errors import BayesifyError
from bayesify.layers.network_state import Snapshot, Stored
from bayesify.methods.base import Draws, Method

Proof = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Shows, for a call's arguments, that it computes what prediction does; sets the scope's `proven_rows`."""
START_BOUND = 232_792_560
"""The first position is uniform below this: a multiple of 1 to 22, so that all of K components are equally likely."""

NESTED = (
    "a Bayesian model was called with a nested tensor, whose rows can't have a draw each; use a padded one and a mask, "
    "or call it in evaluation"
)


@dataclass
class Call:
    """One call of the model: its rows, `position`, whose entry i chooses the component of row i, and what was drawn.

    `drawn` keeps each weight's perturbation, so that a layer called twice is the same function both times (except for
    an embedding drawn per occurrence, and for local noise, which is on activations).
    """

    position: Tensor
    rows: int
    drawn: dict[str, Any] = field(default_factory=dict)
    before: Snapshot | None = None

    def draws(self, method: Method, device: torch.device | None) -> Draws:
        """The draws that a method makes in this call."""
        position = self.position
        if method.draws_per != "row":
            position = position[: 1 if method.draws_per == "batch" else method.components]
        return Draws(position.to(device or position.device))


class _OfThread(threading.local):
    """What a thread does with the model: the call that it is in, and whether rows get draws in evaluation too."""

    call: Call | None = None
    per_row: bool = False


class _OfGraph:
    """The same for compiled code, which can't follow what belongs to a thread, and keeps its calls to itself."""

    call: Call | None = None
    per_row: bool = False


class Scope:
    """What the layers of one model share: the call that each thread is in, and how calls assign draws to rows.

    In training there is a position for each row of the batch, counting up from a random start; a row's component is its
    position modulo K, so any batch size works and all components get rows. In evaluation there is one position for the
    call. `start`, unless None, sets the first position. `skipped` says why layers stayed plain, `stored` what the
    last call in evaluation left in the model, `proven_rows` for how large a batch training (True) and evaluation
    (False) were shown to compute what prediction does.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        self.skipped: dict[str, str] = {}
        self.start: Tensor | None = None
        self.stored = Stored()
        self.proven_rows = {True: 0, False: 0}
        self.unproven_because = ""
        self.of_thread, self.of_graph, self.threads = _OfThread(), _OfGraph(), set[int]()

    def call(self, name: str) -> Call:
        """The call of the model that this thread is in; raises outside of a call."""
        call = (self.of_graph if torch.compiler.is_compiling() else self.of_thread).call
        if call is None:
            raise BayesifyError(
                f"layer {name!r} was called outside its model, so it can't know which draw to use. Call the converted "
                "model itself, or by.draw(model) for a frozen copy whose parts can be called alone. (Activation "
                "checkpointing calls layers again in backward: leave converted layers out of it.)"
            )
        return call

    @contextmanager
    def drawing_per_row(self) -> Iterator[None]:
        """Give each row its own position in this thread's calls, in evaluation too."""
        before = self.of_thread.per_row
        self.of_thread.per_row = self.of_graph.per_row = True
        try:
            yield
        finally:
            self.of_thread.per_row = self.of_graph.per_row = before

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a file has of it: no call that is going on."""
        left_out = ("of_thread", "of_graph", "threads")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, of_thread=_OfThread(), of_graph=_OfGraph(), threads=set())


def _first(args: Any, kwargs: Any) -> Tensor:
    """The tensor that tells the number of rows: the first one with a dimension."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.dim():
        first = first_tensor((args, kwargs))
    if first is None:
        raise BayesifyError("a Bayesian model was called without any tensor, so its batch size is unknown")
    return first


class OpenScope:
    """A forward pre-hook of the converted model: reads the batch size and starts a call."""

    def __init__(self, scope: Scope, prove: Proof | None = None) -> None:
        self.scope, self.prove = scope, prove

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        scope, first = self.scope, _first(args, kwargs)
        compiling = torch.compiler.is_compiling()
        now: _OfThread | _OfGraph = scope.of_graph if compiling else scope.of_thread
        per_row = module.training or now.per_row
        if first.is_nested and per_row:
            raise BayesifyError(NESTED)
        rows = 0 if first.is_nested else first.shape[min(scope.batch_dim, first.dim() - 1)]
        is_known = compiling or (module.training and rows <= scope.proven_rows[True])
        before = None if is_known else self._prepare(module, args, kwargs, rows)
        start = torch.randint(START_BOUND, (1,), device=first.device) if scope.start is None else scope.start
        start = start.to(first.device, non_blocking=True)
        now.call = Call(start + torch.arange(rows, device=first.device) if per_row else start, rows, before=before)

    def _prepare(self, module: nn.Module, args: Any, kwargs: Any, rows: int) -> Snapshot | None:
        """Prove that the call will compute what prediction does; in evaluation, undo what the call before has stored.

        Nothing is undone while another thread is in a call.
        """
        if self.prove and rows > self.scope.proven_rows[module.training]:
            self.prove(module, args, kwargs)
        if module.training:
            return None
        if not self.scope.threads:
            self.scope.stored.undo(module)
        self.scope.threads.add(get_ident())
        return Snapshot(module)


class CloseScope:
    """A forward hook of the converted model: ends the call."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        now: _OfThread | _OfGraph = self.scope.of_graph if torch.compiler.is_compiling() else self.scope.of_thread
        call, now.call = now.call, None
        if call is not None and call.before is not None:
            self.scope.stored.note(call.before, module)
            self.scope.threads.discard(get_ident())
        if self.scope.unproven_because and output is not None:
            reason, self.scope.unproven_because = self.scope.unproven_because, ""
            warnings.warn(
                "it could not be checked that rows get their own draws, as the network fails in evaluation with "
                f"{reason}. Call by.check(model, batch) with a batch that it takes in evaluation",
                stacklevel=2,
            )


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
