"""Many draws of a network on few rows in one call of it: what costs is the calls, not the arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

_lock, _silent = threading.Lock(), [0]
"""How many threads want no word of slow operations."""


@contextmanager
def _no_word_of_slow_operations() -> Iterator[None]:
    """That some operation goes draw by draw after all is no concern of the caller's.

    `warnings.catch_warnings` would undo what other threads do to the filters meanwhile.
    """
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    with _lock:
        _silent[0] += by
        torch._C._functorch._set_vmap_fallback_warning_enabled(not _silent[0])  # type: ignore[attr-defined]


class _Called(nn.Module):
    """A network with the way to call it."""

    def __init__(self, network: nn.Module, call: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.network, self.call = network, call

    def forward(self, batch: Any) -> Tensor:
        return self.call(self.network, batch)


def outputs_at_once(
    network: nn.Module,
    call: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    names: Sequence[tuple[str, str]],
    stacks: Sequence[Tensor],
) -> Tensor:
    """The outputs (S, …) of S draws, whose stacked values stand for the tensors with these names (of layer and tensor).

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> weights = torch.stack([torch.ones(1, 2), torch.zeros(1, 2)])
    >>> outputs_at_once(layer, lambda net, x: net(x), torch.ones(3, 2), [("", "weight")], [weights]).squeeze(2)
    tensor([[2., 2., 2.],
            [0., 0., 0.]])
    """
    called = _Called(network, call)
    values = {".".join(filter(None, ("network", *name))): stack for name, stack in zip(names, stacks, strict=True)}

    def once(tensors: dict[str, Tensor]) -> Tensor:
        # What is tied is drawn by its first name; tied by torch, a module in two places would not get its tensors back.
        output: Tensor = functional_call(called, tensors, (batch,), tie_weights=False)
        return output

    with _no_word_of_slow_operations():
        outputs: Tensor = torch.vmap(once, randomness="error")(values)
    return outputs
