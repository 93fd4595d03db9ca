"""A small U-Net for images in which every pixel has a class."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.lab.models.errors import require_positive
from bayesify.lab.models.stages import conv3x3, initialise_convolutions_


class UNet(nn.Module):
    """Two 3x3 convolutions at each scale, each with batch norm and ReLU, down by pooling and up again with skips.

    (Ronneberger et al. 2015, with padding, so that the output has the size of the image. Maps are enlarged to the
    nearest pixel, before which sides may be of any size.)

    >>> UNet(3, depth=2)(torch.zeros(2, 1, 11, 8)).shape
    torch.Size([2, 3, 11, 8])
    """

    def __init__(self, classes: int = 2, *, in_channels: int = 1, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        require_positive(classes=classes, in_channels=in_channels, width=width, depth=depth)
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(_two_convolutions, [in_channels, *widths], widths))
        self.up = nn.ModuleList(_two_convolutions(low + high, high) for low, high in pairwise(widths[::-1]))
        self.head = nn.Conv2d(width, classes, 1)
        initialise_convolutions_(self)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for stage in self.down:
            x = stage(F.max_pool2d(x, 2, ceil_mode=True) if skips else x)
            skips.append(x)
        skips.pop()
        for stage in self.up:
            skip = skips.pop()
            x = stage(torch.cat([F.interpolate(x, skip.shape[2:]), skip], 1))
        logits: Tensor = self.head(x)
        return logits


def _two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    first, second = conv3x3(inputs, outputs), conv3x3(outputs, outputs)
    return nn.Sequential(first, nn.BatchNorm2d(outputs), nn.ReLU(), second, nn.BatchNorm2d(outputs), nn.ReLU())
