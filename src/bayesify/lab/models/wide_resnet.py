"""Wide residual networks (Zagoruyko and Komodakis 2016), as in their own PyTorch code."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.lab.models.errors import require_positive
from bayesify.lab.models.stages import blocks_per_stage, conv3x3, initialise_convolutions_, stage


class WideBlock(nn.Module):
    """BN-ReLU-conv-BN-ReLU-dropout-conv beside a shortcut: the input, or a 1x1 convolution of its activation.

    >>> import torch
    >>> WideBlock(16, 32, stride=2, dropout=0.3)(torch.rand(2, 16, 8, 8)).shape
    torch.Size([2, 32, 4, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = conv3x3(out_channels, out_channels)
        self.shortcut = None
        if in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        out: Tensor = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(activated)))))
        return out + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(nn.Module):
    """WideResNet-depth-width: stages of n blocks, `width` times 16, 32 and 64 channels wide, `depth = 6n + 4`.

    >>> sum(p.numel() for p in WideResNet(16, 4).parameters())
    2748890
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        classes: int = 10,
        *,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_positive(width=width)
        blocks = blocks_per_stage(depth, other_layers=4)
        block = partial(WideBlock, dropout=dropout)
        width1, width2, width3 = (width * channels for channels in (16, 32, 64))
        self.conv1 = conv3x3(in_channels, 16)
        self.layer1 = stage(block, [16] + [width1] * blocks, stride=1)
        self.layer2 = stage(block, [width1] + [width2] * blocks, stride=2)
        self.layer3 = stage(block, [width2] + [width3] * blocks, stride=2)
        self.bn1 = nn.BatchNorm2d(width3)
        self.linear = nn.Linear(width3, classes)
        initialise_convolutions_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        logits: Tensor = self.linear(F.relu(self.bn1(x)).mean((2, 3)))
        return logits
