"""Balanced draws: each is exact by itself, together they cancel, and the standard errors know it."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

import bayesify as by
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Draws
from bayesify.methods.draw_design import TURNS, DrawDesign, component_cycle

METHODS = {
    "Rank1": by.Rank1(4, dropout_rate=0.1),
    "Rank1 lognormal": by.Rank1(3, posterior="lognormal", dropout_rate=0.1),
    "Rank1 Cauchy": by.Rank1(4, posterior="cauchy", dropout_rate=0.001),
    "IBNN": by.IBNN(4),
    "EMP": by.EMP(5, jitter=0.3, patches=("norm", "output")),
    "ECMP": by.ECMP(5, jitter=0.3),
    "ECMP learned": by.ECMP(3, jitter=0.3, learn_mixing=True),
    "MeanField": by.MeanField(init_log_std=(-2.0, -2.0)),
    "MCDropout": by.MCDropout(0.2),
    "DropConnect": by.DropConnect(0.1),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def draws_of(indices: range, *, seed: int = 0, cycle: int = 1, kind: str = "balanced", name: str = "layer") -> Draws:
    design = DrawDesign(seed, cycle, kind)  # type: ignore[arg-type]
    return design.draws(indices, torch.arange(indices.start, indices.stop), name)


# One draw.


@pytest.mark.parametrize("kind", ["balanced", "independent"])
@pytest.mark.parametrize("index", [0, 1, 4, 7, 13])
def test_every_draw_alone_has_exactly_the_distribution_of_its_noise(kind: str, index: int) -> None:
    draws = [draws_of(range(index, index + 1), seed=seed, cycle=2, kind=kind) for seed in range(40)]
    normal = torch.cat([each.normal((500,)).flatten() for each in draws])
    assert stats.kstest(normal.numpy(), "norm").pvalue > 1e-3
    uniform = torch.cat([each.uniform((500,), 5).flatten() for each in draws])
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3 and uniform.min() >= 0 and uniform.max() < 1
    cauchy = torch.cat([each.cauchy((500,)).flatten() for each in draws])
    assert stats.kstest(cauchy.numpy(), "cauchy").pvalue > 1e-3


def test_elements_of_a_draw_are_independent_of_each_other_and_of_other_layers() -> None:
    one = torch.stack([draws_of(range(3, 4), seed=seed).normal((4,))[0] for seed in range(4000)])
    other = torch.stack([draws_of(range(3, 4), seed=seed, name="other").normal((4,))[0] for seed in range(4000)])
    correlation = torch.corrcoef(torch.cat([one, other], 1).T) - torch.eye(8)
    assert correlation.abs().max() < 5 / math.sqrt(4000)


@pytest.mark.parametrize("name", METHODS)
def test_a_draw_has_the_posteriors_moments_whatever_its_index(name: str) -> None:
    """Over seeds, draw 0 and draw 7 of the first layer that is drawn have the same mean and variance."""
    model = by.convert(network(), METHODS[name])
    layer = next(iter(bayesian_layers(model).values()))
    found = {}
    for index in (0, 7):  # both of them, or their chains, at another turn; of the same component below
        k = layer.method.components if layer.method.ties_components else 1
        at = index * k
        weights = [dict(by.draw(model, seed, index=at).named_parameters())[_name(layer)] for seed in range(600)]
        found[index] = torch.stack(weights).flatten(1)
    first, later = found[0], found[7]
    if "Cauchy" in name:
        first, later = first.clamp(-3, 3), later.clamp(-3, 3)
    standard = (first.var(0) / 600 + later.var(0) / 600).sqrt().clamp_min(1e-6)
    assert ((first.mean(0) - later.mean(0)).abs() / standard).max() < 5.5
    ratio = (later.var(0) + 1e-8) / (first.var(0) + 1e-8)
    assert 0.6 < ratio.median() < 1.6


def _name(layer: nn.Module) -> str:
    return f"{layer.site_name}.weight"  # type: ignore[attr-defined]


# Draws together.


@pytest.mark.parametrize("cycle", [1, 4])
def test_normal_noise_adds_up_to_nothing_over_a_chain_and_to_one_draw_on_the_way(cycle: int) -> None:
    noise = draws_of(range(2 * TURNS * cycle), cycle=cycle).normal((20_000,)).reshape(2, TURNS, cycle, -1)
    assert noise.sum(1).abs().max() < 1e-5
    for turns in range(1, TURNS):
        assert noise[:, :turns].sum(1).var(-1).sub(1).abs().max() < 0.06
    chains = noise[0].flatten(), noise[1].flatten()
    assert torch.corrcoef(torch.stack(chains))[0, 1].abs() < 0.02  # one chain is independent of the next


def test_an_element_of_ecmp_uses_each_of_its_copies_once_in_as_many_draws() -> None:
    z = (draws_of(range(10)).uniform((500,), 5) * 5).long().reshape(2, 5, 500)
    assert (z.sort(1).values == torch.arange(5).reshape(1, 5, 1)).float().mean() > 0.999
    assert (z[0] != z[0].roll(1, 1)).any()  # in an order of its own


def test_a_unit_is_dropped_once_in_as_many_draws_as_its_rate_says() -> None:
    model = by.convert(nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 2)), by.MCDropout(0.2))
    masks = torch.stack([by.draw(model, 0, index=i)[1].weight[0] == 0 for i in range(10)])
    assert (masks[:5].sum(0) == 1).all() and (masks[5:].sum(0) == 1).all()


def test_a_kept_dropout_module_rotates_its_mask_too() -> None:
    net = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.2), nn.Linear(64, 2))
    model = by.convert(net, {"0": by.MeanField()}, keep_dropout=True).eval()
    x, masks = torch.randn(2, 3), []
    for index in range(5):
        drawn = by.draw(model, 0, index=index)
        masks.append(drawn[1](drawn[0](x))[0] == 0)
    assert (torch.stack(masks).sum(0) == 1).all()


@pytest.mark.parametrize("name", METHODS)
def test_balanced_draws_are_nearer_to_the_mean_of_many_than_independent_ones(name: str) -> None:
    torch.manual_seed(1)
    model, x = by.convert(network(), METHODS[name]), torch.randn(30, 4)
    truth = by.predict(model, x, 3000, seed=99, design="independent").probs
    error = {
        design: sum(
            float((by.predict(model, x, 20, seed=seed, design=design).probs - truth).square().mean())
            for seed in range(20)
        )
        for design in ("balanced", "independent")
    }
    assert error["independent"] > (1.2 if "Cauchy" in name else 1.5) * error["balanced"]


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_and_index_are_the_same_function_whatever_is_asked_for(name: str) -> None:
    model, x = by.convert(network(), METHODS[name]), torch.randn(5, 4)
    many = by.predict(model, x, 23, seed=3, draws=True).draws
    few = by.predict(model, x, 7, seed=3, draws=True).draws
    torch.testing.assert_close(many[:7], few)
    for index in (0, 6, 22):
        torch.testing.assert_close(by.draw(model, 3, index=index)(x), many[index])
    for member, output in zip(by.members(model, n=6, seed=3), many, strict=False):
        torch.testing.assert_close(member(x), output)
    torch.testing.assert_close(by.revert(model, 3, index=6)(x), many[6])


def test_draws_by_ones_and_in_chunks_are_the_same() -> None:
    whole = draws_of(range(17), cycle=4)
    first, second = whole.normal((3,)), whole.normal((2,))  # a layer with two factors asks twice
    for index in range(17):
        one = draws_of(range(index, index + 1), cycle=4)
        assert torch.equal(one.normal((3,))[0], first[index]) and torch.equal(one.normal((2,))[0], second[index])


def test_layers_with_other_numbers_of_components_share_their_chains() -> None:
    methods = [by.Rank1(4), by.IBNN(6), by.ECMP(5), by.MCDropout(0.1)]
    assert component_cycle(methods) == 12
    model = by.convert(network(), {"0": by.Rank1(2, dropout_rate=0.1), "*": by.IBNN(4)})
    chain = [dict(by.draw(model, 0, index=i).named_parameters()) for i in range(1, 4 * TURNS, 4)]
    first = torch.stack([each["0.weight"] for each in chain])  # all of one component in both layers
    with torch.no_grad():
        mean = torch.stack([dict(m.named_parameters())["0.weight"] for m in by.members(model)])[1]
    assert first.std(0).mean() > 0.05 and (first.mean(0) - mean).abs().max() < 0.3 * first.std(0).max()


def test_bad_designs_are_refused() -> None:
    model, x = by.convert(network(), by.Rank1(2)), torch.randn(2, 4)
    with pytest.raises(by.BayesifyError, match=r"design='sobol': expected 'balanced' or 'independent'"):
        by.predict(model, x, design="sobol")
    with pytest.raises(by.BayesifyError, match=r"seed=1\.5"):
        by.draw(model, 1.5)  # type: ignore[arg-type]
