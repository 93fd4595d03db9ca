"""LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.lab.models.errors import ModelError


class LeNet(nn.Module):
    """LeNet-5: two 5x5 convolutions of 6 and 16 channels, then 400-120-84-`classes`.

    Images of 28x28 are padded to 32x32, for which the network was designed.

    >>> sum(p.numel() for p in LeNet().parameters())
    61706
    """

    def __init__(self, classes: int = 10, *, in_channels: int = 1, image_size: Literal[28, 32] = 28) -> None:
        super().__init__()
        if image_size not in (28, 32):
            raise ModelError(f"image_size must be 28 or 32, not {image_size}")
        self.conv1 = nn.Conv2d(in_channels, 6, kernel_size=5, padding=(32 - image_size) // 2)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits
