"""Parts that the residual networks share: 3x3 convolutions, stages of blocks, and their initialisation."""

from collections.abc import Callable, Sequence

from torch import nn

from bayesify.lab.models.errors import ModelError


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A padded 3x3 convolution without bias, for use with a norm layer.

    >>> conv3x3(3, 16).weight.shape
    torch.Size([16, 3, 3, 3])
    """
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


def blocks_per_stage(depth: int, other_layers: int) -> int:
    """The n of a net of three stages of n two-convolution blocks: `depth = 6n + other_layers`.

    >>> blocks_per_stage(20, other_layers=2)
    3
    """
    blocks, remainder = divmod(depth - other_layers, 6)
    if blocks < 1 or remainder:
        raise ModelError(f"depth must be 6n + {other_layers} with n >= 1, not {depth}")
    return blocks


def stage(block: Callable[[int, int, int], nn.Module], widths: Sequence[int], stride: int) -> nn.Sequential:
    """A chain of `block(in_channels, out_channels, stride)` between successive widths, the first one strided.

    >>> [(conv.in_channels, conv.stride) for conv in stage(conv3x3, [16, 32, 32], stride=2)]
    [(16, (2, 2)), (32, (1, 1))]
    """
    strides = [stride] + [1] * (len(widths) - 2)
    return nn.Sequential(*map(block, widths[:-1], widths[1:], strides))


def initialise_convolutions_(model: nn.Module) -> None:
    """Draw every convolution's weight from Normal(0, 2 / fan-out) (He et al. 2015, eq. 14) and zero its bias.

    >>> initialise_convolutions_(nn.Sequential(conv3x3(3, 16)))
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
