"""Networks of torchvision, timm and transformers by name, small, with a batch for each."""

from __future__ import annotations

import inspect
from typing import Any

import conftest  # noqa: F401
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

CLASSES, ROWS = 7, 4
SIZES = (32, 56, 64, 128, 224, 240, 256, 299, 384)
"""The smallest of these that a network takes is used."""
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": 50, "num_labels": CLASSES, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**SMALL, **TEXT},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1, **TEXT},
    "llama": {**SMALL, **TEXT, "num_key_value_heads": 2},
    "t5": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        **TEXT,
    },
    "vit": {**SMALL, "num_labels": CLASSES, "image_size": 32, "patch_size": 8},
}

SAMPLE = [
    "torchvision:resnet18",
    "torchvision:swin_t",
    "timm:resnet18",
    "timm:vit_tiny_patch16_224",
    "timm:convnext_atto",
    "timm:nf_resnet26",
    "timm:mobilenetv3_small_050",
    "timm:efficientnet_b0",
    "timm:tf_efficientnet_b0",
    "timm:swin_tiny_patch4_window7_224",
    "timm:mixer_s32_224",
    "timm:resmlp_12_224",
    "timm:regnetx_002",
    "timm:densenet121",
    *(f"transformers:{name}" for name in CONFIGS),
]


class Classifier(nn.Module):
    """A network of transformers whose output is its logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).logits


class Pooled(Classifier):
    """An encoder and decoder of transformers, without the head that asks for an end in every row."""

    def forward(self, x: Tensor) -> Tensor:
        return self.network(input_ids=x, decoder_input_ids=x).last_hidden_state.mean(1)[:, :CLASSES]


class Encoder(Classifier):
    """A network of timm that need not have a classifier: its first features, on average over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.network(x)
        return y.flatten(1, -2).mean(1)[:, :CLASSES] if y.dim() > 2 else y[:, :CLASSES]


def network(name: str, size: int | None = None) -> nn.Module:
    """A network by name; with a size, one for images of it where it can be told."""
    library, _, kind = name.partition(":")
    torch.manual_seed(0)
    if library == "transformers":
        config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
        if kind == "t5":
            return Pooled(transformers.AutoModel.from_config(config))
        auto = transformers.AutoModelForImageClassification if kind == "vit" else None
        return Classifier((auto or transformers.AutoModelForSequenceClassification).from_config(config))
    if library == "torchvision":
        return torchvision.models.get_model(name.partition(":")[2], num_classes=CLASSES, **_sized(kind, size))
    try:
        model = timm.create_model(kind, num_classes=CLASSES, img_size=size)
    except TypeError:
        model = timm.create_model(kind, num_classes=CLASSES)
    return model if model.default_cfg["num_classes"] else Encoder(model)


def on_meta(name: str) -> nn.Module:
    """A network without its numbers."""
    with torch.device("meta"):
        return network(name)


def _sized(kind: str, size: int | None) -> dict[str, Any]:
    takes = "image_size" in inspect.signature(torchvision.models.get_model_builder(kind)).parameters
    return {"image_size": size} if takes or kind.startswith("vit_") else {}


def with_batch(name: str) -> tuple[nn.Module, int | None, Tensor]:
    """A network, its images' size and a batch that it takes."""
    if name.startswith("transformers:") and name != "transformers:vit":
        return network(name), None, torch.randint(2, 50, (ROWS, 6))
    said = ""
    for size in (32,) if name.startswith("transformers:") else SIZES:
        x = torch.randn(ROWS, 3, size, size)
        try:
            model = network(name, size)
            output = logits(model(x))
            if not output.isfinite().all():  # windows of one pixel divide by nothing
                raise ValueError(f"outputs for {size} pixels are not finite")
            output.sum().backward()
            model.zero_grad()
            return model, size, x
        except Exception as error:
            said = f"{type(error).__name__}: {error}".split("\n")[0]
    raise RuntimeError(f"{name} itself takes no images of {SIZES} pixels: {said}")


def logits(output: Any) -> Tensor:
    """The first tensor of an output; torchvision's inception and googlenet give others in training."""
    return output if isinstance(output, Tensor) else output[0]
