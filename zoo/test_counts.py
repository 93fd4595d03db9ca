"""The papers' parameter counts on torchvision's networks, and one of them under every method."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision import models

import bayesify as by
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Method

METHODS: list[Method] = [
    by.Rank1(4),
    by.IBNN(4),
    by.EMP(5),
    by.ECMP(5),
    by.MeanField(),
    by.LowRankEnsemble(4),
    by.BatchEnsemble(4),
    by.MCDropout(0.1),
    by.DropConnect(0.1),
    by.Ensemble(2),
]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def converted_count(make: Callable[[], nn.Module], method: Method) -> int:
    return count(by.convert(on_meta(make), method))


def test_rank1_resnet50() -> None:
    """26.0M in table 1 of the Rank-1 paper."""
    assert converted_count(models.resnet50, by.Rank1(4)) == 25_974_144


@pytest.mark.parametrize("method", [by.EMP(5), by.ECMP(5)], ids=str)
def test_patched_resnet18(method: Method) -> None:
    assert count(on_meta(models.resnet18)) == 11_689_512
    assert converted_count(models.resnet18, method) == 13_779_912


@pytest.mark.parametrize("method", [by.EMP, by.ECMP])
def test_resnet18_with_only_its_norms_patched_has_a_third_of_a_percent_more(method: Callable[..., Method]) -> None:
    found = by.summary(by.convert(on_meta(models.resnet18), method(5, patches=("norm",))))
    assert found.base == 11_689_512 and f"{found.overhead:.3f}%" == "0.328%"


@pytest.mark.parametrize(
    ("make", "nodes"),
    [(models.alexnet, 18_307), (models.vgg16, 36_995), (models.resnet50, 24_579)],
    ids=["AlexNet", "VGG16-large", "ResNet-50"],
)
def test_nodes_of_the_ibnn_paper(make: Callable[[], nn.Module], nodes: int) -> None:
    layers = bayesian_layers(by.convert(on_meta(make), by.IBNN(4)))
    assert sum(layer.posterior.in_loc.numel() for layer in layers.values()) == 4 * nodes


@pytest.mark.parametrize(("rank", "parameters"), [(1, 27_206_852), (8, 38_755_592), (16, 51_954_152)])
def test_low_rank_ensembles_of_resnet50(rank: int, parameters: int) -> None:
    """C = 20 candidates, as in the BayesAdapter paper."""
    assert converted_count(models.resnet50, by.LowRankEnsemble(20, rank=rank)) == parameters


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_resnet18_trains_and_predicts(method: Method) -> None:
    torch.manual_seed(0)
    model, x = by.convert(models.resnet18(num_classes=7), method), torch.randn(4, 3, 64, 64)
    assert set(by.check(model, x).values()) == {1}
    by.elbo(model, x, torch.arange(4), n=100).loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    found = by.predict(model, x, samples=2)
    assert found.probs.shape == (4, 7)
    assert torch.allclose(found.probs.sum(1), torch.ones(4), atol=1e-5)
    assert found.epistemic.max() > 0
    assert torch.isfinite(model.eval()(x)).all()
