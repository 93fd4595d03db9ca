"""Augmentation of raw image batches: an independent draw for each image, from torch's generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.lab.data.errors import DataError, suggest
from bayesify.lab.pixels import axes
from bayesify.lab.pixels.jpeg import compressed

Fill = float | Sequence[float]
"""A raw pixel value, 0 to 255 for uint8, or one for each channel."""
Range = tuple[float, float]
"""The smallest and the largest number."""
LARGEST_BLUR = 100
"""In pixels: a blur of a larger standard deviation can only be a mistake, and takes long."""


def pad_crop(x: Tensor, padding: int = 4, fill: Fill = 0) -> Tensor:
    """Pad each image by `padding` pixels on all sides and crop it to its size at a random place.

    Args:
        x: A batch of raw images (N, C, H, W), bytes or floats, on any device.
        padding: Pixels to add on each side.
        fill: The raw value of the padding, or one for each channel.

    Returns:
        Images of the same size.

    >>> pad_crop(torch.ones(2, 3, 8, 8), padding=2).shape
    torch.Size([2, 3, 8, 8])
    """
    rows, channels, height, width = _image_shape(x)
    canvas = _filled(x, fill).expand(rows, channels, height + 2 * padding, width + 2 * padding).clone()
    canvas[:, :, padding : padding + height, padding : padding + width] = x
    top, left = torch.randint(2 * padding + 1, (2, rows), device=x.device)
    # All windows as a view (rows, channels, top, left, height, width), of which each row picks one.
    windows = canvas.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(rows, device=x.device), :, top, left]


def flip(x: Tensor, p: float = 0.5) -> Tensor:
    """Flip each image left to right with probability p.

    Args:
        x: A batch of raw images (N, C, H, W), bytes or floats, on any device.
        p: The probability.

    Returns:
        The images, some of them flipped.

    >>> flip(torch.tensor([[[[1, 2]]]]), p=1.0)
    tensor([[[[2, 1]]]])
    """
    mirrored = _chosen(_image_shape(x)[0], p, x.device).view(-1, 1, 1, 1)
    return torch.where(mirrored, x.flip(-1), x)


def cutout(x: Tensor, size: int = 16, fill: Fill = 0) -> Tensor:
    """Fill a square around a random pixel, clipped at the border (DeVries and Taylor 2017).

    Args:
        x: A batch of raw images (N, C, H, W), bytes or floats, on any device.
        size: The side of the square in pixels.
        fill: The raw value of the square, or one for each channel.

    Returns:
        The images, each with a filled square.

    >>> int((cutout(torch.ones(1, 1, 8, 8), size=1) == 0).sum())
    1
    """
    rows, _, height, width = _image_shape(x)
    down, across = (_covered(rows, side, size, x.device) for side in (height, width))
    square = down[:, None, :, None] & across[:, None, None, :]
    return torch.where(square, _filled(x, fill), x)


def blur(x: Tensor, p: float = 0.5, sigma: Range = (0.0, 3.0)) -> Tensor:
    """Blur each image with probability p by a Gaussian whose standard deviation is uniform between two numbers.

    Args:
        x: A batch of raw images (N, C, H, W), bytes or floats, on any device.
        p: The probability.
        sigma: The smallest and the largest standard deviation, in pixels.

    Returns:
        The images, some of them blurred; beyond their borders they are mirrored.

    >>> x = torch.zeros(1, 1, 7, 7)
    >>> x[..., 3, 3] = 1
    >>> blur(x, 1.0, sigma=(1.0, 1.0))[0, 0, 3].round(decimals=2)
    tensor([0.0000, 0.0200, 0.1000, 0.1600, 0.1000, 0.0200, 0.0000])
    """
    rows, _, height, width = _image_shape(x)
    std = _uniform(rows, sigma, x.device) * _chosen(rows, p, x.device)  # 0 is no blur
    down, across = (axes.gaussians(side, std, largest=sigma[1], mirrored=True)[:, None] for side in (height, width))
    blurred = axes.along(x if x.is_floating_point() else x.float(), down, across)
    return blurred if x.is_floating_point() else blurred.round().to(x.dtype)


def jpeg(x: Tensor, p: float = 0.5, quality: Range = (30, 100)) -> Tensor:
    """Compress each image as JPEG with probability p, with a whole quality drawn uniformly between two.

    Args:
        x: A batch of raw grey or colour images (N, 1 or 3, H, W), bytes or floats from 0 to 1, on any device.
        p: The probability.
        quality: The lowest and the highest quality, from 1 to 100.

    Returns:
        The images, some of them with traces of compression.

    >>> x = (255 * torch.rand(4, 1, 16, 16)).byte()
    >>> [(jpeg(x, 1.0, (q, q)).float() - x.float()).abs().mean() > 10 for q in (5, 100)]
    [tensor(True), tensor(False)]
    """
    rows, channels, _, _ = _image_shape(x)
    if channels not in (1, 3):
        raise DataError(
            f"a batch of shape {tuple(x.shape)} can't be JPEG images; expected 1 or 3 channels, grey or RGB"
        )
    low, high = quality
    drawn = _uniform(rows, (low, high + 1), x.device).floor().clamp(low, high)
    unit = compressed(x if x.is_floating_point() else x / 255, drawn) if rows else x
    image = unit if x.is_floating_point() else (unit * 255).round().to(x.dtype)
    return torch.where(_chosen(rows, p, x.device).view(-1, 1, 1, 1), image, x)


def _chosen(rows: int, p: float, device: torch.device) -> Tensor:
    """Which rows are changed, each with probability p."""
    return torch.rand(rows, device=device) < p


def _uniform(rows: int, ends: Range, device: torch.device) -> Tensor:
    """A number between the ends for each row."""
    low, high = ends
    return low + (high - low) * torch.rand(rows, device=device)


def _covered(rows: int, side: int, size: int, device: torch.device) -> Tensor:
    """Which of `side` pixels lie within `size` around a random one, for each row."""
    start = torch.randint(side, (rows, 1), device=device) - size // 2
    pixel = torch.arange(side, device=device)
    return (pixel >= start) & (pixel < start + size)


def _image_shape(x: Tensor) -> tuple[int, int, int, int]:
    if x.dim() != 4:
        raise DataError(f"a batch of shape {tuple(x.shape)} can't be augmented; expected images (N, C, H, W)")
    rows, channels, height, width = x.shape
    return rows, channels, height, width


def _filled(x: Tensor, fill: Fill) -> Tensor:
    """The fill value as (1 or C, 1, 1), in the type of the images."""
    value = torch.tensor(fill, dtype=torch.float32, device=x.device).view(-1, 1, 1)
    if len(value) not in (1, x.shape[1]):
        raise DataError(f"fill={fill!r}: expected one number, or one for each of the {x.shape[1]} channels")
    return value.to(x.dtype) if x.is_floating_point() else value.round().to(x.dtype)


@dataclass(frozen=True)
class PadCrop:
    """`pad_crop` as a step.

    >>> PadCrop(padding=-1)
    Traceback (most recent call last):
    bayesify.lab.data.errors.DataError: PadCrop(padding=-1): expected an integer >= 0
    """

    padding: int = 4
    fill: float | tuple[float, ...] = 0

    def __post_init__(self) -> None:
        _expect(isinstance(self.padding, int) and self.padding >= 0, self, "padding", "an integer >= 0")

    def __call__(self, x: Tensor) -> Tensor:
        return pad_crop(x, self.padding, self.fill)


@dataclass(frozen=True)
class Flip:
    """`flip` as a step."""

    p: float = 0.5

    def __post_init__(self) -> None:
        _expect_probability(self)

    def __call__(self, x: Tensor) -> Tensor:
        return flip(x, self.p)


@dataclass(frozen=True)
class Cutout:
    """`cutout` as a step."""

    size: int = 16
    fill: float | tuple[float, ...] = 0

    def __post_init__(self) -> None:
        _expect(isinstance(self.size, int) and self.size >= 1, self, "size", "an integer >= 1")

    def __call__(self, x: Tensor) -> Tensor:
        return cutout(x, self.size, self.fill)


@dataclass(frozen=True)
class Blur:
    """`blur` as a step."""

    p: float = 0.5
    sigma: Range = (0.0, 3.0)

    def __post_init__(self) -> None:
        _expect_probability(self)
        _expect(
            _is_range(self.sigma, 0, LARGEST_BLUR), self, "sigma", f"(low, high), 0 <= low <= high <= {LARGEST_BLUR}"
        )

    def __call__(self, x: Tensor) -> Tensor:
        return blur(x, self.p, self.sigma)


@dataclass(frozen=True)
class Jpeg:
    """`jpeg` as a step."""

    p: float = 0.5
    quality: Range = (30, 100)

    def __post_init__(self) -> None:
        _expect_probability(self)
        whole = _is_range(self.quality, 1, 100) and all(float(end).is_integer() for end in self.quality)
        _expect(whole, self, "quality", "(low, high), whole numbers, 1 <= low <= high <= 100")

    def __call__(self, x: Tensor) -> Tensor:
        return jpeg(x, self.p, self.quality)


def _expect_probability(step: Flip | Blur | Jpeg) -> None:
    _expect(isinstance(step.p, (int, float)) and 0 <= step.p <= 1, step, "p", "a probability, 0 to 1")


def _is_range(value: object, low: float, high: float) -> bool:
    """Whether a value is a pair of numbers in order, within bounds."""
    if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(end, (int, float)) for end in value):
        return False
    return bool(low <= value[0] <= value[1] <= high)


def _expect(right: bool, step: object, field: str, what: str) -> None:
    if not right:
        raise DataError(f"{type(step).__name__}({field}={getattr(step, field)!r}): expected {what}")


Step = Callable[[Tensor], Tensor]
AUGMENTATIONS: dict[str, type[PadCrop | Flip | Cutout | Blur | Jpeg]] = {
    "pad_crop": PadCrop,
    "flip": Flip,
    "cutout": Cutout,
    "blur": Blur,
    "jpeg": Jpeg,
}
"""Every augmentation by name."""


def step(description: str | Mapping[str, Any] | Step) -> Step:
    """An augmentation from its name, from its name and options, or from a function.

    Args:
        description: A name such as "flip", a name with options such as `{"cutout": {"size": 8}}`, or a function.

    Returns:
        A function from raw batches to raw batches.

    Raises:
        DataError: If the name or an option is unknown.

    >>> step("flip"), step({"cutout": {"size": 8}})
    (Flip(p=0.5), Cutout(size=8, fill=0))
    """
    if callable(description):
        return description
    named = {description: {}} if isinstance(description, str) else description
    if not isinstance(named, Mapping) or len(named) != 1:
        raise DataError(f"augmentation {description!r}: expected a name, or {{name: {{option: value}}}}")
    ((name, options),) = named.items()
    if name not in AUGMENTATIONS:
        raise DataError(f"no augmentation is called {name!r}: {suggest(name, AUGMENTATIONS)}")
    try:
        return AUGMENTATIONS[name](**{key: _frozen(value) for key, value in (options or {}).items()})
    except (TypeError, AttributeError) as error:
        fields = list(AUGMENTATIONS[name].__dataclass_fields__)
        raise DataError(f"augmentation {name!r} with {options!r}: expected the options {fields}") from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def augment(x: Tensor, steps: Sequence[str | Mapping[str, Any] | Step]) -> Tensor:
    """Apply augmentations to a raw batch, one after another.

    Args:
        x: A batch of raw images (N, C, H, W), bytes or floats, on any device.
        steps: Augmentations, as `step` takes them.

    Returns:
        The augmented batch.

    >>> augment(torch.zeros(2, 1, 8, 8), ["pad_crop", "flip", {"cutout": {"size": 4}}]).shape
    torch.Size([2, 1, 8, 8])
    """
    for each in steps:
        x = step(each)(x)
    return x
