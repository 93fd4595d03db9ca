"""Separable linear maps of images, as matrices for height and width: blur, zoom and resize."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def along(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Apply one matrix to the columns of images and another to their rows, the same for all or (B, 1, …)."""
    # In double precision, because the order of summation may change with the batch size and must not change a pixel.
    precise = x.double()
    return (down.to(precise) @ precise @ across.to(precise).mT).to(x.dtype)


def gaussian(size: int, sigma: float, *, mirrored: bool = False, truncate: float = 4.0) -> Tensor:
    """A Gaussian blur (size, size), truncated at `truncate` standard deviations; the border is repeated or mirrored.

    >>> gaussian(3, 0.01)
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]], dtype=torch.float64)
    """
    return gaussians(
        size, torch.tensor([sigma], dtype=torch.float64), largest=sigma, mirrored=mirrored, truncate=truncate
    )[0]


def gaussians(size: int, sigma: Tensor, *, largest: float, mirrored: bool = False, truncate: float = 4.0) -> Tensor:
    """The same with a standard deviation for each image, (B, size, size); none is above `largest`, and 0 is no blur."""
    sigma = sigma.double().clamp_min(1e-9)[:, None]
    reach = int(truncate * largest + 0.5)
    steps = torch.arange(-reach, reach + 1, device=sigma.device)
    weights = torch.exp(-0.5 * (steps / sigma).square()) * (steps.abs() <= (truncate * sigma + 0.5).floor())
    source = torch.arange(size, device=sigma.device)[:, None] + steps
    source = mirror(source, size) if mirrored else source.clamp(0, size - 1)
    shape = len(sigma), size, len(steps)
    spread = (weights / weights.sum(1, keepdim=True))[:, None].expand(shape)
    return spread.new_zeros(len(sigma), size, size).scatter_add_(2, source.expand(shape), spread)


def mirror(index: Tensor, size: int) -> Tensor:
    """Indices beyond an axis mirrored into it, with the first and last elements repeated: 2 1 0 0 1 2 2 1 0.

    >>> mirror(torch.arange(-3, 6), 3).tolist()
    [2, 1, 0, 0, 1, 2, 2, 1, 0]
    """
    index = index % (2 * size)
    return torch.where(index < size, index, 2 * size - 1 - index)


def mirror_once(index: Tensor, size: int) -> Tensor:
    """Indices beyond an axis mirrored into it, without repeating the first and last elements: 2 1 0 1 2 1 0.

    >>> mirror_once(torch.arange(-2, 5), 3).tolist()
    [2, 1, 0, 1, 2, 1, 0]
    """
    index = index % (2 * size - 2)
    return torch.where(index < size, index, 2 * size - 2 - index)


def zoom(size: int, factor: float) -> Tensor:
    """Enlarge the middle of an axis to its full length (size, size), with linear interpolation.

    >>> zoom(4, 2.0) @ torch.tensor([0.0, 1.0, 2.0, 3.0]).double()
    tensor([1.0000, 1.3333, 1.6667, 2.0000], dtype=torch.float64)
    """
    kept = math.ceil(size / factor)
    grown = max(round(kept * factor), size)
    first = torch.arange(size).double() + (grown - size) // 2
    at = (first * (kept - 1) / (grown - 1)).clamp(0, kept - 1) + (size - kept) // 2
    # The weight of each element at a point: 1 at the element, falling to 0 at its neighbours.
    return (1 - (at[:, None] - torch.arange(size)).abs()).clamp(min=0)


def box(size: int, new_size: int) -> Tensor:
    """Resize an axis (new_size, size): each new element is the mean of those whose centres it covers.

    >>> box(4, 2)
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    scale = size / new_size
    centre = (torch.arange(new_size).double()[:, None] + 0.5) * scale
    distance = (torch.arange(size) + 0.5 - centre) / max(scale, 1.0)
    covered = ((distance > -0.5) & (distance <= 0.5)).double()
    return covered / covered.sum(1, keepdim=True)
