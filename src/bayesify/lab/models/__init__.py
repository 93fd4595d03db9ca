"""Networks by name: those of CIFAR's scale that no other package ships, those that others do, and the user's own."""

from typing import Any

from torch import nn

from bayesify.lab.models.cnn import CNN
from bayesify.lab.models.errors import ModelError, positive
from bayesify.lab.models.lenet import LeNet
from bayesify.lab.models.lstm import LSTM
from bayesify.lab.models.mlp import MLP
from bayesify.lab.models.named import MODELS, builder_of, named
from bayesify.lab.models.own import is_own, own
from bayesify.lab.models.pyramidnet import PyramidNet
from bayesify.lab.models.resnet import CifarResNet
from bayesify.lab.models.vgg import VGG16
from bayesify.lab.models.weights import load_weights
from bayesify.lab.models.wide_resnet import WideResNet
from bayesify.lab.models.zoo import from_zoo

__all__ = [
    "CNN",
    "LSTM",
    "MLP",
    "MODELS",
    "VGG16",
    "CifarResNet",
    "LeNet",
    "ModelError",
    "PyramidNet",
    "WideResNet",
    "build",
    "load_weights",
]


def build(name: str, *, shape: tuple[int, ...], outputs: int, pretrained: bool = False, **options: Any) -> nn.Module:
    """A network for inputs of a shape (without the batch) and so many classes or regression outputs.

    Names are those of `MODELS`, `torchvision:NAME`, `timm:NAME`, `hf:NAME_OR_FOLDER`, or a function of the user's own,
    `python:package.module:function` or `path/to/file.py:function`, which gets the options and nothing else.

    >>> build("lenet", shape=(1, 28, 28), outputs=7).fc3
    Linear(in_features=84, out_features=7, bias=True)
    >>> build("mlp", shape=(13,), outputs=1, hiden=[100])
    Traceback (most recent call last):
    bayesify.lab.models.errors.ModelError: mlp has no option 'hiden'; did you mean 'hidden'? Its options are ...
    """
    positive(outputs=outputs)
    for size in (shape := tuple(shape)):
        positive(**{f"each size in shape={shape}": size})
    if not shape:
        raise ModelError("shape=() has no size: give that of one input, such as (3, 32, 32) or (13,)")
    if is_own(name):
        return own(name, options, pretrained)
    if ":" in name:
        return from_zoo(name, shape, outputs, pretrained, options)
    if pretrained:
        builder_of(name)  # that the name is unknown would be the first thing to say
        raise ModelError(f"{name} comes without pretrained weights; load_weights(model, path) reads a file of yours")
    return named(name, shape, outputs, options)
