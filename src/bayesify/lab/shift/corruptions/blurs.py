"""Blur: defocus, glass, motion and zoom."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.lab.pixels import axes
from bayesify.lab.pixels.rounding import bytes_of
from bayesify.lab.shift.random_numbers import Draws

FAINT = 1e-6
"""A weight below this changes no pixel of 8 bits."""


def defocus_blur(x: Tensor, draws: Draws, radius: float, smoothing: float) -> Tensor:
    """Spread every point over a disk, like a lens out of focus."""
    kernel = disk(radius, smoothing)
    reach, (height, width) = len(kernel) // 2, x.shape[2:]
    rows, columns = (
        axes.mirror_once(torch.arange(-reach, size + reach), size).to(x.device) for size in (height, width)
    )
    wide, total = x[:, :, rows[:, None], columns], torch.zeros_like(x)
    # Not a convolution: its order of summation may change with the batch size, and with it a pixel.
    for top, left in (kernel > FAINT).nonzero().tolist():
        total.add_(wide[..., top : top + height, left : left + width], alpha=float(kernel[top, left]))
    return total


def disk(radius: float, smoothing: float) -> Tensor:
    """A disk of weights that add up to 1, its edge smoothed by a Gaussian.

    >>> disk(1, 0.1).round(decimals=2)
    tensor([[0.0000, 0.2000, 0.0000],
            [0.2000, 0.2000, 0.2000],
            [0.0000, 0.2000, 0.0000]], dtype=torch.float64)
    """
    # The grid and the smoothing widths of the original script, which truncates beyond the grid.
    reach, width = (8, 1) if radius <= 8 else (int(radius), 2)
    steps = torch.arange(-reach, reach + 1)
    inside = (steps[:, None].square() + steps.square() <= radius**2).double()
    weights = torch.exp(-0.5 * (torch.arange(-width, width + 1).double() / smoothing).square())
    source = axes.mirror_once(torch.arange(len(steps))[:, None] + torch.arange(-width, width + 1), len(steps))
    smooth = torch.zeros_like(inside).scatter_add_(1, source, (weights / weights.sum()).expand(source.shape))
    kernel = axes.along(inside / inside.sum(), smooth, smooth)
    empty = int((kernel[reach] <= FAINT).cumprod(0).sum())
    return kernel[empty : len(kernel) - empty, empty : len(kernel) - empty]


def glass_blur(x: Tensor, draws: Draws, sigma: float, reach: float, rounds: float) -> Tensor:
    """Replace pixels by nearby ones, between two slight Gaussian blurs, as behind frosted glass.

    From the lower right to the upper left, each pixel in turn takes the value of one at most `reach` away. (The
    original script means to swap the two, but NumPy's views make it copy, and so are the published images.)
    """
    down, across = (axes.gaussian(size, sigma) for size in x.shape[2:])
    # Exact multiples of 1/255 must not be truncated to the one below.
    x = torch.floor(axes.along(x, down, across) * 255 + 1e-3) / 255
    for _ in range(int(rounds)):
        height, width = x.shape[2:]
        steps = draws.integers(-int(reach), int(reach), height, width, 2)
        source = scatter_sources(steps, int(reach))
        x = x.flatten(2).gather(2, source[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return axes.along(x, down, across)


def scatter_sources(steps: Tensor, reach: int) -> Tensor:
    """The source pixel (B, H·W) of each pixel, after each in turn takes the value of the one `steps` away.

    The order is by rows from the bottom, in a row from the right; pixels closer to the border than `reach` stay. A step
    reads and writes within `reach`, so pixels that are one row up and 2·reach columns to the right of each other don't
    interact: such a diagonal front is done at once, with the same result as one by one.
    """
    batch, height, width, _ = steps.shape
    pixel = torch.arange(height * width, device=steps.device)
    row, column = pixel // width, pixel % width
    moving = (row > reach) & (row <= height - reach) & (column > reach) & (column <= width - reach)
    front_index = ((height - reach - row) * 2 * reach + width - reach - column)[moving]
    fronts = pixel[moving][front_index.argsort()].split(front_index.bincount().tolist())
    target = pixel + steps[..., 1].flatten(1) * width + steps[..., 0].flatten(1)
    source = pixel.repeat(batch, 1)
    for front in fronts:
        source[:, front] = source.gather(1, target[:, front])
    return source


def motion_blur(x: Tensor, draws: Draws, radius: float, sigma: float) -> Tensor:
    """Smear along a line at most 45° from the horizontal."""
    return bytes_of(smear(x, radius, sigma, draws.uniform(-45, 45))) / 255


def smear(x: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Σ_i w_i x(p + i·d), i = 0 … 2·radius: each image along its direction d, with half-Gaussian weights.

    ImageMagick's motion blur: steps are rounded to whole pixels and the border is repeated.
    """
    height, width = x.shape[2:]
    taps = torch.arange(2 * math.ceil(radius) + 1, device=x.device).double()
    weights = torch.exp(-0.5 * (taps / sigma).square())
    weights = weights / weights.sum()
    angle = torch.deg2rad(degrees.double())[:, None]
    right, below = (torch.ceil(taps * part - 0.5).long()[..., None] for part in (angle.cos(), angle.sin()))
    columns = (torch.arange(width, device=x.device) + right).clamp(0, width - 1)
    rows = (torch.arange(height, device=x.device) + below).clamp(0, height - 1)
    flat, total = x.flatten(2), torch.zeros_like(x.flatten(2))
    for tap, weight in enumerate(weights.tolist()):
        if weight > FAINT:
            source = (rows[:, tap, :, None] * width + columns[:, tap, None]).flatten(1)
            total += weight * flat.gather(2, source[:, None].expand_as(flat))
    return total.view_as(x)


def zoom_blur(x: Tensor, draws: Draws, stop: float, step: float) -> Tensor:
    """The mean of the image and enlargements of its middle, like zooming while the shutter is open."""
    # As many factors as numpy.arange(1, stop, step) has.
    factors = [1 + i * ((1 + step) - 1) for i in range(math.ceil((stop - 1) / step))]
    precise = total = x.double()
    for factor in factors:
        down, across = (axes.zoom(size, factor) for size in x.shape[2:])
        total = total + axes.along(precise, down, across)
    return (total / (len(factors) + 1)).to(x.dtype)
