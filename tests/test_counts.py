"""The parameter counts of the papers, to the last one; nothing is computed, so the networks are on the meta device."""

from __future__ import annotations

import copy
import math
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


@pytest.mark.parametrize(
    ("method", "among", "choices"),
    [
        (by.EMP(5), 5, 100),  # K^L: 99 norms and the output layer
        (by.ECMP(5), 5, 100 * 100 + 99 * 2 * 100),  # K^(H² + LH), with both tensors of a norm
        (by.MCDropout(0.1), 2, 99 * 100),  # 2^(LH)
        (by.DropConnect(0.1), 2, 100 + 99 * 100 * 100),  # 2^(LH²)
        (by.Ensemble(5), 5, 1),  # K
        (by.BatchEnsemble(4), 4, 1),
    ],
    ids=str,
)
def test_effective_ensemble_sizes(method: Method, among: int, choices: int) -> None:
    """Table 3 of the EMP paper, for its network of L = 100 layers with H = 100 units."""
    found = by.summary(by.convert(on_meta(deep_mlp), method))
    assert found.log10_networks == pytest.approx(choices * math.log10(among))


def test_noise_makes_infinitely_many_networks_and_a_plain_one_is_one() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 3))
    assert by.summary(net).log10_networks == 0 and "networks" not in str(by.summary(net))
    rank1 = by.summary(by.convert(copy.deepcopy(net), by.Rank1(4)))
    assert rank1.log10_networks == math.inf and "networks" not in str(rank1)
    assert by.summary(by.convert(copy.deepcopy(net), by.EMP(5), keep_dropout=True)).log10_networks == math.inf
    assert str(by.summary(by.convert(net, by.EMP(5)))).endswith("a draw is one of 25 networks")
    crossed = by.convert(on_meta(deep_mlp), by.ECMP(5))
    assert str(by.summary(crossed)).endswith("a draw is one of 10^20,829 networks")


def test_the_number_of_networks_is_that_of_different_draws() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 1, bias=False))
    model = by.convert(net, {"1": by.EMP(3), "3": by.ECMP(2)})
    x = torch.randn(50, 2)
    p = by.predict(model, x, 2000, likelihood=by.Gaussian(), design="independent")
    assert len({tuple(each.flatten().tolist()) for each in p.draws.double().round(decimals=5)}) == 3 * 2**2
    assert by.summary(model).log10_networks == pytest.approx(math.log10(12))
