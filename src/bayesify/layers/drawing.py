"""The draw of a layer for one call of the model: made with those of other layers, where that takes fewer operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..family import Draws, Perturbation
from ..noise import is_eager
from .elements import elements_together
from .together import drawn_together

if TYPE_CHECKING:
    from .kernel import Kernel


def drawn_for_call(kernel: Kernel) -> Perturbation:
    """The perturbation of this call of the model, the same each time."""
    scope, name, stamp = kernel.scope, kernel.site_name, _stamp(kernel)
    if name in scope.drawn and scope.waiting.pop(name, stamp) == stamp:
        return scope.drawn[name]
    draws = scope.draws(kernel.family, name, None if kernel.weight is None else kernel.weight.device)
    together = None if name in scope.drawn or scope.root is None else _together(kernel, scope.root, draws)
    if together is None:
        scope.drawn[name] = kernel.drawn(draws)
    else:
        scope.drawn |= {peer.site_name: p for peer, p in together.items()}
        scope.waiting |= {peer.site_name: _stamp(peer) for peer in together if peer.site_name != name}
    return scope.drawn[name]


def _together(kernel: Kernel, root: nn.Module, draws: Draws) -> dict[Kernel, Perturbation] | None:
    if kernel.draws_factors:
        return drawn_together(kernel, root, draws)
    return elements_together(kernel, root, draws) if draws.size == 1 and kernel.draws_elements and is_eager() else None


def _stamp(kernel: Kernel) -> tuple[bool, int | None]:
    """What must still be so when a draw that was made with another layer's is first used: modes, and its weight."""
    return torch.is_grad_enabled(), kernel.weight._version if kernel.draws_elements and is_eager() else None
