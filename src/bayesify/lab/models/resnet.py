"""The CIFAR ResNets of He et al. 2016, section 4.2, with parameter-free shortcuts (option A)."""

from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.lab.models.stages import blocks_per_stage, conv3x3, initialise_convolutions_, stage


class ZeroPadShortcut(nn.Module):
    """Option A: every second row and column, with half of the new, zero channels on either side.

    >>> import torch
    >>> ZeroPadShortcut(new_channels=2)(torch.ones(1, 2, 4, 4))[0, :, 0, 0]
    tensor([0., 1., 1., 0.])
    """

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.before = new_channels // 2
        self.after = new_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Conv-BN-ReLU-conv-BN beside a shortcut, and a ReLU on their sum.

    >>> import torch
    >>> BasicBlock(16, 32, stride=2)(torch.rand(2, 16, 8, 8)).shape
    torch.Size([2, 32, 4, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = conv3x3(out_channels, out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity() if stride == 1 else ZeroPadShortcut(out_channels - in_channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """ResNet-8, 20, 32, 44, 56 or 110: three stages of n blocks, 16, 32 and 64 wide, `depth = 6n + 2`.

    >>> sum(p.numel() for p in CifarResNet(20).parameters())
    269722
    """

    def __init__(self, depth: int = 20, classes: int = 10, *, in_channels: int = 3) -> None:
        super().__init__()
        blocks = blocks_per_stage(depth, other_layers=2)
        self.conv1 = conv3x3(in_channels, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = stage(BasicBlock, [16] + [16] * blocks, stride=1)
        self.layer2 = stage(BasicBlock, [16] + [32] * blocks, stride=2)
        self.layer3 = stage(BasicBlock, [32] + [64] * blocks, stride=2)
        self.linear = nn.Linear(64, classes)
        initialise_convolutions_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits
