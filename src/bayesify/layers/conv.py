"""Convolutions and transposed convolutions in one, two and three dimensions."""

import math
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from bayesify.layers.base import BayesianLayer, Operation, affine_site, layer_type, stand_in
from bayesify.layers.rows import Rows
from bayesify.methods.base import Perturbation, Role, Site

MAX_PATCH_RATIO = 2
"""Patches, what outputs read, are scaled if they are at most so many times as large as a weight for each draw. Without
that a step of LowRankEnsemble on a ResNet-18 (112×112 pixels, B=32) takes 4.2 times as long, and 3.7 times the peak
memory: 8.3 times the plain network's."""


class Convolution(Operation, _ConvNd):
    """A convolution, transposed or not, with a weight (out, in/g, k…), or (in, out/g, k…) if it is transposed."""

    role: ClassVar[Role] = "conv"
    runs_in_chunks = True

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        assert isinstance(layer, _ConvNd)
        is_matrix = set(layer.kernel_size) == {1} and layer.groups == 1 and not layer.transposed
        sizes: dict[str, Any] = {"in_size": layer.in_channels, "out_size": layer.out_channels}
        return affine_site(layer, is_matrix=is_matrix, outputs_first=not layer.transposed, **sizes)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self.kernel_size) + 1

    def fold(self, weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
        """Works on one weight and on G of them; factors may have the same leading dimension."""
        rows, columns = (in_scale, out_scale) if self.transposed else (out_scale, in_scale)
        factor = None if rows is None else rows.unsqueeze(-1)  # (…, rows, 1)
        if columns is not None:
            channels = self.in_channels if self.transposed else self.out_channels
            by_group = columns.unflatten(-1, (self.groups, -1))  # (…, groups, columns/g)
            if self.groups > 1:
                by_group = by_group.repeat_interleave(channels // self.groups, -2)  # a line for each row
            factor = by_group if factor is None else factor * by_group
        assert factor is not None
        return weight * factor.reshape(*factor.shape, *[1] * len(self.kernel_size))

    def grouped(self, x: Tensor, weight: Tensor) -> Tensor:
        draws = weight.shape[0]
        side_by_side = x.reshape(x.shape[0] // draws, draws * x.shape[1], *x.shape[2:])
        y = self.run(side_by_side, weight.flatten(0, 1), groups=draws * self.groups)
        return y.reshape(x.shape[0], y.shape[1] // draws, *y.shape[2:])

    def prefers_folding(self, x: Tensor, weight: Tensor, p: Perturbation, rows: Rows) -> bool:
        """One grouped convolution in place of passes over activations, if the weights are not larger than those."""
        few = p.weight is None and p.size < rows.batch and p.size * weight.numel() <= x.numel()
        return p.kernel_scale is not None or (few and (p.in_scale is not None or p.out_scale is not None))

    def by_kernel_scale(self, x: Tensor, weight: Tensor, scale: Tensor, p: Perturbation, rows: Rows) -> Tensor | None:
        """A kernel's factors scale what each output reads, where that is less than a weight for each draw."""
        if isinstance(self.padding, str) or (self.padding_mode, self.groups, len(self.kernel_size)) != ("zeros", 1, 2):
            return None  # `F.unfold` can't tell what an output reads
        each = zip(x.shape[2:], self.padding, self.dilation, self.kernel_size, self.stride, strict=True)
        sizes = [(size + 2 * pad - step * (kernel - 1) - 1) // stride + 1 for size, pad, step, kernel, stride in each]
        if x.shape[0] * scale.shape[1] * math.prod(sizes) > MAX_PATCH_RATIO * p.size * weight.numel():
            return None
        patches = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)  # (rows, read, places)
        y: Tensor = weight.flatten(1) @ (patches * rows.select(scale).to(x.dtype).unsqueeze(2))
        y = y.reshape(*y.shape[:2], *sizes)
        y = y if p.out_scale is None else y * rows.spread(p.out_scale, y, False)
        return y if p.bias is None else y + rows.spread(p.bias, y, False)


class SizedOutput:
    """What a transposed convolution adds: it may be called with the size of its output."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """As the ordinary layer's: an output size decides the padding of the output."""
        layer: Any = self
        if output_size is not None:
            sizes = (layer.stride, layer.padding, layer.kernel_size, len(layer.kernel_size), layer.dilation)
            padding = layer._output_padding(input, output_size, *sizes)
            layer = stand_in(layer, type(layer), output_padding=padding)
        return BayesianLayer.forward(layer, input)


_TRANSPOSED = (SizedOutput, Convolution, BayesianLayer)
BayesianConv1d = layer_type(nn.Conv1d, Convolution, BayesianLayer)
BayesianConv2d = layer_type(nn.Conv2d, Convolution, BayesianLayer)
BayesianConv3d = layer_type(nn.Conv3d, Convolution, BayesianLayer)
BayesianConvTranspose1d = layer_type(nn.ConvTranspose1d, *_TRANSPOSED)
BayesianConvTranspose2d = layer_type(nn.ConvTranspose2d, *_TRANSPOSED)
BayesianConvTranspose3d = layer_type(nn.ConvTranspose3d, *_TRANSPOSED)
