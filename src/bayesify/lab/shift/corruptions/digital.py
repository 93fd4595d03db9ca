"""Digital corruptions: contrast, elastic transform, pixelation, JPEG."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.lab.pixels import axes, jpeg
from bayesify.lab.pixels.rounding import bytes_of, round_half_up
from bayesify.lab.shift.random_numbers import Draws


def contrast(x: Tensor, draws: Draws, factor: float) -> Tensor:
    """Scale the distance from the mean of each channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def pixelate(x: Tensor, draws: Draws, factor: float) -> Tensor:
    """Shrink to fewer pixels, and enlarge again to squares."""
    height, width = x.shape[2:]
    low, narrow = int(height * factor), int(width * factor)
    # First across, then down, rounding after each, as Pillow does.
    narrowed = round_half_up(bytes_of(x) @ axes.box(width, narrow).to(x).T)
    small = round_half_up(axes.box(height, low).to(x) @ narrowed)
    return axes.along(small, axes.box(low, height), axes.box(narrow, width)) / 255


def jpeg_compression(x: Tensor, draws: Draws, quality: float) -> Tensor:
    """Compress images as JPEG of this quality."""
    return jpeg.compressed(x, quality)


def elastic_transform(x: Tensor, draws: Draws, strength: float, smoothness: float, tilt: float) -> Tensor:
    """A random affine map, then a smooth random displacement of every pixel; lengths are in sides of the image.

    Displacements are uniform noise of this strength, blurred by a Gaussian of this standard deviation.
    """
    side = min(x.shape[2:])
    x = affine(x, draws.uniform(-tilt * side, tilt * side, 3, 2))
    if not strength:
        return x
    noise = draws.uniform(-1, 1, 2, *x.shape[2:])
    down, across = (axes.gaussian(size, smoothness * side, mirrored=True, truncate=3) for size in x.shape[2:])
    return displace(x, strength * side * axes.along(noise.double(), down, across))


def affine(x: Tensor, moves: Tensor) -> Tensor:
    """Apply the affine map that moves three corners of the central square by (B, 3, 2) pixels across and down."""
    height, width = x.shape[2:]
    reach = min(height, width) // 3
    corners = torch.tensor([[1, 1], [1, -1], [-1, -1]], device=x.device) * reach
    corners = (corners + torch.tensor([width // 2, height // 2], device=x.device)).double()
    moved = corners + moves.double()
    # The inverse map, from new pixels to old ones.
    back = torch.linalg.solve(torch.cat([moved, torch.ones_like(moved[..., :1])], -1), corners.expand_as(moved))
    rows, columns = _pixels(x)
    where = torch.stack([columns, rows, torch.ones_like(rows)], -1) @ back[:, None]
    # The image is mirrored at the centres of its border pixels.
    ends = torch.tensor([width - 1, height - 1], device=x.device)
    return _sample(x, 2 * where / ends - 1, align_corners=True)


def displace(x: Tensor, moves: Tensor) -> Tensor:
    """Take every pixel from a place (B, 2, H, W) pixels across and down, mirroring at the borders."""
    rows, columns = _pixels(x)
    where = torch.stack([columns + moves[:, 0], rows + moves[:, 1]], -1)
    # Here the image is mirrored at the outer edges of its border pixels.
    sides = torch.tensor([x.shape[3], x.shape[2]], device=x.device)
    return _sample(x, (2 * where + 1) / sides - 1, align_corners=False)


def _pixels(x: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the column of every pixel."""
    sides = [torch.arange(size, device=x.device).double() for size in x.shape[2:]]
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return rows, columns


def _sample(x: Tensor, grid: Tensor, *, align_corners: bool) -> Tensor:
    return F.grid_sample(x, grid.to(x), "bilinear", "reflection", align_corners)
