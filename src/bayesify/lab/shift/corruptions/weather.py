"""Weather: snow, frost, fog and brightness."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.lab.pixels import axes
from bayesify.lab.pixels.rounding import bytes_of
from bayesify.lab.shift.corruptions.blurs import smear
from bayesify.lab.shift.corruptions.textures import frost_texture, plasma
from bayesify.lab.shift.random_numbers import Draws


def snow(
    x: Tensor,
    draws: Draws,
    mean: float,
    std: float,
    zoom: float,
    threshold: float,
    radius: float,
    sigma: float,
    kept: float,
) -> Tensor:
    """Two layers of falling flakes over a whitened image.

    Flakes are the part of N(mean, std²) noise above the threshold, enlarged and smeared at most 45° from the vertical.
    """
    height, width = x.shape[2:]
    noise = mean + std * draws.normal(1, height, width)
    layer = axes.along(noise, axes.zoom(height, zoom), axes.zoom(width, zoom))
    flakes = torch.floor(torch.where(layer < threshold, 0, layer).clamp(0, 1) * 255) / 255
    flakes = bytes_of(smear(flakes, radius, sigma, draws.uniform(-135, -45))) / 255
    whitened = kept * x + (1 - kept) * torch.maximum(x, grey(x) * 1.5 + 0.5)
    return whitened + flakes + flakes.flip(2, 3)


def grey(x: Tensor) -> Tensor:
    """Luma (B, 1, H, W) of ITU-R BT.601, as in JPEG."""
    if x.shape[1] == 1:
        return x
    return (x * x.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)


def frost(x: Tensor, draws: Draws, kept: float, weight: float, scale: float) -> Tensor:
    """kept · x + weight · frost, as seen through a frozen window.

    The published sets overlay pieces of five photographs, which can't be redistributed. This one is generated with
    the brightness, contrast and tint of the photographs: it has their strength, but not their shapes.
    """
    texture = frost_texture(draws, x.shape[2], x.shape[3], scale)
    return kept * x + weight * (grey(texture) if x.shape[1] == 1 else texture)


def fog(x: Tensor, draws: Draws, density: float, decay: float) -> Tensor:
    """(x + density · clouds) · max x / (max x + density), at most as bright as before."""
    height, width = x.shape[2:]
    clouds = plasma(draws, 1 << (max(height, width) - 1).bit_length(), decay)[:, None, :height, :width]
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + density * clouds) * brightest / (brightest + density)


def brightness(x: Tensor, draws: Draws, more: float) -> Tensor:
    """Raise V of HSV, the largest of red, green and blue, to at most 1."""
    value = x.amax(1, keepdim=True)
    brighter = (value + more).clamp(max=1)
    # Hue and saturation are the ratios of the channels to V; black has none and becomes grey.
    return torch.where(value > 0, x / value.clamp(min=1e-6), 1) * brighter
