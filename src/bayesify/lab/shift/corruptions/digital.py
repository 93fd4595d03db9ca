"""What processing does: low contrast, stretching, coarse pixels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.lab.shift.checks import bytes_of, whole
from bayesify.lab.shift.corruptions import axes
from bayesify.lab.shift.draws import Draws


def contrast(x: Tensor, draws: Draws, factor: float) -> Tensor:
    """Less distance from the mean of each channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def pixelate(x: Tensor, draws: Draws, factor: float) -> Tensor:
    """Shrunk to fewer pixels and enlarged again, each a square."""
    height, width = x.shape[2:]
    low, narrow = int(height * factor), int(width * factor)
    # First across, then down, in whole numbers after each, as Pillow does it.
    narrowed = whole(bytes_of(x) @ axes.box(width, narrow).to(x).T)
    small = whole(axes.box(height, low).to(x) @ narrowed)
    return axes.along(small, axes.box(low, height), axes.box(narrow, width)) / 255


def elastic_transform(x: Tensor, draws: Draws, strength: float, smoothness: float, tilt: float) -> Tensor:
    """A random affine map and then a smooth random displacement of every pixel; lengths are in sides of the image.

    Displacements are uniform noise of that strength, blurred by a Gaussian of that deviation.
    """
    side = min(x.shape[2:])
    x = tilted(x, draws.uniform(-tilt * side, tilt * side, 3, 2))
    if not strength:
        return x
    noise = draws.uniform(-1, 1, 2, *x.shape[2:])
    down, across = (axes.gaussian(size, smoothness * side, mirrored=True, truncate=3) for size in x.shape[2:])
    return displaced(x, strength * side * axes.along(noise.double(), down, across))


def tilted(x: Tensor, moves: Tensor) -> Tensor:
    """The affine map that moves three corners of the middle square by (B, 3, 2) pixels across and down."""
    height, width = x.shape[2:]
    reach = min(height, width) // 3
    corners = torch.tensor([[1, 1], [1, -1], [-1, -1]], device=x.device) * reach
    corners = (corners + torch.tensor([width // 2, height // 2], device=x.device)).double()
    moved = corners + moves.double()
    # For each new pixel, where it was: the map from the moved corners to the corners.
    back = torch.linalg.solve(torch.cat([moved, torch.ones_like(moved[..., :1])], -1), corners.expand_as(moved))
    rows, columns = _pixels(x)
    where = torch.stack([columns, rows, torch.ones_like(rows)], -1) @ back[:, None]
    # The corners' pixels are the ends of the picture, at which it is mirrored.
    ends = torch.tensor([width - 1, height - 1], device=x.device)
    return _sampled(x, 2 * where / ends - 1, align_corners=True)


def displaced(x: Tensor, moves: Tensor) -> Tensor:
    """Every pixel taken from where it is plus (B, 2, H, W) pixels across and down, the borders mirrored."""
    rows, columns = _pixels(x)
    where = torch.stack([columns + moves[:, 0], rows + moves[:, 1]], -1)
    # Here the picture ends, and is mirrored, half a pixel further out.
    sides = torch.tensor([x.shape[3], x.shape[2]], device=x.device)
    return _sampled(x, (2 * where + 1) / sides - 1, align_corners=False)


def _pixels(x: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the column of every pixel."""
    sides = [torch.arange(size, device=x.device).double() for size in x.shape[2:]]
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return rows, columns


def _sampled(x: Tensor, grid: Tensor, *, align_corners: bool) -> Tensor:
    return F.grid_sample(x, grid.to(x), "bilinear", "reflection", align_corners)
