"""PyramidNet without bottlenecks (Han, Kim and Kim 2017) for CIFAR, as in the authors' PyTorch code."""

from itertools import accumulate, repeat

from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.lab.models.errors import ModelError
from bayesify.lab.models.stages import blocks_per_stage, conv3x3, initialise_convolutions_, stage


class PyramidShortcut(nn.Module):
    """The input, average-pooled where the block is strided, with the new, zero channels behind its own.

    >>> import torch
    >>> PyramidShortcut(new_channels=1, stride=2)(torch.ones(1, 2, 5, 5))[0, :, 0, 0]
    tensor([1., 1., 0.])
    """

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels = new_channels
        # Rounding up keeps odd sizes equal to those of the block's padded, strided convolution.
        self.pool = nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.pool(x), (0, 0, 0, 0, 0, self.new_channels))


class PyramidBlock(nn.Module):
    """BN-conv-BN-ReLU-conv-BN beside a zero-padded shortcut, and no activation on their sum.

    >>> import torch
    >>> PyramidBlock(16, 21, stride=2)(torch.rand(2, 16, 8, 8)).shape
    torch.Size([2, 21, 4, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = conv3x3(out_channels, out_channels)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = PyramidShortcut(out_channels - in_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn2(self.conv1(self.bn1(x))))
        summed: Tensor = self.bn3(self.conv2(out)) + self.shortcut(x)
        return summed


class PyramidNet(nn.Module):
    """Three stages of n blocks whose widths grow evenly from 16 to 16 + `alpha`, `depth = 6n + 2`.

    >>> PyramidNet(depth=20, alpha=18).fc.in_features
    34
    """

    def __init__(self, depth: int = 110, alpha: float = 270, classes: int = 100, *, in_channels: int = 3) -> None:
        super().__init__()
        if alpha <= 0:
            raise ModelError(f"alpha, by which the widths grow, must be positive, not {alpha}")
        blocks = blocks_per_stage(depth, other_layers=2)
        widths = pyramid_widths(3 * blocks, alpha)
        self.conv1 = conv3x3(in_channels, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.layer1 = stage(PyramidBlock, widths[: blocks + 1], stride=1)
        self.layer2 = stage(PyramidBlock, widths[blocks : 2 * blocks + 1], stride=2)
        self.layer3 = stage(PyramidBlock, widths[2 * blocks :], stride=2)
        self.bn_final = nn.BatchNorm2d(widths[-1])
        self.fc = nn.Linear(widths[-1], classes)
        initialise_convolutions_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(F.relu(self.bn_final(x)).mean((2, 3)))
        return logits


def pyramid_widths(blocks: int, alpha: float) -> list[int]:
    """The stem's 16 channels and the width of each block, `alpha / blocks` more than the one before (eq. 2).

    The paper floors each width; this follows its authors' code, which adds in floating point, then rounds.

    >>> pyramid_widths(4, alpha=10)
    [16, 18, 21, 24, 26]
    """
    return [round(width) for width in accumulate(repeat(alpha / blocks, blocks), initial=16.0)]
