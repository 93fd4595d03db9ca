"""The severities of the published corrupted sets.

From the scripts that made them, `make_cifar_c.py`, `make_tinyimagenet_c.py` and `make_imagenet_c.py` of
https://github.com/hendrycks/robustness (Hendrycks and Dietterich 2019, "Benchmarking Neural Network Robustness to
Common Corruptions and Perturbations"). The numbers of a severity are the last arguments of its corruption's function.
"""

from __future__ import annotations

import math

Severities = tuple[tuple[float, ...], ...]
"""The arguments of a corruption at each of the five severities."""

SIZES = {"CIFAR-10-C": 32, "Tiny-ImageNet-C": 64, "ImageNet-C": 224}
"""How many pixels high and wide the images of each published set are."""


def _single(*values: float) -> Severities:
    return tuple((value,) for value in values)


def _of_side(*fractions: tuple[float, ...], side: float = 1.0) -> Severities:
    return tuple(tuple(side * fraction for fraction in each) for each in fractions)


CONSTANTS: dict[str, dict[str, Severities]] = {
    "CIFAR-10-C": {
        "gaussian_noise": _single(0.04, 0.06, 0.08, 0.09, 0.10),
        "shot_noise": _single(500, 250, 100, 75, 50),
        "impulse_noise": _single(0.01, 0.02, 0.03, 0.05, 0.07),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "brightness": _single(0.05, 0.1, 0.15, 0.2, 0.3),
        "contrast": _single(0.75, 0.5, 0.4, 0.3, 0.15),
        "elastic_transform": _of_side(
            (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
        ),
        "pixelate": _single(0.95, 0.9, 0.85, 0.75, 0.65),
        "jpeg_compression": _single(80, 65, 58, 50, 40),
    },
    "Tiny-ImageNet-C": {
        "gaussian_noise": _single(0.04, 0.08, 0.12, 0.15, 0.18),
        "shot_noise": _single(250, 100, 50, 30, 15),
        "impulse_noise": _single(0.01, 0.02, 0.05, 0.08, 0.14),
        "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        "frost": ((1, 0.3, 0.3), (0.9, 0.4, 0.3), (0.8, 0.45, 0.3), (0.75, 0.5, 0.3), (0.7, 0.55, 0.3)),
        "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        "brightness": _single(0.1, 0.2, 0.3, 0.4, 0.5),
        "contrast": _single(0.4, 0.3, 0.2, 0.1, 0.05),
        "elastic_transform": _of_side(
            (0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)
        ),
        "pixelate": _single(0.9, 0.8, 0.7, 0.6, 0.5),
        "jpeg_compression": _single(65, 58, 50, 40, 25),
    },
    "ImageNet-C": {
        "gaussian_noise": _single(0.08, 0.12, 0.18, 0.26, 0.38),
        "shot_noise": _single(60, 25, 12, 5, 3),
        "impulse_noise": _single(0.03, 0.06, 0.09, 0.17, 0.27),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "brightness": _single(0.1, 0.2, 0.3, 0.4, 0.5),
        "contrast": _single(0.4, 0.3, 0.2, 0.1, 0.05),
        # The script takes fractions of 244 pixels, though the images have 224.
        "elastic_transform": _of_side(
            (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02), side=244 / 224
        ),
        "pixelate": _single(0.6, 0.5, 0.4, 0.3, 0.25),
        "jpeg_compression": _single(25, 18, 15, 10, 7),
    },
}
"""By published set and corruption; lengths are in pixels, those of `elastic_transform` in sides of the image."""


def nearest_set(height: int, width: int) -> str:
    """The published set whose images are nearest in size, on a logarithmic scale.

    Args:
        height: The height of the images in pixels.
        width: Their width.

    Returns:
        The name of the set: a key of `SIZES`.

    >>> nearest_set(28, 28), nearest_set(64, 64), nearest_set(299, 299)
    ('CIFAR-10-C', 'Tiny-ImageNet-C', 'ImageNet-C')
    """
    side = math.sqrt(height * width)
    return min(SIZES, key=lambda name: abs(math.log(side / SIZES[name])))
