"""`build` on the real networks of torchvision and timm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

import bayesify as by
from bayesify.lab.models import ModelError, build, load_weights
from bayesify.lab.models.graft import with_heads_of

CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("timm:resnet18", (3, 64, 64), {}),
    ("timm:resnet18", (1, 32, 32), {"drop_rate": 0.1}),
    ("timm:resnet18.a1_in1k", (3, 32, 32), {}),
    ("timm:vit_tiny_patch16_224", (1, 32, 64), {"depth": 2}),
    ("torchvision:resnet18", (3, 64, 64), {}),
    ("torchvision:resnet18", (1, 32, 32), {}),
    ("torchvision:resnet18", (5, 32, 32), {}),
    ("torchvision:mobilenet_v3_small", (1, 32, 32), {}),
    ("torchvision:squeezenet1_1", (1, 64, 64), {}),
    ("torchvision:googlenet", (1, 64, 64), {}),
    ("torchvision:vit_b_16", (1, 32, 32), {}),
    ("torchvision:swin_t", (1, 64, 64), {}),
]


@pytest.mark.parametrize(("name", "shape", "options"), CASES)
def test_networks_take_other_classes_channels_and_sizes(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    model = build(name, shape=shape, outputs=7, **options)
    assert model.training
    logits = model(torch.rand(2, *shape))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_maxvit_is_told_the_size_of_the_images() -> None:
    with torch.device("meta"):  # it takes multiples of 224 alone
        model = build("torchvision:maxvit_t", shape=(1, 448, 448), outputs=7)
        assert model(torch.empty(2, 1, 448, 448)).shape == (2, 7)


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_they_become_bayesian(name: str) -> None:
    model = by.convert(build(name, shape=(1, 32, 32), outputs=7), by.Rank1(2))
    assert by.predict(model, torch.rand(2, 1, 32, 32), samples=2).probs.shape == (2, 7)


def test_a_first_convolution_for_other_channels_begins_at_the_old_scale() -> None:
    model = build("torchvision:resnet18", shape=(1, 32, 32), outputs=7)
    assert model.conv1.weight.std().item() == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.05)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "densenet121", "vit_b_16", "convnext_tiny"])
def test_only_the_head_is_taken_from_the_fresh_network(name: str) -> None:
    """What `pretrained=True` does after the download, with random weights in place of the downloaded ones."""
    with torch.device("meta"):
        trained, fresh = (torchvision.models.get_model(name, num_classes=classes) for classes in (1000, 7))
        before = dict(trained.named_parameters())
        grafted = with_heads_of(fresh, trained)
    changed = {name for name, p in grafted.named_parameters() if p is not before[name]}
    assert len({name.rpartition(".")[0] for name in changed}) == 1
    assert all(dict(grafted.named_parameters())[name].shape[0] == 7 for name in changed)
    assert grafted(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 7)


def test_pretrained_inception_would_lose_its_auxiliary_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: the weights that torchvision would download are made here."""
    made = torchvision.models.inception_v3(init_weights=False, aux_logits=True).state_dict()
    kind = torchvision.models.Inception_V3_Weights
    monkeypatch.setattr(kind, "get_state_dict", lambda self, *args, **kwargs: made)
    model = build("torchvision:inception_v3", shape=(1, 96, 96), outputs=7, pretrained=True)
    assert model(torch.rand(2, 1, 96, 96)).shape == (2, 7)
    assert torch.equal(model.Mixed_7c.branch1x1.conv.weight, made["Mixed_7c.branch1x1.conv.weight"])  # type: ignore[union-attr, arg-type]
    first = made["Conv2d_1a_3x3.conv.weight"].sum(1, keepdim=True)
    assert torch.equal(model.Conv2d_1a_3x3.conv.weight, first)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_local_weights_load_with_a_new_head(source: str, tmp_path: Path) -> None:
    trained = build(f"{source}:resnet18", shape=(3, 32, 32), outputs=5)
    save_file({f"module.{name}": t for name, t in trained.state_dict().items()}, tmp_path / "w.safetensors")
    model = build(f"{source}:resnet18", shape=(3, 32, 32), outputs=7)
    with pytest.raises(ModelError, match=r"ignore=\['fc.\*'\]"):
        load_weights(model, tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors", ignore=["fc.*"])
    assert torch.equal(model.conv1.weight, trained.conv1.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "timm:resnet17"}, "timm has no network 'resnet17'; did you mean .*'resnet18"),
        ({"name": "torchvision:resnet17"}, "torchvision has no network 'resnet17'; did you mean .*'resnet18'"),
        ({"name": "torchvision:fasterrcnn_resnet50_fpn"}, "is not an image classifier"),
        ({"name": "timm:resnet18", "dorp_rate": 0.1}, "unexpected keyword argument 'dorp_rate'"),
        ({"name": "torchvision:resnet18", "nrom_layer": nn.BatchNorm2d}, "unexpected keyword argument 'nrom_layer'"),
        ({"name": "torchvision:alexnet"}, r"torchvision:alexnet does not take inputs of shape \(3, 16, 16\)"),
        ({"name": "timm:vit_tiny_patch16_224", "shape": (3, 8, 8)}, "timm:vit_tiny_patch16_224"),
    ],
)
def test_what_they_cannot_do_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(**{"shape": (3, 16, 16), "outputs": 7, **arguments})
