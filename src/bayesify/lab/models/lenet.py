"""LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.lab.models.errors import ModelError, require_one_of

SIZES = (6, 16, 120, 84)
"""The channels of the two convolutions and the units of the two hidden layers."""
MOST_TIMES = 1000
"""The largest width."""


class LeNet(nn.Module):
    """LeNet-5: two 5x5 convolutions of 6 and 16 channels, then 400-120-84-`classes`.

    Images of 28x28 are padded to 32x32, for which the network was designed. `width` times as many channels and hidden
    units have about its square times as many parameters. `norm="batch"` puts a batch norm before each ReLU.

    >>> [sum(p.numel() for p in LeNet(width=width).parameters()) for width in (1, 2)]
    [61706, 244362]
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        in_channels: int = 1,
        image_size: Literal[28, 32] = 28,
        width: float = 1,
        norm: Literal["batch"] | None = None,
    ) -> None:
        super().__init__()
        if image_size not in (28, 32):
            raise ModelError(f"image_size must be 28 or 32, not {image_size}")
        if not 0 < width <= MOST_TIMES:
            raise ModelError(f"width must be a number above 0 and at most {MOST_TIMES}, not {width}")
        if norm is not None:
            require_one_of("norm", norm, ["batch"])
        channels1, channels2, units1, units2 = (max(round(width * size), 1) for size in SIZES)
        self.conv1 = nn.Conv2d(in_channels, channels1, kernel_size=5, padding=(32 - image_size) // 2)
        self.norm1 = nn.BatchNorm2d(channels1) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(channels1, channels2, kernel_size=5)
        self.norm2 = nn.BatchNorm2d(channels2) if norm else nn.Identity()
        self.fc1 = nn.Linear(channels2 * 5 * 5, units1)
        self.norm3 = nn.BatchNorm1d(units1) if norm else nn.Identity()
        self.fc2 = nn.Linear(units1, units2)
        self.norm4 = nn.BatchNorm1d(units2) if norm else nn.Identity()
        self.fc3 = nn.Linear(units2, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.relu(self.norm3(self.fc1(x.flatten(1))))
        logits: Tensor = self.fc3(F.relu(self.norm4(self.fc2(x))))
        return logits
