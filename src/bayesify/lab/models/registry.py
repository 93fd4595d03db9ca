"""`MODELS`: the networks of this package by name, and how they fit the shape of the data."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from bayesify.lab.models.cnn import CNN, LEAST
from bayesify.lab.models.errors import ModelError, suggestion
from bayesify.lab.models.lenet import LeNet
from bayesify.lab.models.lstm import LSTM
from bayesify.lab.models.mlp import mlp
from bayesify.lab.models.pyramidnet import PyramidNet
from bayesify.lab.models.resnet import CifarResNet
from bayesify.lab.models.tabm import TabM
from bayesify.lab.models.unet import UNet
from bayesify.lab.models.vgg import VGG16
from bayesify.lab.models.wide_resnet import WideResNet

Shape = tuple[int, ...]
Builder = Callable[..., nn.Module]

MODELS: dict[str, Builder] = {
    "mlp": mlp,
    "tabm": TabM,
    "cnn": CNN,
    "lenet": LeNet,
    "resnet8": partial(CifarResNet, 8),
    "resnet20": partial(CifarResNet, 20),
    "resnet32": partial(CifarResNet, 32),
    "resnet44": partial(CifarResNet, 44),
    "resnet56": partial(CifarResNet, 56),
    "resnet110": partial(CifarResNet, 110),
    "vgg16": VGG16,
    "wide_resnet": WideResNet,
    "wide_resnet_28_10": partial(WideResNet, 28, 10),
    "pyramidnet": PyramidNet,
    "pyramidnet110_270": partial(PyramidNet, 110, 270),
    "lstm": LSTM,
    "unet": UNet,
}
"""Every network by name; the image networks accept `classes` and `in_channels`, the others need `in_features`."""

GIVEN = ("classes", "in_channels", "in_features", "image_size")
"""Arguments that follow from the data, so that they are not options."""

MOST_LAYERS, MOST_UNITS = 2_000, 1_000_000
"""The largest depth of a network of this package, and its largest width."""

SIZED = re.compile(r"(?:(wide_resnet)_|(pyramidnet))(\d{1,4})_(\d{1,4})")
"""Names that contain sizes, such as wide_resnet_16_4 and pyramidnet110_84."""


def build_named(name: str, shape: Shape, outputs: int, options: Mapping[str, Any]) -> nn.Module:
    """Build a network of this package for inputs of a shape.

    >>> build_named("mlp", (13,), 1, {"hidden": [20]}).layers.linear1
    Linear(in_features=13, out_features=20, bias=True)
    """
    builder = builder_of(name)
    check_options(name, builder, options)
    _check_sizes(name, options)
    given = _shape_arguments(name, shape)
    try:
        return builder(**{"classes": outputs, **given}, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{name}: {error}") from error


def builder_of(name: str) -> Builder:
    """The builder of a network by name, including names that contain a depth and a width.

    >>> builder_of("wide_resnet_16_4")().linear.in_features
    256
    """
    if name in MODELS:
        return MODELS[name]
    if sized := SIZED.fullmatch(name):
        return partial(MODELS[sized[1] or sized[2]], int(sized[3]), int(sized[4]))
    raise ModelError(
        f"unknown network {name!r}{suggestion(name, MODELS) or '.'} Expected one of {', '.join(MODELS)}; "
        f"torchvision:NAME, timm:NAME or hf:NAME; or your own, file.py:function"
    )


def options_of(builder: Builder, given: Sequence[str] = GIVEN) -> dict[str, inspect.Parameter]:
    """The options of a network: its parameters without those that follow from the data.

    >>> list(options_of(MODELS["wide_resnet"]))
    ['depth', 'width', 'dropout']
    """
    return {name: each for name, each in inspect.signature(builder).parameters.items() if name not in given}


def check_options(name: str, builder: Builder, options: Mapping[str, Any], given: Sequence[str] = GIVEN) -> None:
    """Raise if a network does not have an option, naming those that it has.

    >>> check_options("lstm", LSTM, {"hiden": 3})
    Traceback (most recent call last):
    bayesify.lab.models.errors.ModelError: lstm has no option 'hiden'; did you mean 'hidden'? Its options are ...
    """
    known = options_of(builder, given)
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    for option in options:
        if option in given and option in inspect.signature(builder).parameters:
            raise ModelError(f"{name}: {option} is not an option: it follows from the data")
        if option not in known:
            known_options = f"Its options are {', '.join(known)}" if known else "It has none"
            raise ModelError(f"{name} has no option {option!r}{suggestion(option, known) or '.'} {known_options}")


def _check_sizes(name: str, options: Mapping[str, Any]) -> None:
    """Raise for options that would build more layers, or wider ones, than any network has."""
    for option, value in options.items():
        several = value if isinstance(value, (list, tuple)) else [value]
        most = MOST_LAYERS if option in ("depth", "layers") else MOST_UNITS
        if len(several) > MOST_LAYERS or any(isinstance(each, (int, float)) and each > most for each in several):
            raise ModelError(f"{name}: {option}={str(value)[:80]} is too large; expected at most {most:,}")


def _shape_arguments(name: str, shape: Shape) -> dict[str, Any]:
    """The arguments that fit a network to inputs of a shape."""
    if name in ("mlp", "tabm"):
        return {"in_features": math.prod(shape)}
    if name == "lstm":
        return {"in_features": _dimensions(name, shape, 2, "series (time, features)")[1]}
    if name == "lenet":
        if len(shape) != 3 or shape[1:] not in ((28, 28), (32, 32)):
            raise ModelError(f"lenet needs images (C, 28, 28) or (C, 32, 32), got {shape}")
        return {"in_channels": shape[0], "image_size": shape[1]}
    least = {"vgg16": 32, "cnn": LEAST}.get(name, 1)
    wanted = "images (C, H, W)" + (f" of at least {least}x{least}" if least > 1 else "")
    channels, *size = _dimensions(name, shape, 3, wanted)
    if min(size) < least:
        raise ModelError(f"{name} needs {wanted}, got {shape}")
    return {"in_channels": channels, **({"image_size": tuple(size)} if name == "cnn" else {})}


def _dimensions(name: str, shape: Shape, count: int, wanted: str) -> Shape:
    if len(shape) != count:
        raise ModelError(f"{name} needs {wanted}, got {shape}")
    return shape
