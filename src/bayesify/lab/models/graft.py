"""Adapt a pretrained network to other classes and other input channels."""

import torch
from torch import Tensor, nn

from bayesify.lab.models.errors import ModelError


def with_heads_of(model: nn.Module, trained: nn.Module) -> nn.Module:
    """The trained network, with the layers of a fresh one where shapes differ, such as the head.

    The trained network is kept, rather than its tensors copied, because it may differ in more than these.

    >>> trained = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1000))
    >>> with_heads_of(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 7)), trained)
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): Linear(in_features=8, out_features=7, bias=True)
    )
    """
    fresh = dict(model.named_modules())
    for name, layer in list(trained.named_modules()):
        if name in fresh and _own_shapes(layer) != _own_shapes(fresh[name]):
            if next(layer.children(), None) is not None:
                raise ModelError(f"the pretrained {name or type(layer).__name__} has another size than was asked for")
            trained.set_submodule(name, fresh[name])
    return trained


def _own_shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in layer.named_parameters(recurse=False)}


def with_channels(model: nn.Module, channels: int, keep: bool) -> nn.Module:
    """The network with a first convolution for another number of channels, from the old weights if `keep`.

    >>> with_channels(nn.Sequential(nn.Conv2d(3, 8, 3)), 1, keep=True)
    Sequential(
      (0): Conv2d(1, 8, kernel_size=(3, 3), stride=(1, 1))
    )
    """
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    if first.in_channels == channels:
        return model
    if keep:
        weight = channels_of(first.weight.detach(), channels)
    else:
        size = (first.out_channels, channels, *first.kernel_size)
        weight = torch.randn(size, device=first.weight.device) * first.weight.detach().std()
    first.weight, first.in_channels = nn.Parameter(weight), channels
    if hasattr(model, "transform_input"):  # it rescales the three channels of the original training
        vars(model)["transform_input"] = False
    return model


def channels_of(weight: Tensor, channels: int) -> Tensor:
    """A convolution's weight for another number of input channels, with outputs of the same scale.

    One channel gets the sum, so that a grey image has the same output; more channels repeat the old ones.

    >>> channels_of(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1), 1).flatten()
    tensor([6.])
    >>> channels_of(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1), 6).flatten()
    tensor([0.5000, 1.0000, 1.5000, 0.5000, 1.0000, 1.5000])
    """
    old = weight.shape[1]
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight[:, torch.arange(channels, device=weight.device) % old] * (old / channels)
