"""What the converted layers share during one call of the model: which component each row gets, and the draws."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayesify.batches import first_tensor
from bayesify.errors import BayesifyError
from bayesify.layers.network_state import Place
from bayesify.methods.base import Draws, Method
from bayesify.methods.draw_design import balanced

Check = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Checks, with a call's arguments, that the call will compute what prediction does; sets the scope's `check_from`."""
CHECKED_AGAIN = (9, 99, 999)
"""After so many calls in training the next is checked again: something was zero, or alike in all rows, at first."""
START_BOUND = 232_792_560
"""The first position is uniform below this: a multiple of 1 to 22, so that all of K components are equally likely."""


class Norms(dict[str, tuple[torch.dtype, Tensor]]):
    """The type and the norm of some tensors, by name; never changed, so that copies of a model share them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass
class Call:
    """One call of the model: its rows, `position`, whose entry i chooses the component of row i, and what was drawn.

    Rows side by side may be `samples` of one row: they have its component and, if `balanced`, noise that cancels.
    `drawn` keeps each weight's perturbation, so that a layer called twice is the same function both times (except for
    an embedding drawn per occurrence, and for local noise, which is on activations). `repeated` is the name of a layer
    whose single row was taken to be for all rows. `layers` has the names of the layers that got rows, with whether it
    was a single row for several of the batch; `check` checks the call if that is new, unless it was checked before.
    """

    position: Tensor
    rows: int
    samples: int = 1
    balanced: bool = True
    drawn: dict[Any, Any] = field(default_factory=dict)
    repeated: str | None = None
    layers: set[tuple[str, bool]] = field(default_factory=set)
    check: Callable[[], None] | None = None

    def draws(self, method: Method, device: torch.device | None) -> Draws:
        """The draws that a method makes in this call."""
        position, apart = self.position, self.samples
        if apart > 1 and self.shares(method):
            position, apart = position[::apart], 1
        if method.draws_per != "row":
            position = position[: apart * (1 if method.draws_per == "batch" else method.components)]
        draws = Draws(position.to(device or position.device))
        return draws if apart == 1 else self.balance(draws)

    def shares(self, method: Method) -> bool:
        """Whether a row's samples have one draw, as their component has no noise."""
        return method.draws_per == "component" and not method.noisy

    def balance(self, draws: Draws, rows: int | None = None) -> Draws:
        """Draws with noise that cancels between samples; see `methods.draw_design.balanced`."""
        return balanced(draws, self.samples, rows) if self.samples > 1 and self.balanced else draws


class SharedState:
    """The call that is going on, and how the next ones draw; compiled code can't follow threads.

    With `per_row`, each row gets a draw; without, one draw serves all; None leaves it to the model's mode. `samples`
    rows side by side are samples of one row. Draws in `drawn` are given, not made.
    """

    call: Call | None = None
    per_row: bool | None = None
    samples: int = 1
    balanced: bool = True
    drawn: Mapping[str, Any] = MappingProxyType({})


class ThreadState(SharedState, threading.local):
    """The same for each thread."""


class Scope:
    """What the layers of one model share: the call that each thread is in, and how calls assign draws to rows.

    In training there is a position for each row of the batch, counting up from a random start; a row's component is its
    position modulo K, so any batch size works and all components get rows. Samples of a row share its position. In
    evaluation there is one position for the call. `start`, unless None, sets the first position. `skipped` says why
    layers stayed plain. `check_from` is how many numbers a batch has from which the next call in training (True) or
    evaluation (False) is checked, `layers` what `Call.layers` was in checked calls, `results` what the attributes were
    in which calls in evaluation store results of their draw. `calls` counts calls outside of compiled code. `norms` are
    those of the trained tensors at the first call in training, by name; empty once it is known whether the posterior
    has moved.
    """

    calls = training_calls = 0

    def __init__(self, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        self.skipped: dict[str, str] = {}
        self.start: Tensor | None = None
        self.check_from: dict[bool, float] = {True: 1, False: 1}
        self.check_failed = ""
        self.norms: Norms | None = None
        self.layers: set[tuple[str, bool]] = set()
        self.results: dict[Place, Any] = {}
        self.calls_with_results = 0
        self.of_thread, self.of_graph = ThreadState(), SharedState()
        self.threads: set[int] = set()
        """The threads that are in a call."""

    def call(self, name: str) -> Call:
        """The call of the model that this thread is in; raises outside of a call."""
        call = self.of_graph.call if torch.compiler.is_compiling() else self.of_thread.call or self.of_graph.call
        if call is None:
            raise BayesifyError(
                f"layer {name!r} was called outside its model, so it can't know which draw to use. Call the converted "
                "model itself, or by.draw(model) for a frozen copy whose parts can be called alone. (Activation "
                "checkpointing calls layers again in backward: leave converted layers out of it. torch.jit calls them "
                "alone: give it by.draw(model), or use by.export.)"
            )
        return call

    @contextmanager
    def drawing(
        self, *, per_row: bool, samples: int = 1, balanced: bool = True, drawn: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[None]:
        """Set how this thread's calls draw; see `SharedState`."""
        states, given = (self.of_thread, self.of_graph), (per_row, samples, balanced, drawn)
        own = self.of_thread
        before = own.per_row, own.samples, own.balanced, own.drawn
        try:
            for state in states:
                state.per_row, state.samples, state.balanced, state.drawn = given
            yield
        finally:
            for state in states:
                state.per_row, state.samples, state.balanced, state.drawn = before

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a file has of it: no call that is going on."""
        own = dict(vars(self))  # at once, as other threads' calls may add to it
        return {name: value for name, value in own.items() if name not in ("of_thread", "of_graph", "threads")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, of_thread=ThreadState(), of_graph=SharedState(), threads=set())


class OpenScope:
    """A forward pre-hook of the converted model: reads the batch size and starts a call."""

    def __init__(self, scope: Scope, check: Check | None = None) -> None:
        self.scope, self.check = scope, check

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        scope, compiling = self.scope, torch.compiler.is_compiling()
        state, samples = scope.of_graph if compiling else scope.of_thread, 1
        first, rows, per_row = _first(args, kwargs, module.training, state.per_row, scope.batch_dim)
        check = None
        if self.check and not compiling:
            check = partial(self.check, module, args, kwargs)
            if (rows and first.numel()) >= scope.check_from[module.training]:  # nested tensors have no rows here
                check()
                check = None
        start = torch.randint(START_BOUND, (1,), device=first.device) if scope.start is None else scope.start
        start = start.to(first.device, non_blocking=True)
        if per_row:
            samples = state.samples if rows % state.samples == 0 else 1  # as in a part of a model that gets other rows
            start = start + torch.arange(rows, device=first.device).div(samples, rounding_mode="floor")
        call = Call(start, rows, samples, state.balanced, check=check)
        if not compiling:
            call.drawn.update(state.drawn)
            scope.calls += 1
            scope.threads.add(threading.get_ident())
            if len(scope.threads) > 1:
                _refuse_compiled_parts(scope, module)
            scope.of_thread.call = call
        scope.of_graph.call = call  # which serves compiled parts of the model too


def _refuse_compiled_parts(scope: Scope, model: nn.Module) -> None:
    """Raise if a part of the model is compiled, in place or by `torch.compile`: it can't tell threads apart."""
    if any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in model.modules()):
        scope.threads.discard(threading.get_ident())
        raise BayesifyError(
            "two threads called a model with a compiled part at once, and compiled code can't tell their draws apart; "
            "compile the whole model, use by.predict, or let one thread call it at a time"
        )


def _first(args: Any, kwargs: Any, training: bool, per_row: bool | None, batch_dim: int) -> tuple[Tensor, int, bool]:
    """The first tensor with a dimension, which tells the number of rows; this number; and whether each gets a draw."""
    per_row = training if per_row is None else per_row
    is_first = args and isinstance(args[0], Tensor) and args[0].dim()
    first = args[0] if is_first else first_tensor((args, kwargs))
    if first is None:
        raise BayesifyError("a Bayesian model was called without any tensor, so its batch size is unknown")
    if first.is_nested and per_row:
        raise BayesifyError(
            "a Bayesian model was called with a nested tensor, whose rows can't have a draw each; use a padded one and "
            "a mask, or call it in evaluation"
        )
    return first, 0 if first.is_nested else first.shape[min(batch_dim, first.dim() - 1)], per_row


def _explain_repeated_row(call: Call | None) -> None:
    """Add to the error that is being handled that a layer's single row was repeated, which may be its cause."""
    error = sys.exc_info()[1]
    if call and call.repeated is not None and error is not None and not isinstance(error, BayesifyError):
        error.add_note(
            f"bayesify: layer {call.repeated!r} got 1 row while the model got {call.rows}. A single row is taken to be "
            f"for the whole batch, and was computed for each of its {call.rows} rows. If it was one row of the batch, "
            "as in a mixture of experts that sends rows to different layers, leave these layers out: "
            f"convert(model, {{{call.repeated!r}: None, '*': method}}), or give every expert all rows and mask them"
        )


def _check_again(scope: Scope, call: Call) -> None:
    """Check a call in which layers got rows in a new way."""
    if call.check is not None and scope.check_from[True] < inf:
        call.check()
    scope.layers |= call.layers


def _warn(scope: Scope) -> None:
    """Warn of a check that failed, or of results that the network stores."""
    if scope.check_failed:
        reason, scope.check_failed = scope.check_failed, ""
        warnings.warn(
            "could not check that the model computes in this call what it will compute in a prediction: the check "
            f"failed with {reason}. Call by.check(model, batch) with a batch that the network takes in evaluation",
            stacklevel=3,
        )
    if scope.calls_with_results == 2:
        name, attribute = min(scope.results)
        warnings.warn(
            f"the network stores results of its calls in {f'{name}.{attribute}'.lstrip('.')!r}. Each call of the "
            "model in evaluation is another draw, which may have used those of the call before: clear them between "
            "calls, use by.predict, or use by.draw(model) for one function with a memory",
            stacklevel=4,
        )


class CloseScope:
    """A forward hook of the converted model: ends the call, and warns of what was found out in it."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        scope = self.scope
        scope.of_graph.call = None
        if torch.compiler.is_compiling():
            return
        call, scope.of_thread.call = scope.of_thread.call, None
        scope.training_calls += module.training
        if module.training and scope.training_calls in CHECKED_AGAIN and scope.check_from[True] < inf:
            scope.check_from[True] = 1
        scope.threads.discard(threading.get_ident())
        if call is None or output is None:  # the call has failed
            _explain_repeated_row(call)
            return
        if not call.layers <= scope.layers:  # such as experts that got no row before, or a single one now
            _check_again(scope, call)
        stores = bool(scope.results) and not module.training
        scope.calls_with_results += stores
        if scope.check_failed or (stores and scope.calls_with_results == 2):
            _warn(scope)
