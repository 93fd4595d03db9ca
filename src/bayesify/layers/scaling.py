"""x ∘ s with a factor per row and channel, in as few passes over x as can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def scale_channels(x: Tensor, scale: Tensor, *, inplace: bool = False) -> Tensor:
    """x (n, C, …) times scale (n or 1, C); `inplace` may overwrite an x that nothing else needs.

    >>> scale_channels(torch.ones(1, 2, 3), torch.tensor([[2.0, 5.0]]))
    tensor([[[2., 2., 2.],
             [5., 5., 5.]]])
    """
    scale = scale.to(x.dtype)
    if not _few_passes_help(x, scale):
        return x * per_channel(scale, x)
    if inplace and x.grad_fn is not None:
        return _ScaleInPlace.apply(x, scale)  # type: ignore[no-any-return]
    channels = x.reshape(1, scale.numel(), -1)
    ones = torch.ones_like(scale).flatten()
    # A frozen batch norm with n·C channels is this product, and both its gradients take one pass.
    return F.batch_norm(channels, torch.zeros_like(ones), ones, scale.flatten(), None, False, 0.0, 0.0).reshape(x.shape)


def per_channel(scale: Tensor, x: Tensor) -> Tensor:
    """A factor (n, C) shaped to multiply x (n, C, …)."""
    return scale.reshape(*scale.shape, *[1] * (x.dim() - 2))


def _few_passes_help(x: Tensor, scale: Tensor) -> bool:
    """Where the plain product's backward, with its three passes and a temporary, measured slower."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and scale.requires_grad
        and scale.shape[0] == x.shape[0]
        and x.is_contiguous()
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class _ScaleInPlace(torch.autograd.Function):
    """The product in the place of x: only it is kept, so the factor's gradient is Σ g·(x s) / s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        product = x.mul_(per_channel(_never_zero(scale), x))
        ctx.mark_dirty(product)
        ctx.save_for_backward(product, scale)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        product, scale = ctx.saved_tensors
        scale = _never_zero(scale)
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            return grad * per_channel(scale, grad), (grad * product).flatten(2).sum(2) / scale
        channels = (1, scale.numel(), -1)
        ones = torch.ones_like(scale).flatten()
        of_x, of_scale, _ = torch.ops.aten.native_batch_norm_backward(
            grad.reshape(channels),
            product.reshape(channels),
            scale.flatten(),
            torch.zeros_like(ones),
            ones,
            None,
            None,
            False,
            0.0,
            [True, True, False],
        )
        return of_x.reshape(product.shape), of_scale.reshape(scale.shape) / scale


def _never_zero(scale: Tensor) -> Tensor:
    """A factor of exactly 0 would lose x; the smallest number keeps it without changing the function."""
    return torch.where(scale == 0, torch.finfo(scale.dtype).tiny, scale)
