"""x ∘ s with a factor per row and channel, at the cost of as few passes over x as can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scale_channels(x: Tensor, scale: Tensor, *, inplace: bool = False) -> Tensor:
    """x (n, C, …) times scale (n or 1, C); `inplace` overwrites an x that nothing else needs.

    >>> scale_channels(torch.ones(1, 2, 3), torch.tensor([[2.0, 5.0]]))
    tensor([[[2., 2., 2.],
             [5., 5., 5.]]])
    """
    scale = scale.to(x.dtype)
    if torch.compiler.is_compiling() or scale.shape[0] == 1 or not x.is_contiguous() or not x.requires_grad:
        return x * per_channel(scale, x)
    return _ScaleChannels.apply(x, scale, inplace and x.grad_fn is not None)  # type: ignore[no-any-return, no-untyped-call]


def per_channel(scale: Tensor, x: Tensor) -> Tensor:
    """A factor (n, C) shaped to multiply x (n, C, …)."""
    return scale.reshape(*scale.shape, *[1] * (x.dim() - 2))


class _ScaleChannels(torch.autograd.Function):
    """The product in place, and both gradients in one pass, as those of a frozen batch norm with n·C channels.

    In place only the product is kept, so the factor's gradient is Σ g·(x s) / s.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, inplace: bool) -> Tensor:
        ctx.inplace = inplace
        if inplace:
            # A factor of exactly 0 would lose x; the smallest number keeps it without changing the function.
            scale = torch.where(scale == 0, torch.finfo(scale.dtype).tiny, scale)
            product = x.mul_(per_channel(scale, x))
            ctx.mark_dirty(product)
        else:
            product = x * per_channel(scale, x)
        ctx.save_for_backward(product if inplace else x, scale)
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        kept, scale = ctx.saved_tensors
        channels = (1, scale.numel(), -1)
        zeros, ones = torch.zeros_like(scale).flatten(), torch.ones_like(scale).flatten()
        of_x, of_scale, _ = torch.ops.aten.native_batch_norm_backward(
            grad.reshape(channels),
            kept.reshape(channels),
            scale.flatten(),
            zeros,
            ones,
            None,
            None,
            False,
            0.0,
            [True, True, False],
        )
        of_scale = of_scale.reshape(scale.shape)
        return of_x.reshape(kept.shape), of_scale / scale if ctx.inplace else of_scale, None
