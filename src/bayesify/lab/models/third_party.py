"""Networks of torchvision, timm and transformers by name, from the version that is installed."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.lab.models.errors import ModelError, suggestion
from bayesify.lab.models.graft import with_channels, with_heads_of

Shape = tuple[int, ...]
HUB = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
"""Options of transformers that say where to find a network."""

CODE = ("trust_remote_code", "code_revision", "auto_map", "quantization_config", "custom_pipelines", "proxies")
"""Options of transformers by which code, or another way to fetch files, could be chosen."""

TIMM_FILES = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")
"""Options of timm that name other files or addresses of weights; a recipe has `model.weights` for that."""

AUXILIARY = {"googlenet": ("aux1", "aux2"), "inception_v3": ("AuxLogits",)}
"""The networks of torchvision with auxiliary heads for training."""


def package(name: str) -> Any:
    """Import an optional package, or raise an error with the command to install it.

    >>> package("no_such_zoo")
    Traceback (most recent call last):
    bayesify.lab.models.errors.ModelError: the package no_such_zoo is not installed; pip install no_such_zoo
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise ModelError(f"the package {name} is not installed; pip install {name}") from error
        raise ModelError(f"the package {name} can't be imported: {error}; pip install {error.name}") from error
    except Exception as error:  # such as a RuntimeError of a torchvision built for another torch
        raise ModelError(
            f"the package {name} can't be imported: {error}; install the version that fits torch {torch.__version__}"
        ) from error


def from_torchvision(name: str, shape: Shape, outputs: int, pretrained: bool, options: Mapping[str, Any]) -> nn.Module:
    """A classifier of torchvision; if pretrained, all layers whose shapes fit are, usually all but the head."""
    models = package("torchvision").models
    _refuse("torchvision", name, options, ("num_classes", "weights", "pretrained", "aux_logits"))
    classifiers = models.list_models(module=models)
    if name not in classifiers:
        raise ModelError(_unknown("torchvision", name, classifiers, models.list_models()))
    arguments = {**_torchvision_sizes(name, shape), **options}
    begin = {"init_weights": True} if name in AUXILIARY else {}  # their default, but without the warning
    model: nn.Module = models.get_model(name, weights=None, num_classes=outputs, **{**begin, **arguments})
    if pretrained:
        model = with_heads_of(model, models.get_model(name, weights="DEFAULT", **arguments))
    for auxiliary in AUXILIARY.get(name, ()):  # with them, the output in training would be a tuple
        vars(model)["aux_logits"] = False
        setattr(model, auxiliary, None)
    return with_channels(model, shape[0], keep=pretrained)


def from_timm(name: str, shape: Shape, outputs: int, pretrained: bool, options: Mapping[str, Any]) -> nn.Module:
    """A classifier of timm, which adapts head, input channels and position embeddings itself."""
    timm = package("timm")
    _refuse("timm", name, options, ("num_classes", "in_chans", "pretrained", *TIMM_FILES))
    arguments: dict[str, Any] = {}
    if ":" not in name and "/" not in name:  # otherwise it is on the hub or in a folder
        if not timm.is_model(name):
            raise ModelError(_unknown("timm", name, timm.list_models(), ()))
        recorded = timm.models.get_pretrained_cfg(name)
        if getattr(recorded, "fixed_input_size", False) and tuple(recorded.input_size[1:]) != shape[1:]:
            arguments["img_size"] = shape[1:]
    arguments |= {"num_classes": outputs, "in_chans": shape[0], **options}
    model: nn.Module = timm.create_model(name, pretrained=pretrained, **arguments)
    return model


class Logits(nn.Module):
    """A network of transformers that takes a tensor and returns only the logits.

    Token ids equal to `padding` are masked.
    """

    def __init__(self, network: nn.Module, padding: int | None = None) -> None:
        super().__init__()
        self.network = network
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        masked = {} if self.padding is None else {"attention_mask": x.ne(self.padding).long()}
        logits: Tensor = self.network(x, **masked).logits
        return logits


def from_hf(name: str, shape: Shape, outputs: int, pretrained: bool, options: Mapping[str, Any]) -> nn.Module:
    """A classifier of transformers: for images (C, H, W), or for texts of T token ids, (T,)."""
    transformers = package("transformers")
    _refuse("hf", name, options, ("num_labels",))
    for option in options:  # implementations of attention can be kernels on the hub
        if option in CODE or option.startswith("_") or option.endswith("_implementation"):
            raise ModelError(
                f"hf:{name}: {option} is not allowed in a recipe, because it can choose code to run; build the network "
                "in a Python file of yours, and name it file.py:function with --trust file.py"
            )
    options = {**options, "trust_remote_code": False}
    images = len(shape) == 3
    kind = transformers.AutoModelForImageClassification if images else transformers.AutoModelForSequenceClassification
    where = {option: options[option] for option in options if option in (*HUB, "trust_remote_code")}
    config = transformers.AutoConfig.from_pretrained(name, num_labels=outputs, **options)
    vars(config).pop("auto_map", None)  # where the hub has code for the network, which is never used
    for option in options:  # transformers ignores unknown options
        if option not in where and not hasattr(config, option):
            raise ModelError(f"hf:{name} has no option {option!r}{suggestion(option, config.to_dict())}")
    if images:
        _fit_images(name, config, shape, pretrained)
    if pretrained:  # the head may have another size; images were checked above
        network = kind.from_pretrained(name, config=config, ignore_mismatched_sizes=True, **where)
    else:
        network = kind.from_config(config)
    return Logits(network, None if images else getattr(config, "pad_token_id", None))


Source = Callable[[str, Shape, int, bool, Mapping[str, Any]], nn.Module]
SOURCES: dict[str, Source] = {"torchvision": from_torchvision, "timm": from_timm, "hf": from_hf}


def from_third_party(name: str, shape: Shape, outputs: int, pretrained: bool, options: Mapping[str, Any]) -> nn.Module:
    """Build a network of another package by its prefixed name, and try it on an input of the shape."""
    source, _, rest = name.partition(":")
    if source not in SOURCES:
        raise ModelError(
            f"{name!r}: unknown source {source!r}{suggestion(source, SOURCES) or ';'} "
            f"networks come from {', '.join(f'{known}:' for known in SOURCES)} or file.py:function"
        )
    texts = source == "hf" and len(shape) == 1
    if len(shape) != 3 and not texts:
        wanted = "images (C, H, W) or texts (T,) of token ids" if source == "hf" else "images (C, H, W)"
        raise ModelError(f"{name} needs {wanted}, got {shape}")
    try:
        model = SOURCES[source](rest, shape, outputs, pretrained, options)
    except ModelError:
        raise
    except Exception as error:  # other packages raise errors of any kind
        what = f"{name} with its pretrained weights" if pretrained else name
        raise ModelError(f"{what} can't be built: {type(error).__name__}: {error}") from error
    _try_out(model, name, shape, outputs, torch.long if texts else torch.float32)
    return model.train()


def _try_out(model: nn.Module, name: str, shape: Shape, outputs: int, dtype: torch.dtype) -> None:
    """Raise unless the network maps a small batch of such inputs to logits."""
    x = torch.zeros(2, *shape, dtype=dtype, device=next(model.parameters()).device)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again in training
            found = model.eval()(x)
    except Exception as error:  # whatever the network raises, as a ModelError that names it
        raise ModelError(f"{name} does not take inputs of shape {shape}: {type(error).__name__}: {error}") from error
    if not isinstance(found, Tensor) or found.shape != (2, outputs):
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ModelError(f"{name} is not a classifier: a batch of 2 gave {what}, not logits of shape {(2, outputs)}")


def _refuse(source: str, name: str, options: Mapping[str, Any], taken: tuple[str, ...]) -> None:
    for option in taken:
        if option in options:
            raise ModelError(
                f"{source}:{name}: {option} is not an option: it follows from shape, outputs and pretrained"
            )


def _unknown(source: str, name: str, names: list[str], others: Any) -> str:
    if name in others:
        return f"{source}:{name} is not an image classifier; only these can be used"
    return f"{source} has no network {name!r}{suggestion(name, names)}"


def _torchvision_sizes(name: str, shape: Shape) -> dict[str, Any]:
    """The image size, which torchvision's transformers need and its convolutional networks don't take."""
    if name.startswith("vit_"):
        return {"image_size": shape[1]}
    return {"input_size": shape[1:]} if name.startswith("maxvit_") else {}


def _fit_images(name: str, config: Any, shape: Shape, pretrained: bool) -> None:
    channels = getattr(config, "num_channels", shape[0])
    if pretrained and channels != shape[0]:
        raise ModelError(f"hf:{name} was trained on images of {channels} channels, got {shape}")
    if hasattr(config, "num_channels"):
        config.num_channels = shape[0]
    if not pretrained and hasattr(config, "image_size"):
        config.image_size = shape[1] if shape[1] == shape[2] else shape[1:]
