"""Random textures to overlay: clouds for fog, crystals for frost."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.lab.shift.random_numbers import Draws

FERNS = 4
"""The number of directions in which the crystals of one texture grow."""
SLENDER = 8.0
"""The ratio of length to width of a crystal."""


def plasma(draws: Draws, size: int, decay: float) -> Tensor:
    """Clouds (B, size, size) from 0 to 1 by the diamond-square algorithm; `size` is a power of two.

    Points halfway between others get their mean plus noise, which is `decay`² times smaller on each finer grid.
    """
    cloud = torch.zeros(len(draws.generators), size, size, device=draws.device)
    step, spread = size, 100.0**2
    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        cloud[:, half::step, half::step] = _mean_with_noise(pairs + pairs.roll(-1, 2), draws, spread)
        middles = cloud[:, half::step, half::step]
        above, left = middles + middles.roll(1, 1), middles + middles.roll(1, 2)
        cloud[:, ::step, half::step] = _mean_with_noise(above + corners + corners.roll(-1, 2), draws, spread)
        cloud[:, half::step, ::step] = _mean_with_noise(left + corners + corners.roll(-1, 1), draws, spread)
        step, spread = half, spread / decay**2
    cloud = cloud - cloud.amin((1, 2), keepdim=True)
    return cloud / cloud.amax((1, 2), keepdim=True)


def _mean_with_noise(total: Tensor, draws: Draws, spread: float) -> Tensor:
    """The mean of four points plus uniform noise."""
    return total / 4 + draws.uniform(-spread, spread, *total.shape[1:])


def frost_texture(draws: Draws, height: int, width: int, scale: float) -> Tensor:
    """Textures (B, 3, height, width) of frost on a window; one pixel is 1 / `scale` pixels of a photograph.

    The crystals are patches of ridged noise, each stretched along its own direction. Brightness, contrast and tint vary
    between rows as between the photographs of ImageNet-C: a mean of 0.45 to 0.85, a standard deviation of 0.06 to 0.13,
    from white to blue.
    """
    relief = _standard(_crystals(draws, height, width, scale))
    tone, contrast, blue = (draws.uniform(*limits, 1, 1, 1) for limits in ((0.45, 0.85), (0.06, 0.13), (0.0, 0.14)))
    tint = torch.tensor([-1.0, 0.15, 0.85], device=draws.device).view(3, 1, 1)
    return (tone + contrast * relief + blue * tint).clamp(0, 1)


def _crystals(draws: Draws, height: int, width: int, scale: float) -> Tensor:
    """Ridges in several directions, each where its own low-frequency noise is highest (B, 1, height, width)."""
    white = torch.fft.rfft2(draws.normal(2, FERNS, height, width))
    down = torch.fft.fftfreq(height, device=draws.device)[:, None] * scale
    across = torch.fft.rfftfreq(width, device=draws.device) * scale
    angle = draws.uniform(0, math.pi, FERNS, 1, 1)
    lengthwise = (angle.cos() * across + angle.sin() * down) * SLENDER
    crosswise = angle.cos() * down - angle.sin() * across
    # Amplitudes fall with frequency, and are bounded at that of an image 100 pixels wide.
    needles = _filtered(white[:, 0], (lengthwise.square() + crosswise.square() + 1e-4).pow(-0.6), height, width)
    place = _filtered(white[:, 1], (down.square() + across.square() + 1e-4).pow(-1.25), height, width)
    share = torch.softmax(3 * place, 1)
    ridges = torch.exp(-needles.abs() * 1.5) + 0.4 * place
    return (share * ridges).sum(1, keepdim=True)


def _filtered(white: Tensor, amplitude: Tensor, height: int, width: int) -> Tensor:
    return _standard(torch.fft.irfft2(white * amplitude, s=(height, width)))


def _standard(x: Tensor) -> Tensor:
    """Each texture with mean 0 and standard deviation 1."""
    x = x - x.mean((-2, -1), keepdim=True)
    return x / x.std((-2, -1), keepdim=True, correction=0).clamp(min=1e-6)
