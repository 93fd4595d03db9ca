"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..family import Perturbation, Site
from ..noise import is_eager
from .base import BayesianLayer, affine_site
from .folding import folded_with_others
from .kernel import Factors
from .patches import convolved_by_patches
from .refolded import RefoldedConvolution
from .rows import Rows
from .scaling import ScaledConvolution, few_passes_help, scale_channels, takes_passes_one_by_one

FEWEST_GROUPED_CHANNELS = 8
"""A grouped convolution with fewer channels in a group measured slower than scaling the activations."""
MOST_WEIGHTS = 0.5
"""With more numbers in the weights of all draws than this share of those in patches, to go by patches takes less memory
and hardly more time."""


class _BayesianConv(BayesianLayer, _ConvNd):
    role = "conv"
    takes_some_rows = True
    convolve: ClassVar[Any]
    has_patches: ClassVar[bool] = False
    """Whether it can be a matrix product with what each output reads."""

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        assert isinstance(layer, _ConvNd)
        pointwise = all(size == 1 for size in layer.kernel_size) and layer.groups == 1 and not layer.transposed
        patches = cls.has_patches and layer.groups == 1 and _pads_zeros(layer)
        sizes: dict[str, Any] = {"in_size": layer.in_channels, "out_size": layer.out_channels}
        return affine_site(layer, is_matrix=pointwise, reads_patches=patches, **sizes)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self.kernel_size) + 1

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._convolved(x, weight, bias, self.groups)

    def fold(self, weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
        """Works on one weight (out, in/g, k…) and on G of them; factors may have the same leading dimension."""
        return self._times(weight, out_scale, in_scale, self.out_channels)

    def grouped(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        draws = weight.shape[0]
        side_by_side = h.reshape(h.shape[0] // draws, draws * h.shape[1], *h.shape[2:])
        flat_bias = None if bias is None else bias.flatten()
        y = self._convolved(side_by_side, weight.flatten(0, 1), flat_bias, draws * self.groups)
        return y.reshape(h.shape[0], y.shape[1] // draws, *y.shape[2:])

    def cheaper(self, h: Tensor, p: Perturbation, rows: Rows) -> Perturbation:
        """The factors of few draws fold into a weight for each: one grouped convolution, no pass over activations.

        Compiled code fuses its passes over activations, and its grouped convolutions measured three times as slow. Wide
        layers on small images have larger weights than activations.
        """
        few = p.size < rows.batch and p.size * self.weight.numel() <= h.numel()
        few = few and p.weight is None and isinstance(p.in_scale, Tensor)
        if not few or self.in_channels < FEWEST_GROUPED_CHANNELS * self.groups or torch.compiler.is_compiling():
            return p
        assert isinstance(p.in_scale, Tensor)
        both = self.groups == 1 and not self.transposed and p.out_scale is not None
        weight = folded_with_others(self, p) if both else None
        if weight is None:
            weight = self.fold(self.weight.unsqueeze(0), p.in_scale, p.out_scale)
        return replace(p, weight=weight, in_scale=None, out_scale=None)

    def scale_in(self, h: Tensor, scale: Tensor) -> Tensor:
        return scale_channels(h, scale)

    def scale_out(self, y: Tensor, scale: Tensor) -> Tensor:
        return scale_channels(y, scale)

    def scaled_op(self, h: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors, rows: Rows) -> Tensor:
        s, r = (None if scale is None else rows.spread(scale).to(h.dtype) for scale in factors)
        given = [scale for scale in (s, r) if scale is not None]
        if not _pads_zeros(self) or not given or not all(few_passes_help(h, scale) for scale in given):
            return super().scaled_op(h, weight, bias, (s, r), rows)
        y: Tensor = ScaledConvolution.apply(h, weight, bias if r is None else None, s, r, self._how)
        return y if r is None or bias is None else y + self.aligned(bias.unsqueeze(0), y)

    @property
    def _how(self) -> tuple[Any, ...]:
        """What `aten.convolution` takes behind the bias."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, self.padding_mode), 0
        y: Tensor = self.convolve(x, weight, bias, self.stride, padding, self.dilation, groups)
        return y

    def _times(self, weight: Tensor, first: Tensor | None, second: Tensor | None, channels: int) -> Tensor:
        """A weight (…, channels, other/g, k…) times a factor of all channels and one of all others."""
        factors = [] if first is None else [first.unsqueeze(-1)]
        if second is not None:
            per_group = second.reshape(*second.shape[:-1], self.groups, -1)
            factors.append(per_group.repeat_interleave(channels // self.groups, -2) if self.groups > 1 else per_group)
        both = factors[0] * factors[1] if len(factors) > 1 else factors[0]  # the small product first
        return weight * both.reshape(*both.shape, *[1] * len(self.kernel_size))


def _pads_zeros(layer: _ConvNd) -> bool:
    return not isinstance(layer.padding, str) and layer.padding_mode == "zeros"


class _BayesianConvTranspose(_BayesianConv, _ConvTransposeNd):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """As the ordinary layer's: an output size decides the padding of the output."""
        if output_size is None:
            return super().forward(input)
        resized = self._with_output_padding(input, output_size)
        return resized.forward(input)

    def fold(self, weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
        """The weight is (in, out/g, k…): the sides are exchanged."""
        return self._times(weight, in_scale, out_scale, self.in_channels)

    def _with_output_padding(self, input: Tensor, output_size: list[int]) -> _BayesianConvTranspose:
        other = object.__new__(type(self))
        other.__dict__ = dict(self.__dict__)
        sizes: Any = (self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation)
        padding = self._output_padding(input, output_size, *sizes)
        other.__dict__["output_padding"] = padding
        return other

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        y: Tensor = self.convolve(
            x, weight, bias, self.stride, self.padding, self.output_padding, groups, self.dilation
        )
        return y


class BayesianConv1d(_BayesianConv, nn.Conv1d):
    """`nn.Conv1d` under a perturbation."""

    plain = nn.Conv1d
    convolve = staticmethod(F.conv1d)


class BayesianConv2d(_BayesianConv, nn.Conv2d):
    """`nn.Conv2d` under a perturbation."""

    plain = nn.Conv2d
    convolve = staticmethod(F.conv2d)
    has_patches = True

    def term(self, h: Tensor, p: Perturbation, rows: Rows, base: Mapping[str, Tensor]) -> Tensor:
        """Factors of patches are applied to patches, where those are fewer numbers than a weight for each draw."""
        if p.patch_scale is None or p.bias is not None or p.in_scale is not None:
            return super().term(h, p, rows, base)
        patches = h.numel() * math.prod(self.kernel_size)
        if p.size * self.weight.numel() <= MOST_WEIGHTS * patches or not is_eager():
            return self._refolded(h, p, base) if self._may_refold(h, p, rows) else super().term(h, p, rows, base)
        y = convolved_by_patches(self, h, base["weight"], rows.spread(p.patch_scale))
        y = y if p.out_scale is None else self.scale_out(y, rows.spread(p.out_scale))
        return y if self.bias is None else y + self.aligned(base["bias"].unsqueeze(0), y)

    def _may_refold(self, h: Tensor, p: Perturbation, rows: Rows) -> bool:
        factors = [0 if factor is None else len(factor) for factor in (p.out_scale, p.patch_scale)]
        each_draw = p.size > 1 and factors == [p.size] * 2 and rows.repeat == 1 and p.choice is None
        return each_draw and h.dtype == self.weight.dtype and torch.is_grad_enabled() and takes_passes_one_by_one(h)

    def _refolded(self, h: Tensor, p: Perturbation, base: Mapping[str, Tensor]) -> Tensor:
        """A weight for each draw, none of which is kept."""
        assert p.out_scale is not None and p.patch_scale is not None
        left, right = (factor[: len(h)].to(h.dtype) for factor in (p.out_scale, p.patch_scale))
        y: Tensor = RefoldedConvolution.apply(h, base["weight"], base.get("bias"), left, right, self._how[:-1])
        return y


class BayesianConv3d(_BayesianConv, nn.Conv3d):
    """`nn.Conv3d` under a perturbation."""

    plain = nn.Conv3d
    convolve = staticmethod(F.conv3d)


class BayesianConvTranspose1d(_BayesianConvTranspose, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d` under a perturbation."""

    plain = nn.ConvTranspose1d
    convolve = staticmethod(F.conv_transpose1d)


class BayesianConvTranspose2d(_BayesianConvTranspose, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` under a perturbation."""

    plain = nn.ConvTranspose2d
    convolve = staticmethod(F.conv_transpose2d)


class BayesianConvTranspose3d(_BayesianConvTranspose, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` under a perturbation."""

    plain = nn.ConvTranspose3d
    convolve = staticmethod(F.conv_transpose3d)
