"""A convolution with a weight for each draw, W ∘ (l rᵀ), which is made again for the gradient rather than kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .derived import derived, is_to_be_derived
from .scaling import product


class RefoldedConvolution(torch.autograd.Function):
    """Row j of x under the weight W ∘ (l_g r_gᵀ) of draw g = j modulo G; l is (G, out), r is (G, in·k·l).

    All draws are one grouped convolution; rows beyond a multiple of G are a second one. `how` is what
    `aten.convolution` takes between the bias and the groups.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, left: Tensor, right: Tensor, how: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, left, right)
        ctx.how = how
        y = _convolved(x, _folded(weight, left, right), bias, how)
        return torch.ops.aten._unsafe_view.default(y, y.shape)  # type: ignore[no-any-return] # no view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, left, right = ctx.saved_tensors
        if is_to_be_derived(grad):
            tensors, wanted = (x, weight, bias, left, right), ctx.needs_input_grad[:5]
            return *derived(partial(refolded, how=ctx.how), tensors, wanted, grad), None
        weights, wanted = _folded(weight, left, right), (ctx.needs_input_grad[0], True, bias is not None)
        both = zip(_turns(grad, len(left)), _turns(x, len(left)), strict=True)
        of_x, of_weights, of_bias = zip(*(_gradients(*turns, weights, ctx.how, wanted) for turns in both), strict=True)
        of_weight, of_left, of_right = _unfolded(_added(of_weights), weight, left, right)
        return (
            _joined(of_x) if wanted[0] else None,
            of_weight,
            None if bias is None else _added(of_bias).sum(0),
            of_left,
            of_right,
            None,
        )


def refolded(
    x: Tensor, weight: Tensor, bias: Tensor | None, left: Tensor, right: Tensor, how: tuple[Any, ...]
) -> Tensor:
    """The same with weights that are kept."""
    factors = left.unsqueeze(2) * right.unsqueeze(1)
    return _convolved(x, weight * factors.reshape(-1, *weight.shape), bias, how)


def _turns(x: Tensor, draws: int) -> list[Tensor]:
    """Rows as (turns, draws, …): the turns that all draws have, then a last one of fewer."""
    rest = len(x) % draws
    parts = zip(x.split([len(x) - rest, rest]), (draws, rest), strict=True)
    return [part.reshape(-1, size, *part.shape[1:]) for part, size in parts if size]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Undo `_turns`."""
    return torch.cat([part.flatten(0, 1) for part in parts]) if len(parts) > 1 else parts[0].flatten(0, 1)


def _convolved(x: Tensor, weights: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
    return _joined(
        [_convolved_in_turn(turns, weights[: turns.shape[1]], bias, how) for turns in _turns(x, len(weights))]
    )


def _convolved_in_turn(turns: Tensor, weights: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
    draws = len(weights)
    flat_bias = None if bias is None else bias.repeat(draws)
    y: Tensor = torch.convolution(turns.flatten(1, 2), weights.flatten(0, 1), flat_bias, *(*how, draws))
    return y.reshape(len(y), draws, -1, *y.shape[2:])


def _gradients(
    grad: Tensor, turns: Tensor, weights: Tensor, how: tuple[Any, ...], wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """Those of the turns, of the first weights and of the bias under each, as far as they are wanted."""
    draws = turns.shape[1]
    flat, kernels = turns.flatten(1, 2), weights[:draws].flatten(0, 1)
    of_x, of_weights, of_bias = torch.ops.aten.convolution_backward.default(
        grad.flatten(1, 2), flat, kernels, [len(kernels)] if wanted[2] else None, *how, draws, wanted
    )
    shapes = (turns.shape, (draws, *weights.shape[1:]), (draws, -1))
    found = zip((of_x, of_weights, of_bias), shapes, wanted, strict=True)
    return tuple(tensor.reshape(shape) if is_wanted else None for tensor, shape, is_wanted in found)


def _folded(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The weights (G, out, in, k, l) of all draws, in memory that the next call overwrites."""
    wide = weight.flatten(1).expand(len(left), -1, -1)
    return product(wide, right.unsqueeze(1), "weights").mul_(left.unsqueeze(2)).view(-1, *weight.shape)


def _unfolded(grads: Tensor, weight: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of W, l and r by those of the weights (G, out, in, k, l), which it overwrites."""
    grads, matrix = grads.flatten(2), weight.flatten(1)
    of_weight = product(grads, right.unsqueeze(1), "weights").mul_(left.unsqueeze(2)).sum(0).reshape(weight.shape)
    by_weight = grads.mul_(matrix)
    return of_weight, (by_weight @ right.unsqueeze(2)).squeeze(2), (left.unsqueeze(1) @ by_weight).squeeze(1)


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what turns say of their draws, of which the last may have fewer."""
    for part in parts[1:]:
        parts[0][: len(part)].add_(part)
    return parts[0]
