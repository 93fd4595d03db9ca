"""A small convolutional network for tiny images, such as handwritten digits of 8x8."""

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor, nn

from bayesify.lab.models.errors import ModelError, require_one_of, require_positive, size_list
from bayesify.lab.models.stages import conv3x3, initialise_convolutions_

LEAST = 4
"""The smallest side of an image, and of a feature map that is pooled."""


class CNN(nn.Module):
    """3x3 convolutions with batch norm and ReLU, each followed by pooling while 4 pixels are left, and a linear head.

    The head sees the mean of the last feature map (`pool="average"`) or all of it (`pool="flatten"`).

    >>> [type(layer).__name__ for layer in CNN(image_size=(5, 5)).features]
    ['Conv2d', 'BatchNorm2d', 'ReLU', 'MaxPool2d', 'Conv2d', 'BatchNorm2d', 'ReLU']
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        in_channels: int = 1,
        image_size: tuple[int, int] = (8, 8),
        channels: int | Sequence[int] = (32, 64),
        pool: Literal["average", "flatten"] = "average",
    ) -> None:
        super().__init__()
        widths = size_list("channels", channels)
        require_positive(classes=classes, in_channels=in_channels)
        require_one_of("pool", pool, ["average", "flatten"])
        if min(image_size) < LEAST:
            raise ModelError(f"images must be at least {LEAST} pixels high and wide, not {image_size}")
        if not widths:
            raise ModelError("channels must have at least one width, not []")
        self.features = nn.Sequential(*_feature_layers(in_channels, widths, *image_size))
        self.pool = nn.AdaptiveAvgPool2d(1) if pool == "average" else nn.Identity()
        pixels = 1 if pool == "average" else _pixels(len(widths), *image_size)
        self.fc = nn.Linear(widths[-1] * pixels, classes)
        initialise_convolutions_(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.pool(self.features(x)).flatten(1))
        return logits


def _feature_layers(in_channels: int, widths: Sequence[int], height: int, width: int) -> Iterator[nn.Module]:
    for channels in widths:
        yield conv3x3(in_channels, channels)
        yield nn.BatchNorm2d(channels)
        yield nn.ReLU()
        if min(height, width) >= LEAST:
            yield nn.MaxPool2d(2)
            height, width = height // 2, width // 2
        in_channels = channels


def _pixels(stages: int, height: int, width: int) -> int:
    """The size of the last feature map."""
    for _ in range(stages):
        if min(height, width) >= LEAST:
            height, width = height // 2, width // 2
    return height * width
