"""The plain networks that everything is compared with, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.lab.models import MLP, CifarResNet

CLASSES = 10


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a shortcut; linear layers that every library knows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x))))


class Transformer(nn.Module):
    """Four blocks over tokens of 48 numbers, classified by their mean."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Linear(48, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(x))).mean(1))


def resnet18() -> nn.Module:
    """torchvision's, for ten classes."""
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES)


@dataclass(frozen=True)
class Case:
    """A network, the shape of one input, how many rows a batch has, and how often things are timed."""

    name: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int
    rounds: int
    """How often a training step is timed."""
    predict_rounds: int
    """How often a prediction is, which takes many forward passes."""
    draws: int = 10
    head: str = ""
    """The name of its last layer, where a Bayesian head alone is measured too."""

    @property
    def title(self) -> str:
        """With the rows that it is measured with."""
        return f"{self.name}, B={self.rows}"

    def batch(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Random inputs and labels."""
        rows = rows or self.rows
        return torch.randn(rows, *self.shape), torch.randint(CLASSES, (rows,))


CASES = {
    "resnet20": Case("CIFAR ResNet-20", lambda: CifarResNet(20), (3, 32, 32), 128, 12, 6, head="linear"),
    "resnet18": Case("ResNet-18, 112×112 pixels", resnet18, (3, 112, 112), 32, 9, 6, draws=4, head="fc"),
    "mlp": Case(
        "MLP 784-3×512-10 with batch norm", lambda: MLP([784, 512, 512, 512, 10], norm="batch"), (784,), 128, 30, 12
    ),
    "transformer": Case("transformer, 4 blocks, width 128, 64 tokens", Transformer, (64, 48), 32, 12, 6),
}
