"""VGG16 (Simonyan and Zisserman 2015, configuration D) for images of 32x32 and larger."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from bayesify.lab.models.mlp import MLP
from bayesify.lab.models.stages import initialise_convolutions_

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Width and number of convolutions of each stage; a max-pooling ends it."""


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions and a classifier with `hidden` layers on the `map_size`-sided feature map.

    The default is the small one, whose classifier is 512-512-512-`classes` on the 1x1 map that a 32x32 image
    leaves; `hidden=(4096, 4096), map_size=7` is the original.

    >>> [layer.in_features for layer in VGG16().classifier.modules() if isinstance(layer, nn.Linear)]
    [512, 512, 512]
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        in_channels: int = 3,
        batch_norm: bool = True,
        hidden: Sequence[int] = (512, 512),
        map_size: int = 1,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(*_feature_layers(in_channels, batch_norm))
        self.pool = nn.AdaptiveAvgPool2d(map_size)
        self.classifier = MLP([512 * map_size**2, *hidden, classes])
        initialise_convolutions_(self.features)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.features(x)))
        return logits


def _feature_layers(in_channels: int, batch_norm: bool) -> Iterator[nn.Module]:
    """The layers of torchvision's `features`, in its order, so that its weights fit."""
    for width, convolutions in STAGES:
        for _ in range(convolutions):
            yield nn.Conv2d(in_channels, width, kernel_size=3, padding=1)
            if batch_norm:
                yield nn.BatchNorm2d(width)
            yield nn.ReLU()
            in_channels = width
        yield nn.MaxPool2d(2)
