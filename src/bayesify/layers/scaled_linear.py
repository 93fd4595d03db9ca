"""(x ∘ s) Wᵀ ∘ r + b with factors per row, which may keep no more for the gradient than the plain layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .derived import derived, is_to_be_derived
from .scaling import product

SMALLEST = 1 / 32
"""Where a factor is smaller, or smaller than this times the bias, what r multiplied is made again, not recovered."""


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, s: Tensor | None, r: Tensor | None) -> Tensor:
    """For x (m, G, t, in), s (G, 1, in) and r (G, 1, out); either factor may be None.

    >>> x, s, r = torch.ones(1, 2, 1, 3), torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[[1.0]], [[10.0]]])
    >>> scaled_linear(x, torch.ones(1, 3), torch.ones(1), s, r).flatten()
    tensor([ 4., 61.])
    """
    y = F.linear(x if s is None else x * s, weight, bias if r is None else None)
    if r is None:
        return y
    r = r.to(y.dtype)
    return y * r if bias is None else torch.addcmul(bias.to(y.dtype), y, r)


class ScaledLinear(torch.autograd.Function):
    """`scaled_linear` that makes x ∘ s again in backward, where what r multiplied is (y - b) / r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, s: Tensor | None, r: Tensor | None) -> Tensor:
        h, y = product(x, s, "x").flatten(0, 2), x.new_empty(*x.shape[:-1], len(weight))
        flat = y.view(len(h), len(weight))  # y itself must not be a view: it may be changed in place
        if bias is None or r is not None:
            torch.mm(h, weight.mT, out=flat)
        else:
            torch.addmm(bias, h, weight.mT, out=flat)
        if r is not None:
            y = y.mul_(r) if bias is None else torch.addcmul(bias, y, r, out=y)
        ctx.save_for_backward(x, weight, bias, s, r)
        ctx.y = y.detach() if ctx.needs_input_grad[4] else None  # which has y's count of changes in place
        ctx.changes = None if y.is_inference() else y._version
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, s, r = ctx.saved_tensors
        y, ctx.y = ctx.y, None  # not to be kept until the loss is forgotten
        of_x, of_weight, of_bias, of_s, of_r = ctx.needs_input_grad
        if is_to_be_derived(grad):
            return tuple(derived(scaled_linear, (x, weight, bias, s, r), ctx.needs_input_grad, grad))
        grads: list[Tensor | None] = [None] * 5
        h = product(x, s, "x") if of_weight or of_r else x
        of_each = _by_draws(grad) if bias is not None else None
        if of_r:
            known = y is not None and y._version == ctx.changes and _can_be_recovered(r, bias)
            of_rows = _by_draws(product(grad, y if known else F.linear(h, weight), "grad"))
            of_rows = of_rows if of_each is None or not known else of_rows - of_each * bias
            grads[4] = of_rows / r if known else of_rows
        g = product(grad, r, "grad")
        if of_weight:
            grads[1] = g.flatten(0, 2).mT @ h.flatten(0, 2)
        if of_bias and of_each is not None:
            grads[2] = of_each.sum((0, 1))
        if of_x or of_s:
            of_h = g @ weight
            grads[3] = _by_draws(product(of_h, x, "x")) if of_s else None
            grads[0] = (of_h if s is None else of_h.mul_(s)) if of_x else None
        return tuple(grads)


def _can_be_recovered(r: Tensor, bias: Tensor | None) -> bool:
    """Whether little is lost in (z r + b - b) / r."""
    return bool((r.abs() >= (SMALLEST if bias is None else SMALLEST * (1 + bias.abs()))).all())


def _by_draws(values: Tensor) -> Tensor:
    """The sums (G, 1, n) of values (m, G, t, n); both dimensions in one call measured eight times as slow."""
    return values.sum(2).sum(0).unsqueeze(1)
