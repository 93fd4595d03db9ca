"""Convolutions as matrix products with patches, all that one output reads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

AT_ONCE = 1 << 20
"""Patches are held for as many rows as have so many numbers in them; for the gradient they are made again."""


def convolved_by_patches(conv: nn.Conv2d, h: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The convolution of row n with weight (out, in, k, l) times scale (n, in·k·l), without a weight for each row.

    >>> conv, x, scale = nn.Conv2d(2, 3, 2, bias=False), torch.randn(4, 2, 5, 5), torch.randn(4, 8)
    >>> y = convolved_by_patches(conv, x, conv.weight, scale)
    >>> torch.allclose(y[1], F.conv2d(x[1], conv.weight * scale[1].reshape(2, 2, 2)), atol=1e-5)
    True
    """
    padding: Any = conv.padding
    ends = zip(h.shape[2:], padding, conv.dilation, conv.kernel_size, conv.stride, strict=True)
    sizes = [(size + 2 * pad - step * (kernel - 1) - 1) // stride + 1 for size, pad, step, kernel, stride in ends]
    matrix = weight.flatten(1)

    def convolved(x: Tensor, factors: Tensor, matrix: Tensor) -> Tensor:
        patches = F.unfold(x, conv.kernel_size, conv.dilation, padding, conv.stride)
        columns = (patches * factors.unsqueeze(2)).transpose(0, 1).reshape(matrix.shape[1], -1)
        return (matrix @ columns).reshape(matrix.shape[0], len(x), *sizes).transpose(0, 1)

    rows = max(1, AT_ONCE // max(matrix.shape[1] * sizes[0] * sizes[1], 1))
    parts = [
        checkpoint(convolved, x, factors, matrix, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else convolved(x, factors, matrix)
        for x, factors in zip(h.split(rows), scale.to(h.dtype).split(rows), strict=True)
    ]
    return torch.cat(parts)


def gradients_by_rows(grad: Tensor, x: Tensor, weight: Tensor, how: tuple[Any, ...]) -> Tensor:
    """Each row's own gradient (n, out, in, k…) of a convolution's weight; `how` is as in `aten.convolution`.

    >>> x, weight = torch.randn(4, 2, 5, 5), torch.randn(3, 2, 2, 2, requires_grad=True)
    >>> y = F.conv2d(x, weight, padding=1)
    >>> each = gradients_by_rows(torch.ones_like(y), x, weight, ((1, 1), (1, 1), (1, 1)))
    >>> torch.allclose(each.sum(0), torch.autograd.grad(y.sum(), weight)[0], atol=1e-4)
    True
    """
    stride, padding, dilation, *_ = how
    x = F.pad(x, [size for size in reversed(padding) for _ in range(2)])
    inside = [step * size for step, size in zip(dilation, x.stride()[2:], strict=True)]
    between = [step * size for step, size in zip(stride, x.stride()[2:], strict=True)]
    sizes = (*x.shape[:2], *weight.shape[2:], *grad.shape[2:])
    patches = x.as_strided(sizes, (*x.stride()[:2], *inside, *between))
    rows = max(1, min(len(x), AT_ONCE // math.prod(sizes[1:])))
    memory = x.new_empty(rows, *sizes[1:])
    each = x.new_empty(len(x), len(weight), math.prod(weight.shape[1:]))
    for start in range(0, len(x), rows):
        some = memory[: len(x) - start].copy_(patches[start : start + rows])
        columns = some.view(len(some), each.shape[2], -1)
        torch.bmm(grad[start : start + rows].flatten(2), columns.mT, out=each[start : start + rows])
    return each.view(len(x), *weight.shape)
