"""A two-dimensional convolution as a matrix product, where each row has factors for all that one output reads."""

from __future__ import annotations

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
