"""Blur: out of focus, behind frosted glass, by motion, by zooming."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.lab.shift.checks import bytes_of
from bayesify.lab.shift.corruptions import axes
from bayesify.lab.shift.draws import Draws

FAINT = 1e-6
"""A weight below this changes no pixel of 8 bits."""


def defocus_blur(x: Tensor, draws: Draws, radius: float, smoothing: float) -> Tensor:
    """Every point spread over a disk, as by a lens out of focus."""
    kernel = disk(radius, smoothing)
    reach, (height, width) = len(kernel) // 2, x.shape[2:]
    rows, columns = (
        axes.mirror_once(torch.arange(-reach, size + reach), size).to(x.device) for size in (height, width)
    )
    wide, total = x[:, :, rows[:, None], columns], torch.zeros_like(x)
    # Not a convolution, whose order of adding may change with the size of the batch, and with it a pixel.
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
    # The script's grid, which cuts off what smoothing spreads beyond it, and its widths of the smoothing.
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
    """Pixels replaced by ones nearby, between two slight Gaussian blurs, as behind frosted glass.

    From the lower right to the upper left, each pixel in turn takes the value of one at most `reach` away. (The script
    means to swap the two, but NumPy hands it views, of which the second is overwritten before it is read: the
    published images have copies.)
    """
    down, across = (axes.gaussian(size, sigma) for size in x.shape[2:])
    # What is a whole number of 255ths must stay one when it is cut off.
    x = torch.floor(axes.along(x, down, across) * 255 + 1e-3) / 255
    for _ in range(int(rounds)):
        height, width = x.shape[2:]
        steps = draws.integers(-int(reach), int(reach), height, width, 2)
        source = scattered(steps, int(reach))
        x = x.flatten(2).gather(2, source[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return axes.along(x, down, across)


def scattered(steps: Tensor, reach: int) -> Tensor:
    """Which pixel (B, H·W) each one has in the end, where one after the other takes that which is `steps` from it.

    The order is by rows from below, in a row from the right, and pixels nearer to the border than `reach` stay. A
    step reads and writes within `reach`; so pixels of which each is one row above and 2·reach columns to the right of
    another don't meet, and such a slanting front of them is done at once, with the result of going one by one.
    """
    batch, height, width, _ = steps.shape
    pixel = torch.arange(height * width, device=steps.device)
    row, column = pixel // width, pixel % width
    moving = (row > reach) & (row <= height - reach) & (column > reach) & (column <= width - reach)
    turn = ((height - reach - row) * 2 * reach + width - reach - column)[moving]
    fronts = pixel[moving][turn.argsort()].split(turn.bincount().tolist())
    target = pixel + steps[..., 1].flatten(1) * width + steps[..., 0].flatten(1)
    source = pixel.repeat(batch, 1)
    for front in fronts:
        source[:, front] = source.gather(1, target[:, front])
    return source


def motion_blur(x: Tensor, draws: Draws, radius: float, sigma: float) -> Tensor:
    """Smeared along a line at most 45° from the horizontal."""
    return bytes_of(smeared(x, radius, sigma, draws.uniform(-45, 45))) / 255


def smeared(x: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Σ_i w_i x(p + i·d), i = 0 … 2·radius: each image along its direction d, with weights of half a Gaussian.

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
    """The mean of the image and of enlargements of its middle, as when zooming while the shutter is open."""
    # As many factors as numpy.arange(1, stop, step) has.
    factors = [1 + i * ((1 + step) - 1) for i in range(math.ceil((stop - 1) / step))]
    precise = total = x.double()
    for factor in factors:
        down, across = (axes.zoom(size, factor) for size in x.shape[2:])
        total = total + axes.along(precise, down, across)
    return (total / (len(factors) + 1)).to(x.dtype)
