"""A weight for each row, of which only those of some rows are in memory at a time: they are drawn by a seed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import BayesifyError
from ..family import Draws, Elementwise, Perturbation
from ..noise import is_eager
from .rows import Rows

if TYPE_CHECKING:
    from .base import BayesianLayer
    from .kernel import Kernel


def by_turns(kernel: Kernel, p: Perturbation) -> Perturbation | None:
    """The same draws, made again whenever they are needed; None where they are not many weights and biases."""
    at_once, weight = kernel.family.rows_at_once, p.weight
    if not at_once or p.size <= at_once or not kernel.takes_some_rows or not is_eager():
        return None
    rest = (p.in_scale, p.out_scale, p.statistics, p.choice, p.plus, p.variance)
    if not isinstance(weight, Elementwise) or any(part is not None for part in rest):
        return None
    return replace(p, weight=replace(weight, draws=Draws(weight.draws.position, seed=int(torch.randint(1 << 62, ())))))


def goes_by_turns(p: Perturbation) -> bool:
    """Whether it was made by `by_turns`."""
    return isinstance(p.weight, Elementwise) and p.weight.draws.seed is not None


def of_turn(kernel: Kernel, p: Perturbation, turn: int) -> Perturbation:
    """The draws of one turn's rows."""
    assert isinstance(p.weight, Elementwise) and kernel.family.rows_at_once is not None
    start = turn * kernel.family.rows_at_once
    draws = p.weight.draws.some(start, start + kernel.family.rows_at_once)
    bias = p.bias if p.bias is None or p.bias.shape[0] == 1 else p.bias[start : start + draws.size]
    return kernel.settled(Perturbation(draws.size, weight=replace(p.weight, draws=draws), bias=bias))


def of_draw(kernel: Kernel, p: Perturbation, draw: int) -> tuple[Perturbation, int]:
    """The turn of a draw, and its place there."""
    turn, place = divmod(draw, kernel.family.rows_at_once or p.size)
    return of_turn(kernel, p, turn), place


def applied_by_turns(layer: BayesianLayer, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
    """The layer's output; for the gradient, weights are drawn again."""
    tensors = (*layer.parameters(recurse=False), *layer.posterior.parameters())
    versions = [tensor._version for tensor in tensors]

    def applied(part: Tensor, turn: int) -> Tensor:
        if versions != [tensor._version for tensor in tensors]:
            raise BayesifyError(
                f"layer {layer.site_name!r} changed between forward and backward, and with rows_at_once its weights "
                "are drawn again for the gradient: call backward before optimizer.step(), or leave rows_at_once out"
            )
        some = of_turn(layer, p, turn)
        return layer.perturbed(part, some, Rows(some.size, rows.repeat), layer.base())

    parts = [
        checkpoint(applied, part, turn, use_reentrant=False, preserve_rng_state=False)
        for turn, part in enumerate(rows.in_turn(x, layer.family.rows_at_once or rows.batch))
    ]
    return rows.joined(parts)
