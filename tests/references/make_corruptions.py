"""Makes corruptions.npz, what the corruptions of ImageNet-C do by the libraries that the published sets were made with.

Run it by itself, in an environment of its own; on Debian 12 with Python 3.11:

    apt-get install libmagickwand-6.q16-6       # ImageMagick 6.9.11-60
    pip install imagecorruptions-imaug==1.1.5 numpy==2.4.6 scipy==1.17.1 scikit-image==0.26.0 scikit-learn==1.9.1 \
        opencv-python-headless==5.0.0.93 numba==0.68.1 pillow==13.0.0 wand==0.7.2
    python make_corruptions.py

Blur is OpenCV's and ImageMagick's, zooming SciPy's, colour scikit-image's, pixels and JPEG Pillow's; disks, clouds and
glass come from the package imagecorruptions, frost from the photographs in it, and what IMAGECORRUPTIONS names from it
alone.
"""

from __future__ import annotations

import ctypes
import io
import runpy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray
HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "src/bayesify/lab/shift/corruptions/constants.py"
EXACT = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
"""What has no randomness."""
RANDOM = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "snow", "frost", "fog"),
    "elastic_transform",
)
IMAGECORRUPTIONS = ("defocus_blur", "brightness", "contrast", "jpeg_compression")
"""What that package does as the published sets do, with ImageNet-C's constants of its own."""
ANGLES = (-40.0, 10.0, 33.0)
SETS = (("CIFAR-10-C", 32), ("Tiny-ImageNet-C", 64), ("ImageNet-C", 64))
"""Published constants, and the size of the images that they are tried on."""
DRAWS = 150


def images(size: int) -> Array:
    """Three pieces (3, size, size, 3) of scikit-learn's photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    china, flower = load_sample_images().images
    pieces = [china[:427, 60:487], flower[:427, 100:527], china[200:328, 500:628]]
    return np.stack([np.asarray(Image.fromarray(piece).resize((size, size), Image.Resampling.BOX)) for piece in pieces])


def statistics(clean: Array, corrupted: Array) -> Array:
    """Mean, mean size and deviation of the change (…, H, W, C) in levels, and log10 of its power in four bands."""
    change = corrupted.astype(float) - clean.astype(float)
    size = change.shape[-3]
    power = np.abs(np.fft.fft2(change, axes=(-3, -2))) ** 2 / size**2
    power = power.mean(tuple(range(power.ndim - 3))).mean(-1)
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size))
    edges = (0.5 / size, 0.08, 0.17, 0.33, 0.71)
    bands = [power[(frequency > low) & (frequency <= high)].mean() for low, high in pairwise(edges)]
    return np.array([change.mean(), np.abs(change).mean(), change.std(), *np.log10(np.array(bands) + 1e-2)])


def zoomed(x: Array, factor: float) -> Array:
    """The middle of (H, W, C), enlarged to its size."""
    from scipy.ndimage import zoom

    size = len(x)
    kept = int(np.ceil(size / factor))
    first = (size - kept) // 2
    large = zoom(x[first : first + kept, first : first + kept], (factor, factor, 1), order=1)
    cut = (len(large) - size) // 2
    return large[cut : cut + size, cut : cut + size]


def magick(x: Array, radius: float, sigma: float, degrees: float) -> Array:
    """ImageMagick's motion blur of bytes (H, W) or (H, W, 3)."""
    from wand.api import library
    from wand.image import Image

    library.MagickMotionBlurImage.argtypes = [
        library.MagickGetImageWidth.argtypes[0],
        *[ctypes.c_double] * 3,
    ]
    with Image.from_array(x) as picture:
        library.MagickMotionBlurImage(picture.wand, radius, sigma, degrees)
        return np.array(picture)[..., : x.shape[2] if x.ndim == 3 else 1].reshape(x.shape)


def gaussian_noise(x: Array, rng: Any, std: float) -> Array:
    return x + 255 * rng.normal(scale=std, size=x.shape)


def shot_noise(x: Array, rng: Any, photons: float) -> Array:
    return rng.poisson(x / 255 * photons) / photons * 255


def impulse_noise(x: Array, rng: Any, share: float) -> Array:
    from skimage.util import random_noise

    return random_noise(x / 255, mode="s&p", rng=rng, amount=share) * 255


def defocus_blur(x: Array, rng: Any, radius: float, smoothing: float) -> Array:
    import cv2
    from imagecorruptions.corruptions import disk

    return np.stack([cv2.filter2D(x[..., c] / 255, -1, disk(radius, smoothing)) for c in range(3)], -1) * 255


def glass_blur(x: Array, rng: Any, sigma: float, reach: int, rounds: int) -> Array:
    from imagecorruptions.corruptions import _shuffle_pixels_njit_glass_blur as shuffled
    from skimage.filters import gaussian

    soft = np.uint8(gaussian(x / 255, sigma=sigma, channel_axis=-1) * 255)
    moved = shuffled(len(x), len(x), soft, (sigma, reach, rounds), int(rng.integers(2**31)))
    return gaussian(moved / 255, sigma=sigma, channel_axis=-1) * 255


def motion_blur(x: Array, rng: Any, radius: float, sigma: float) -> Array:
    return magick(x, radius, sigma, rng.uniform(-45, 45))


def zoom_blur(x: Array, rng: Any, stop: float, step: float) -> Array:
    unit = (x / 255).astype(np.float32)
    layers = [unit, *(zoomed(unit, factor) for factor in np.arange(1, stop, step))]
    return np.mean(layers, 0) * 255


def snow(x: Array, rng: Any, mean: float, std: float, zoom: float, threshold: float, *rest: float) -> Array:
    import cv2

    radius, sigma, kept = rest
    layer = zoomed(rng.normal(mean, std, size=(*x.shape[:2], 1)), zoom)[..., 0]
    layer = np.uint8(np.clip(np.where(layer < threshold, 0, layer), 0, 1) * 255)
    layer = magick(layer, radius, sigma, rng.uniform(-135, -45))[..., None] / 255
    unit = (x / 255).astype(np.float32)
    grey = cv2.cvtColor(unit, cv2.COLOR_RGB2GRAY)[..., None]
    white = kept * unit + (1 - kept) * np.maximum(unit, grey * 1.5 + 0.5)
    return (white + layer + np.rot90(layer, 2)) * 255


def frost(x: Array, rng: Any, kept: float, weight: float, scale: float) -> Array:
    import cv2
    import imagecorruptions

    folder = Path(imagecorruptions.__file__).parent / "frost"
    names = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
    photo = cv2.resize(cv2.imread(str(folder / names[rng.integers(5)])), (0, 0), fx=scale, fy=scale)[..., ::-1]
    top, left = (rng.integers(0, side - len(x)) for side in photo.shape[:2])
    return kept * x + weight * photo[top : top + len(x), left : left + len(x)]


def fog(x: Array, rng: Any, density: float, decay: float) -> Array:
    from imagecorruptions.corruptions import plasma_fractal

    np.random.seed(int(rng.integers(2**31)))
    unit = x / 255
    clouds = plasma_fractal(1 << (len(x) - 1).bit_length(), decay)[: len(x), : len(x), None]
    foggy = unit + density * clouds
    return foggy * unit.max() / (unit.max() + density) * 255


def brightness(x: Array, rng: Any, more: float) -> Array:
    from skimage.color import hsv2rgb, rgb2hsv

    hsv = rgb2hsv(x / 255)
    hsv[..., 2] = np.clip(hsv[..., 2] + more, 0, 1)
    return hsv2rgb(hsv) * 255


def contrast(x: Array, rng: Any, factor: float) -> Array:
    mean = (x / 255).mean((0, 1))
    return ((x / 255 - mean) * factor + mean) * 255


def elastic_transform(x: Array, rng: Any, strength: float, smoothness: float, tilt: float) -> Array:
    import cv2
    from scipy.ndimage import map_coordinates
    from skimage.filters import gaussian

    size = len(x)
    corners = np.array([[1, 1], [1, -1], [-1, -1]], np.float32) * (size // 3) + size // 2
    moved = corners + rng.uniform(-tilt * size, tilt * size, size=(3, 2)).astype(np.float32)
    affine = cv2.getAffineTransform(corners, moved)
    tilted = cv2.warpAffine((x / 255).astype(np.float32), affine, (size, size), borderMode=cv2.BORDER_REFLECT_101)
    if not strength:
        return tilted * 255
    noise = rng.uniform(-1, 1, size=(2, size, size))
    dx, dy = (gaussian(n, smoothness * size, mode="reflect", truncate=3) * strength * size for n in noise)
    rows, columns = np.mgrid[:size, :size]
    where = [rows + dy, columns + dx]
    return np.stack([map_coordinates(tilted[..., c], where, order=1, mode="reflect") for c in range(3)], -1) * 255


def pixelate(x: Array, rng: Any, factor: float) -> Array:
    from PIL import Image

    size, few = len(x), int(len(x) * factor)
    small = Image.fromarray(x).resize((few, few), Image.Resampling.BOX)
    return np.asarray(small.resize((size, size), Image.Resampling.BOX))


def jpeg_compression(x: Array, rng: Any, quality: float) -> Array:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(x).save(file, "JPEG", quality=int(quality))
    return np.asarray(Image.open(file))


def main() -> None:
    table = runpy.run_path(str(TABLE))["CONSTANTS"]
    found: dict[str, Array] = {"images32": images(32), "images64": images(64)[:1]}
    for published, size in SETS:
        clean = found[f"images{size}"]
        if published != "ImageNet-C":
            few, severities = (2, (1, 2, 3, 4, 5)) if size == 32 else (1, (1, 5))
            for name in EXACT:
                found[f"{published}/{name}"] = np.stack(
                    [made(name, clean[:few], table[published][name][s - 1]) for s in severities]
                )
        for name in RANDOM:
            found[f"{published}/{name}"] = np.stack(
                [tried(name, clean, constants) for constants in table[published][name]]
            )
    found |= by_imagecorruptions(found["images32"][0])
    found["motion"] = np.stack([magick(found["images32"][0], 9, 2.5, angle) for angle in ANGLES])
    np.savez_compressed(HERE / "corruptions.npz", **found)


def made(name: str, clean: Array, constants: tuple[float, ...]) -> Array:
    """Corrupted images, cut off to bytes as the published ones are."""
    corruption: Callable[..., Array] = globals()[name]
    whole = [int(c) if float(c).is_integer() else c for c in constants]
    rng = np.random.default_rng(0)
    return np.stack([np.uint8(np.clip(corruption(x, rng, *whole), 0, 255)) for x in clean])


def tried(name: str, clean: Array, constants: tuple[float, ...]) -> Array:
    """The statistics of many draws."""
    many = np.repeat(clean, DRAWS, 0)
    return statistics(many, made(name, many, constants)).astype(np.float32)


def by_imagecorruptions(x: Array) -> dict[str, Array]:
    """What the package itself makes of one image."""
    from imagecorruptions import corrupt

    return {
        f"imagecorruptions/{name}": np.stack([corrupt(x, severity, name) for severity in range(1, 6)])
        for name in IMAGECORRUPTIONS
    }


if __name__ == "__main__":
    main()
