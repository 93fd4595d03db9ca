"""The fifteen corruptions of ImageNet-C at five severities, on batches of images of any size (Hendrycks 2019)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesify.lab.data.errors import suggest
from bayesify.lab.shift.checks import ShiftError, require_severity, require_unit_images
from bayesify.lab.shift.corruptions.blurs import defocus_blur, glass_blur, motion_blur, zoom_blur
from bayesify.lab.shift.corruptions.constants import CONSTANTS, SIZES, nearest_set
from bayesify.lab.shift.corruptions.digital import contrast, elastic_transform, jpeg_compression, pixelate
from bayesify.lab.shift.corruptions.noises import gaussian_noise, impulse_noise, shot_noise
from bayesify.lab.shift.corruptions.weather import brightness, fog, frost, snow
from bayesify.lab.shift.random_numbers import Randomness, draws_for

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
    """Corrupt a batch of images.

    Args:
        x: Images (B, 1 or 3, H, W) from 0 to 1, on any device.
        name: One of `CORRUPTIONS`.
        severity: From 1 to 5.
        seed: The seed of the noise. Every row gets its own, so that it is the same in any batch.
        generator: A generator instead of `seed`.
        like: The published set whose constants are used: "CIFAR-10-C", "Tiny-ImageNet-C" or "ImageNet-C"; by default
            the one with images closest in size.
        quantise: Whether pixels are truncated to 8 bits, as in the published sets.

    Returns:
        The corrupted images, from 0 to 1.

    Raises:
        ShiftError: If the corruption, the severity or the images are not allowed.

    >>> x = torch.rand(2, 3, 32, 32)
    >>> corrupt(x, "fog", 3, seed=1).shape
    torch.Size([2, 3, 32, 32])
    >>> corrupt(x, "frog", 3)
    Traceback (most recent call last):
    bayesify.lab.shift.checks.ShiftError: no corruption is called 'frog': did you mean 'fog' or 'frost'?

    """
    require_unit_images(x)
    published = nearest_set(*x.shape[2:]) if like is None else like
    for what, given, known in (("corruption", name, list(CORRUPTIONS)), ("published set", published, list(CONSTANTS))):
        if given not in known:
            raise ShiftError(f"no {what} is called {given!r}: {suggest(given, known)}")
    numbers = CONSTANTS[published][name][require_severity(severity) - 1]
    draws = draws_for(x, generator or torch.Generator().manual_seed(seed))
    if not len(x):
        return x
    corrupted = CORRUPTIONS[name](x.float(), draws, *numbers).clamp(0, 1)
    # The thousandth keeps exact multiples of 1/255 from being truncated to the one below.
    return (torch.floor(corrupted * 255 + 1e-3) / 255 if quantise else corrupted).to(x.dtype)
