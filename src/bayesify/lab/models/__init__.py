"""Networks by name: those of this package, those of torchvision, timm and transformers, and your own."""

from pathlib import Path
from typing import Any

from torch import nn

from bayesify.lab.models.cnn import CNN
from bayesify.lab.models.errors import ModelError, require_positive
from bayesify.lab.models.lenet import LeNet
from bayesify.lab.models.lstm import LSTM
from bayesify.lab.models.mlp import MLP
from bayesify.lab.models.pyramidnet import PyramidNet
from bayesify.lab.models.registry import MODELS, build_named, builder_of
from bayesify.lab.models.resnet import CifarResNet
from bayesify.lab.models.tabm import TabM, tabm_methods
from bayesify.lab.models.third_party import from_third_party
from bayesify.lab.models.unet import UNet
from bayesify.lab.models.user_networks import build_user_network, is_user_network
from bayesify.lab.models.vgg import VGG16
from bayesify.lab.models.weights import load_weights
from bayesify.lab.models.wide_resnet import WideResNet

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
    "TabM",
    "UNet",
    "WideResNet",
    "build",
    "load_weights",
    "tabm_methods",
]


def build(
    name: str,
    *,
    shape: tuple[int, ...],
    outputs: int,
    pretrained: bool = False,
    trust: str | Path | None = None,
    **options: Any,
) -> nn.Module:
    """Build a plain network by name.

    Args:
        name: One of `MODELS`; or `torchvision:NAME`, `timm:NAME` or `hf:NAME_OR_FOLDER`; or your own function,
            `path/to/file.py:function`, which is called with the options only.
        shape: The shape of one input, without the batch.
        outputs: The number of classes or of real outputs.
        pretrained: Whether to load the pretrained weights of torchvision, timm or transformers.
        trust: The Python file of your own function, which runs.
        **options: Options of the network.

    Returns:
        The network, in training mode.

    Raises:
        ModelError: If the name, an option or the shape does not fit.

    >>> build("lenet", shape=(1, 28, 28), outputs=7).fc3
    Linear(in_features=84, out_features=7, bias=True)
    >>> build("mlp", shape=(13,), outputs=1, hiden=[100])
    Traceback (most recent call last):
    bayesify.lab.models.errors.ModelError: mlp has no option 'hiden'; did you mean 'hidden'? Its options are ...
    """
    require_positive(outputs=outputs)
    for size in (shape := tuple(shape)):
        require_positive(**{f"each size in shape={shape}": size})
    if not shape:
        raise ModelError("shape=(): expected the shape of one input, such as (3, 32, 32) or (13,)")
    if is_user_network(name):
        return build_user_network(name, options, pretrained, trust=trust)
    if trust is not None:
        raise ModelError(f"trust={str(trust)!r}: {name} is not a function of a file; leave trust out")
    if ":" in name:
        return from_third_party(name, shape, outputs, pretrained, options)
    if pretrained:
        builder_of(name)  # raises if the name is unknown
        raise ModelError(f"{name} has no pretrained weights; load your own with load_weights(model, path)")
    return build_named(name, shape, outputs, options)
