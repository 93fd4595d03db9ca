"""JPEG compression of batches, without files: the arithmetic of libjpeg with its default settings."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.lab.pixels.rounding import bytes_of, round_half_up

LUMA = (
    *(16, 11, 10, 16, 24, 40, 51, 61),
    *(12, 12, 14, 19, 26, 58, 60, 55),
    *(14, 13, 16, 24, 40, 57, 69, 56),
    *(14, 17, 22, 29, 51, 87, 80, 62),
    *(18, 22, 37, 56, 68, 109, 103, 77),
    *(24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101),
    *(72, 92, 95, 98, 112, 100, 103, 99),
)
"""The quantisation table of luma (ITU-T T.81, table K.1)."""
CHROMA = (
    *(17, 18, 24, 47, 99, 99, 99, 99),
    *(18, 21, 26, 66, 99, 99, 99, 99),
    *(24, 26, 56, 99, 99, 99, 99, 99),
    *(47, 66, 99, 99, 99, 99, 99, 99),
    *(99,) * 32,
)
"""The quantisation table of chroma (table K.2)."""
TO_YCC = ((19595, 38470, 7471), (-11059, -21709, 32768), (32768, -27439, -5329))
"""From RGB to luma and chroma (JFIF), in libjpeg's units of 1/65536."""
TO_RGB = ((65536, 0, 91881), (65536, -22554, -46802), (65536, 116130, 0))


def compressed(x: Tensor, quality: float | Tensor) -> Tensor:
    """Images (B, 1 or 3, H, W) from 0 to 1 after JPEG of a quality from 1 to 100, or of one for each image, (B,).

    Chroma has half the resolution (4:2:0).
    """
    height, width = x.shape[2:]
    pixels = bytes_of(x).double()
    if x.shape[1] == 1:
        return (_quantise_plane(pixels, LUMA, quality) / 255).to(x)
    # Halves round up in luma and down in chroma.
    middle = pixels.new_tensor([0, 128, 128]).view(3, 1, 1)
    ycc = round_half_up(_mix_channels(pixels, TO_YCC) - middle.sign() * 2**-16) + middle
    luma = _quantise_plane(ycc[:, :1], LUMA, quality)
    chroma = _double(_quantise_plane(_halve(ycc[:, 1:]), CHROMA, quality))[..., :height, :width]
    rgb = round_half_up(_mix_channels(torch.cat([luma, chroma], 1) - middle, TO_RGB))
    return (rgb.clamp(0, 255) / 255).to(x)


def _mix_channels(x: Tensor, parts: tuple[tuple[int, ...], ...]) -> Tensor:
    """Linear combinations of channels, with weights in units of 1/65536."""
    return torch.einsum("ij,bjhw->bihw", x.new_tensor(parts), x) / 65536


def quantisation(table: tuple[int, ...], quality: float | Tensor) -> Tensor:
    """A table of T.81 scaled to a quality from 1 to 100 as libjpeg does, (…, 8, 8).

    >>> quantisation(LUMA, 50)[0, :3], quantisation(LUMA, 25)[0, :3]
    (tensor([16, 11, 10]), tensor([32, 22, 20]))
    """
    quality = torch.as_tensor(quality, dtype=torch.float64)
    scale = torch.where(quality < 50, 5000 / quality, 200 - 2 * quality).long()[..., None, None]
    return ((torch.tensor(table, device=scale.device).view(8, 8) * scale + 50) // 100).clamp(1, 255)


def _quantise_plane(plane: Tensor, table: tuple[int, ...], quality: float | Tensor) -> Tensor:
    """Planes from 0 to 255 after quantising their cosine coefficients, block by block."""
    height, width = plane.shape[2:]
    padded = F.pad(plane, (0, -width % 8, 0, -height % 8), "replicate") - 128
    blocks = padded.unfold(2, 8, 8).unfold(3, 8, 8)
    cosines, steps = _cosines().to(plane), quantisation(table, quality).to(plane)
    steps = steps if steps.dim() == 2 else steps[:, None, None, None]  # one table for each image
    # In integers, like libjpeg's "islow": first the rows, times 4, then the columns, in eighths.
    eighths = round_half_up(cosines @ round_half_up(blocks @ cosines.T * 4) / 4)
    kept = torch.sign(eighths) * torch.floor((eighths.abs() + 4 * steps) / (8 * steps))
    blocks = round_half_up(round_half_up(cosines.T @ (kept * steps) * 4) @ cosines / 32) + 128
    return blocks.clamp(0, 255).permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)[..., :height, :width]


def _cosines() -> Tensor:
    """The matrix of the discrete cosine transform of 8 numbers, times √8."""
    k, n = torch.meshgrid(torch.arange(8).double(), torch.arange(8).double(), indexing="ij")
    cosines = torch.cos((2 * n + 1) * k * math.pi / 16) * math.sqrt(2)
    cosines[0] = 1
    return cosines


def _halve(chroma: Tensor) -> Tensor:
    """Planes at half the resolution: means of four pixels, rounded up from a half in every second column."""
    height, width = chroma.shape[2:]
    # libjpeg pads the width to full blocks before halving, and the height after it.
    even = F.pad(chroma, (0, -width % 16, 0, height % 2), "replicate")
    total = even[..., ::2, ::2] + even[..., ::2, 1::2] + even[..., 1::2, ::2] + even[..., 1::2, 1::2]
    bias = 1 + torch.arange(total.shape[3], device=chroma.device) % 2
    return torch.floor((total + bias) / 4)


def _double(chroma: Tensor) -> Tensor:
    """Planes at twice the resolution: each new pixel is 3/4 of the nearest and 1/4 of the next, along both axes."""
    wide = F.pad(chroma, (1, 1, 1, 1), "replicate")
    middle = 3 * wide[..., 1:-1, :]
    rows = torch.stack([middle + wide[..., :-2, :], middle + wide[..., 2:, :]], 3).flatten(2, 3)
    middle = 3 * rows[..., 1:-1]
    left, right = middle + rows[..., :-2] + 8, middle + rows[..., 2:] + 7
    return torch.floor(torch.stack([left, right], 4).flatten(3, 4) / 16)
