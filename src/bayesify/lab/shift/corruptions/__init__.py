"""The fifteen corruptions of ImageNet-C at five severities, on batches of images of any size (Hendrycks 2019)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesify.lab.data.errors import nearest
from bayesify.lab.shift.checks import ShiftError, severity_level, unit_images
from bayesify.lab.shift.corruptions.blurs import defocus_blur, glass_blur, motion_blur, zoom_blur
from bayesify.lab.shift.corruptions.constants import CONSTANTS, SIZES, nearest_set
from bayesify.lab.shift.corruptions.digital import contrast, elastic_transform, pixelate
from bayesify.lab.shift.corruptions.jpeg import jpeg_compression
from bayesify.lab.shift.corruptions.noises import gaussian_noise, impulse_noise, shot_noise
from bayesify.lab.shift.corruptions.weather import brightness, fog, frost, snow
from bayesify.lab.shift.draws import Randomness, draws_for

__all__ = ["CONSTANTS", "CORRUPTIONS", "SIZES", "Corruption", "corrupt", "nearest_set"]

Corruption = Callable[..., Tensor]
"""A function of images (B, C, H, W) from 0 to 1, of `Draws`, and of the constants of a severity."""

CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}
"""Every corruption by name, in the order of the papers' tables."""


def corrupt(
    x: Tensor,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    generator: Randomness | None = None,
    like: str | None = None,
    quantise: bool = True,
) -> Tensor:
    """Images (B, 1 or 3, H, W) from 0 to 1 after a corruption at a severity from 1 to 5.

    >>> x = torch.rand(2, 3, 32, 32)
    >>> corrupt(x, "fog", 3, seed=1).shape
    torch.Size([2, 3, 32, 32])
    >>> corrupt(x, "frog", 3)
    Traceback (most recent call last):
    bayesify.lab.shift.checks.ShiftError: no corruption is called 'frog': did you mean 'fog' or 'frost'?

    The constants are those of the published set nearest in size, or of that named by `like`: "CIFAR-10-C",
    "Tiny-ImageNet-C" or "ImageNet-C". Every row has a seed of its own, drawn from `generator` or from one seeded with
    `seed`, so that it comes out the same in any batch. With `quantise`, pixels are cut off to 8 bits, as those sets'.
    """
    unit_images(x)
    published = nearest_set(*x.shape[2:]) if like is None else like
    for what, given, known in (("corruption", name, list(CORRUPTIONS)), ("published set", published, list(CONSTANTS))):
        if given not in known:
            raise ShiftError(f"no {what} is called {given!r}: {nearest(given, known)}")
    numbers = CONSTANTS[published][name][severity_level(severity) - 1]
    draws = draws_for(x, generator or torch.Generator().manual_seed(seed))
    if not len(x):
        return x
    corrupted = CORRUPTIONS[name](x.float(), draws, *numbers).clamp(0, 1)
    # The thousandth keeps what is a whole number of 255ths from falling to the one below by rounding.
    return (torch.floor(corrupted * 255 + 1e-3) / 255 if quantise else corrupted).to(x.dtype)
