"""Random pictures to lay over others: clouds of fog, crystals of frost."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.lab.shift.draws import Draws

FERNS = 4
"""So many directions that the crystals of one picture grow in."""
SLENDER = 8.0
"""So many times are crystals longer than wide."""


def plasma(draws: Draws, size: int, decay: float) -> Tensor:
    """Clouds (B, size, size) from 0 to 1 by the diamond-square algorithm; `size` is a power of two.

    Points half-way between others get the others' mean and noise, at every finer grid with `decay`² times less of it.
    """
    cloud = torch.zeros(len(draws.generators), size, size, device=draws.device)
    step, spread = size, 100.0**2
    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        cloud[:, half::step, half::step] = _wobbled(pairs + pairs.roll(-1, 2), draws, spread)
        middles = cloud[:, half::step, half::step]
        above, left = middles + middles.roll(1, 1), middles + middles.roll(1, 2)
        cloud[:, ::step, half::step] = _wobbled(above + corners + corners.roll(-1, 2), draws, spread)
        cloud[:, half::step, ::step] = _wobbled(left + corners + corners.roll(-1, 1), draws, spread)
        step, spread = half, spread / decay**2
    cloud = cloud - cloud.amin((1, 2), keepdim=True)
    return cloud / cloud.amax((1, 2), keepdim=True)


def _wobbled(total: Tensor, draws: Draws, spread: float) -> Tensor:
    """The mean of four and uniform noise."""
    return total / 4 + draws.uniform(-spread, spread, *total.shape[1:])


def frost_texture(draws: Draws, height: int, width: int, scale: float) -> Tensor:
    """Pictures (B, 3, height, width) of frost on a window, of which a pixel is 1 / `scale` pixels of a photograph.

    Patches of ridged noise, each stretched along a direction of its own, are the crystals. Brightness, contrast and
    tint vary from row to row as between the photographs of ImageNet-C: a mean of 0.45 to 0.85, a deviation of 0.06 to
    0.13, from white to blue.
    """
    relief = _standard(_crystals(draws, height, width, scale))
    tone, contrast, blue = (draws.uniform(*limits, 1, 1, 1) for limits in ((0.45, 0.85), (0.06, 0.13), (0.0, 0.14)))
    tint = torch.tensor([-1.0, 0.15, 0.85], device=draws.device).view(3, 1, 1)
    return (tone + contrast * relief + blue * tint).clamp(0, 1)


def _crystals(draws: Draws, height: int, width: int, scale: float) -> Tensor:
    """Ridges in several directions, each where its own slow noise is highest (B, 1, height, width)."""
    white = torch.fft.rfft2(draws.normal(2, FERNS, height, width))
    down = torch.fft.fftfreq(height, device=draws.device)[:, None] * scale
    across = torch.fft.rfftfreq(width, device=draws.device) * scale
    angle = draws.uniform(0, math.pi, FERNS, 1, 1)
    lengthwise = (angle.cos() * across + angle.sin() * down) * SLENDER
    crosswise = angle.cos() * down - angle.sin() * across
    # Amplitudes fall with frequency, but not below that of a picture 100 pixels wide.
    needles = _filtered(white[:, 0], (lengthwise.square() + crosswise.square() + 1e-4).pow(-0.6), height, width)
    place = _filtered(white[:, 1], (down.square() + across.square() + 1e-4).pow(-1.25), height, width)
    share = torch.softmax(3 * place, 1)
    ridges = torch.exp(-needles.abs() * 1.5) + 0.4 * place
    return (share * ridges).sum(1, keepdim=True)


def _filtered(white: Tensor, amplitude: Tensor, height: int, width: int) -> Tensor:
    return _standard(torch.fft.irfft2(white * amplitude, s=(height, width)))


def _standard(x: Tensor) -> Tensor:
    """Each picture with mean 0 and deviation 1."""
    x = x - x.mean((-2, -1), keepdim=True)
    return x / x.std((-2, -1), keepdim=True, correction=0).clamp(min=1e-6)
