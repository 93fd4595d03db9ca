"""x ∘ s with a factor per row and channel, in as few passes over x as can be."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..memory import LARGEST, scratch
from ..noise import is_eager
from .patches import gradients_by_rows


def scale_channels(x: Tensor, scale: Tensor) -> Tensor:
    """x (n, C, …) times scale (n or 1, C).

    >>> scale_channels(torch.ones(1, 2, 3), torch.tensor([[2.0, 5.0]]))
    tensor([[[2., 2., 2.],
             [5., 5., 5.]]])
    """
    scale = scale.to(x.dtype)
    if not few_passes_help(x, scale):
        return x * per_channel(scale, x)
    channels = x.reshape(1, scale.numel(), -1)
    ones = torch.ones_like(scale).flatten()
    # A frozen batch norm with n·C channels is this product, and both its gradients take one pass.
    return F.batch_norm(channels, torch.zeros_like(ones), ones, scale.flatten(), None, False, 0.0, 0.0).reshape(x.shape)


def per_channel(scale: Tensor, x: Tensor) -> Tensor:
    """A factor (n, C) shaped to multiply x (n, C, …)."""
    return scale.reshape(*scale.shape, *[1] * (x.dim() - 2))


def few_passes_help(x: Tensor, scale: Tensor) -> bool:
    """Where the plain product's backward, with its three passes and a temporary, measured slower."""
    return scale.requires_grad and scale.shape[0] == x.shape[0] and takes_passes_one_by_one(x)


def takes_passes_one_by_one(x: Tensor) -> bool:
    """Whether what is made of x takes a pass over memory for each operation, and nothing else decides how."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
        and is_eager()
    )


class ScaledConvolution(torch.autograd.Function):
    """op(x ∘ s; W) ∘ r that keeps no more activations than op alone: x ∘ s is made again in backward.

    The product with r is in the place of op's output, so the gradient of r is Σ g·(y r) / r. Fresh memory costs more
    than a pass over what the cache holds. `how` is what `aten.convolution` takes behind the bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        s: Tensor | None,
        r: Tensor | None,
        how: tuple[Any, ...],
    ) -> Tensor:
        y: Tensor = torch.convolution(_times(x, s, "x"), weight, bias, *how)
        if r is not None:
            y.mul_(per_channel(_never_zero(r), y))
        ctx.save_for_backward(x, weight, bias, s, r)
        ctx.y = None if r is None else y.detach()  # which has y's count of changes in place
        ctx.changes = y._version
        ctx.how, ctx.bias_sizes = how, None if bias is None else list(bias.shape)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, s, r = ctx.saved_tensors
        y, ctx.y = ctx.y, None  # not to be kept until the loss is forgotten; a second backward makes it again
        if not ctx.needs_input_grad[0] and _has_small_patches(grad, weight, ctx.how):
            return None, *_of_first_layer(grad, x, weight, bias, s, r, ctx.how), None
        times = None if r is None else _never_zero(r)
        if r is not None and (y is None or torch.is_grad_enabled() or y._version != ctx.changes):
            y, times = torch.convolution(_times(x, s, "x"), weight, bias, *ctx.how), None
        wanted = [ctx.needs_input_grad[0] or ctx.needs_input_grad[3], *ctx.needs_input_grad[1:3]]
        rows, layer = _rows_at_once(x, weight), (weight, ctx.bias_sizes, ctx.how, wanted)
        if rows == len(x):
            return *_backward(*layer, grad, x, s, r, y, times, None), None
        place = torch.empty_like(x) if wanted[0] else None
        each = zip(*(_chunks(tensor, len(x), rows) for tensor in (grad, x, s, r, y, times, place)), strict=True)
        of_weight = of_bias = None
        of_factors = []
        for chunk in each:
            _, more, more_bias, *factors = _backward(*layer, *chunk)
            of_weight, of_bias = _plus(of_weight, more), _plus(of_bias, more_bias)
            of_factors.append(factors)
        of_s, of_r = (_joined(parts) for parts in zip(*of_factors, strict=True))
        return place, of_weight, of_bias, of_s, of_r, None


def _backward(
    weight: Tensor,
    bias_sizes: list[int] | None,
    how: tuple[Any, ...],
    wanted: list[bool],
    grad: Tensor,
    x: Tensor,
    s: Tensor | None,
    r: Tensor | None,
    y: Tensor | None,
    times: Tensor | None,
    place: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, the weight, the bias, s and r by some rows; that of x goes to its place, if it has one.

    `y` is op's output `times` a factor, if there is one.
    """
    of_r = None if y is None else _dot(grad, y, "grad")
    of_r = of_r if of_r is None or times is None else of_r / times
    of_x, of_weight, of_bias = torch.ops.aten.convolution_backward.default(
        _times(grad, r, "grad"), _times(x, s, "x"), weight, bias_sizes, *how, wanted
    )
    of_s = None if s is None else _dot(of_x, x, "x")
    if torch.is_grad_enabled():
        of_x = of_x if s is None else of_x * per_channel(s, x)
    elif s is not None:
        of_x = torch.mul(of_x, per_channel(s, x), out=of_x if place is None else place)
    elif place is not None:
        place.copy_(of_x)
    return of_x, of_weight, of_bias, of_s, of_r


def _has_small_patches(grad: Tensor, weight: Tensor, how: tuple[Any, ...]) -> bool:
    """Whether a weight for each row has no more numbers than the output, so that its gradient may be known by rows."""
    *_, transposed, _, groups = how
    few = math.prod(weight.shape[1:]) <= math.prod(grad.shape[2:])
    return few and not transposed and groups == 1 and not torch.is_grad_enabled()


def _of_first_layer(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    s: Tensor | None,
    r: Tensor | None,
    how: tuple[Any, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of the weight, the bias, s and r where x needs none: no pass over what comes before or after."""
    of_rows = gradients_by_rows(grad, x, weight, how).flatten(3)
    ones = weight.new_ones(1, 1)
    left, right = (ones if r is None else r).unsqueeze(2), (ones if s is None else s).unsqueeze(1)
    of_weight = (of_rows * (left * right).unsqueeze(3)).sum(0).reshape(weight.shape)
    of_both = (of_rows * weight.flatten(2)).sum(3)
    of_s = None if s is None else (of_both * left).sum(1)
    of_r = None if r is None else (of_both * right).sum(2)
    of_bias = None
    if bias is not None:
        of_each = grad.flatten(2).sum(2)
        of_bias = (of_each * left.squeeze(2)).sum(0)
        of_r = None if of_r is None else of_r + of_each * bias
    return of_weight, of_bias, of_s, of_r


CHUNK = 1 << 21
"""The backward pass takes rows with so many bytes of activations for each thread at a time (or as many as the weight
has), where there are more than twice as many: what it makes stays in the cache, and in memory that was used before. All
at once measured up to 1.5 times as slow where the allocator gives pages back; where it keeps them, as fast."""


def _rows_at_once(x: Tensor, weight: Tensor) -> int:
    size, chunk = _bytes(x), max(CHUNK * torch.get_num_threads(), _bytes(weight))
    # With gradients enabled, a gradient of the gradient is wanted.
    return len(x) if torch.is_grad_enabled() or size <= 2 * chunk else max(1, len(x) * chunk // size)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _chunks(tensor: Tensor | None, rows: int, at_once: int) -> tuple[Tensor | None, ...]:
    return (None,) * -(-rows // at_once) if tensor is None else tensor.split(at_once)


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)  # type: ignore[arg-type]


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None or more is None else total.add_(more)


def _times(x: Tensor, scale: Tensor | None, use: str) -> Tensor:
    """x times factors of its channels, as `product` does it."""
    return x if scale is None else product(x, per_channel(scale, x), use)


def product(x: Tensor, factor: Tensor | None, use: str) -> Tensor:
    """x ∘ factor, of x's shape, in memory that the next call for the same use overwrites."""
    if factor is None:
        return x
    if torch.is_grad_enabled() or _bytes(x) > LARGEST:
        return x * factor
    return torch.mul(x, factor, out=scratch(x, use))


def _dot(a: Tensor, b: Tensor, use: str) -> Tensor:
    """Σ a·b over all but the first two dimensions."""
    return product(a, b, use).flatten(2).sum(2)


def _never_zero(scale: Tensor) -> Tensor:
    """A factor of exactly 0 would lose x; the smallest number keeps it without changing the function."""
    return scale if scale.all() else torch.where(scale == 0, torch.finfo(scale.dtype).tiny, scale)
