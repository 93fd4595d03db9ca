"""Stand-ins for the layers of timm and transformers, written from what those compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class StdConv(nn.Conv2d):
    """Weight standardisation: the weight is computed."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ScaledStdConv(nn.Conv2d):
    """With a learned gain, a further parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale, self.gain = self.weight[0].numel() ** -0.5, nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        flat, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * self.scale).view(-1)
        weight = F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


class SameConv(nn.Conv2d):
    """TensorFlow's padding."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = zip(x.shape[-2:], self.kernel_size, self.stride, strict=True)
        pads = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in sizes]
        padding = (pads[1] // 2, pads[1] - pads[1] // 2, pads[0] // 2, pads[0] - pads[0] // 2)
        return F.conv2d(F.pad(x, padding), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class BatchNormAct(nn.BatchNorm2d):
    """A batch norm and an activation, with modules of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class GroupNormAct(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


class LayerNormAct(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps))


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class FusedRmsNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.weight = size, nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size,), self.weight, 1e-6)


class LlamaNorm(nn.Module):
    """Normalises in single precision."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out)."""

    def __init__(self, out_size: int, in_size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(in_size, out_size)), nn.Parameter(torch.randn(out_size))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], -1)


class CastLinear(nn.Linear):
    """Casts its weight to the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), None if self.bias is None else self.bias.to(input.dtype))


class LayerScale(nn.Module):
    """Its parameter has another name than weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((size,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


class Named(nn.Linear):
    """Computes what its base does."""

    def __init__(self, name: str, in_size: int, out_size: int) -> None:
        super().__init__(in_size, out_size)
        self.name = name
