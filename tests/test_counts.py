"""The parameter counts of the papers, to the last one; nothing is computed, so the networks are on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bayesify as by
from bayesify.lab.models import MLP, VGG16, PyramidNet, WideResNet
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Method


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def deep_mlp() -> nn.Module:
    """1 → 100, 98 × (100 → 100), 100 → 100 without biases, a batch norm after all but the last."""
    return MLP([1] + [100] * 100, bias=False, norm="batch")


def test_conversion_stays_on_the_meta_device() -> None:
    model = by.convert(on_meta(deep_mlp), by.Rank1(4))
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("components", [1, 4])
@pytest.mark.parametrize(
    ("make", "nodes"),
    [
        pytest.param(VGG16, 5_251, id="VGG16-small"),
        pytest.param(lambda: WideResNet(28, 10), 9_475, id="WideResNet-28x10"),
    ],
)
def test_ibnn_has_a_mean_and_a_scale_per_node_and_component(
    make: Callable[[], nn.Module], nodes: int, components: int
) -> None:
    """Table 1 of the iBNN paper."""
    plain = count(on_meta(make))
    model = by.convert(on_meta(make), by.IBNN(components))
    layers = bayesian_layers(model).values()
    assert sum(layer.posterior.in_loc.numel() for layer in layers) == nodes * components
    assert count(model) - plain == 2 * nodes * components


@pytest.mark.parametrize("method", [by.EMP(5), by.ECMP(5)], ids=str)
@pytest.mark.parametrize(
    ("make", "plain", "patched"),
    [
        pytest.param(lambda: PyramidNet(110, 270, 100), 28_511_307, 28_825_299, id="PyramidNet"),
        pytest.param(deep_mlp, 1_009_900, 1_129_100, id="MLP"),
    ],
)
def test_patching_norms_and_the_output_layer(
    make: Callable[[], nn.Module], plain: int, patched: int, method: Method
) -> None:
    """Tables 1 and 2 of the EMP paper."""
    model = on_meta(make)
    assert count(model) == plain
    by.convert(model, method)
    assert count(model) == patched
    found = by.summary(model)
    assert (found.base, found.added) == (plain, patched - plain)
