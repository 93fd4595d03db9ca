"""Plain, deterministic networks of CIFAR's scale that no other package ships, also by name."""

from collections.abc import Callable
from functools import partial

from torch import nn

from bayesify.lab.models.lenet import LeNet
from bayesify.lab.models.mlp import MLP
from bayesify.lab.models.pyramidnet import PyramidNet
from bayesify.lab.models.resnet import CifarResNet
from bayesify.lab.models.vgg import VGG16
from bayesify.lab.models.wide_resnet import WideResNet

__all__ = ["MLP", "MODELS", "VGG16", "CifarResNet", "LeNet", "PyramidNet", "WideResNet"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "lenet": LeNet,
    "resnet20": partial(CifarResNet, 20),
    "resnet32": partial(CifarResNet, 32),
    "resnet44": partial(CifarResNet, 44),
    "resnet56": partial(CifarResNet, 56),
    "resnet110": partial(CifarResNet, 110),
    "vgg16": VGG16,
    "wide_resnet_28_10": partial(WideResNet, 28, 10),
    "pyramidnet110_270": partial(PyramidNet, 110, 270),
}
"""Every network by name; all but `mlp`, which takes its sizes, accept `classes` and `in_channels`."""
