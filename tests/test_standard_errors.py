"""Standard errors of predictions: by Monte Carlo, where the truth is known, and where there is no error."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from test_draw_design import METHODS
from torch import Tensor, nn

import bayesify as by
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.methods.base import Method
from bayesify.methods.draw_design import Blocks, blocks_of
from bayesify.prediction.results import Prediction, student_quantile

BLOCKS = {
    "Rank1": Blocks(20, 4),
    "Rank1 lognormal": Blocks(15, 3),
    "Rank1 Cauchy": Blocks(8, 4),
    "IBNN": Blocks(20, 4),
    "EMP": Blocks(5),
    "ECMP": Blocks(5),
    "ECMP learned": Blocks(3),
    "MeanField": Blocks(5),
    "MCDropout": Blocks(5),
    "DropConnect": Blocks(10),
}
X = torch.linspace(-2, 2, 24).unsqueeze(1) * torch.ones(4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def of_values(values: Tensor, blocks: Blocks | None = None, stacks: int = 7) -> Prediction:
    """The prediction of a mean from draws (S, B) of a real target, given in several stacks."""
    likelihood = by.Gaussian(1.0)
    accumulator = likelihood.accumulator(False, blocks)
    for some in values.unsqueeze(-1).split(stacks):
        likelihood.add(accumulator, some)
    return accumulator.result()


def chains(seeds: int, draws: int, groups: int) -> Tensor:
    """Balanced standard normal noise (S, B): closed chains of five differences for each of the groups."""
    z = torch.randn(math.ceil(draws / groups / 5), 5, groups, seeds)
    return ((z - z.roll(1, 1)) / math.sqrt(2)).flatten(0, 2)[:draws]


# The quantile.


def test_quantiles_are_students_from_one_degree_of_freedom_on() -> None:
    for p in (0.6, 0.9, 0.975, 0.999, 0.99999):
        for freedom in (1, 2, 3, 4, 5, 8, 15, 29, 30, 31, 32, 60, 1000):
            assert student_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-4)


# The formula, where the truth is known.


def test_independent_draws_have_the_usual_standard_error() -> None:
    values = torch.randn(9, 5)
    p = of_values(values)
    assert torch.allclose(p.standard_error.squeeze(1), values.std(0) / 3)
    expected = stats.sem(values.numpy()) * stats.t.ppf(0.95, 8)
    assert torch.allclose(p.margin(0.9).squeeze(1), torch.from_numpy(expected).float(), rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("turns", [15, 20, 40])
def test_margins_hold_as_often_as_they_say(groups: int, turns: int) -> None:
    """A network that is quadratic in normal noise: the linear part cancels, the rest has the mean 0."""
    torch.manual_seed(turns)
    centres = 10 * torch.arange(groups).repeat(turns).unsqueeze(1)  # components that differ a lot
    noise, other = (chains(20_000, turns * groups, groups) for _ in range(2))
    p = of_values(centres + 3 * noise + 0.3 * noise * other, Blocks(5 * groups, groups))
    assert p.freedom.unique().tolist() == [groups * (turns // 5 - 1)] or turns == 15
    truth = 10 * (groups - 1) / 2
    for level in (0.8, 0.95):
        held = ((p.mean - truth).abs() <= p.margin(level)).float().mean()
        if p.freedom.max() == groups * (turns // 5 - 1):
            assert level - 0.03 < held < level + 0.02, held
        else:
            assert held > 0.999  # draws are taken for independent


@pytest.mark.parametrize("groups", [1, 4])
def test_the_variance_is_unbiased_and_far_below_that_of_independent_draws(groups: int) -> None:
    torch.manual_seed(0)
    noise = chains(20_000, 20 * groups, groups)
    p: Any = of_values(2 * noise + 0.5 * (noise.square() - 1), Blocks(5 * groups, groups))
    mean_square = float(p.mean.square().mean())  # 0.3 of the variance of the even part for each chain of 5
    assert mean_square == pytest.approx(0.3 * 0.5**2 * 2 / 4 / groups, rel=0.05)
    assert float(p.standard_error.square().mean()) == pytest.approx(mean_square, rel=0.05)
    assert mean_square < 0.2 * (4 + 0.5) / (20 * groups)


@pytest.mark.parametrize("draws", [6, 11, 23, 41, 47, 50, 58])
def test_with_blocks_that_are_not_complete_margins_hold_more_often_than_they_say(draws: int) -> None:
    torch.manual_seed(draws)
    noise, other = (chains(5000, draws, 4) for _ in range(2))
    centres = torch.tensor([0.0, 1.0, 3.0, -2.0]).repeat(15)[:draws].unsqueeze(1)
    p: Any = of_values(centres + noise + 0.3 * noise * other, Blocks(20, 4))
    assert ((p.mean - 0.5).abs() <= p.margin()).float().mean() > 0.94
    assert p.standard_error.mean() < 0.8


def test_the_sums_do_not_depend_on_how_draws_come() -> None:
    values = torch.randn(53, 6)
    found = [of_values(values, Blocks(10, 2), stacks) for stacks in (1, 3, 10, 25, 53)]
    for p in found[1:]:
        assert torch.allclose(p.standard_error, found[0].standard_error, rtol=1e-4)
    blocks = values[:50].reshape(5, 5, 2, 6).mean(1)
    variance = blocks.var(0).sum(0) / 4  # of the mean over a block, from its two halves
    groups = torch.stack([values[::2].mean(0), values[1::2].mean(0)])
    squares = (values[::2] - groups[0]).square().sum(0) + (values[1::2] - groups[1]).square().sum(0)
    expected = (5 * 100 * variance + 3 * squares / 51) / 53**2 + (values.mean(0) - groups.mean(0)).square()
    assert torch.allclose(found[0].standard_error.squeeze(1), expected.sqrt(), rtol=1e-4)


def test_large_outputs_have_no_sums_for_each_component(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(60, 8)
    grouped = of_values(values, Blocks(10, 2))
    monkeypatch.setattr("bayesify.methods.draw_design.MAX_GROUPED_NUMBERS", 7)
    whole = of_values(values, Blocks(10, 2))
    assert grouped.freedom.max() == 10 and whole.freedom.max() == 5
    assert torch.allclose(whole.standard_error.squeeze(1), values.reshape(6, 10, 8).mean(1).std(0) / math.sqrt(6))


# Blocks of models.


@pytest.mark.parametrize("name", METHODS)
def test_blocks_are_those_of_the_methods(name: str) -> None:
    model = by.convert(network(), METHODS[name])
    assert DrawnNetwork(model).blocks == BLOCKS[name]
    cycle = METHODS[name].components if METHODS[name].ties_components else 1
    assert DrawnNetwork(model, "independent").blocks == Blocks(cycle, cycle)


@pytest.mark.parametrize("name", METHODS)
def test_means_of_blocks_are_independent(name: str) -> None:
    """Over seeds, the mean of a block says nothing about the next, though half of it does about the other half."""
    model = by.convert(network(), METHODS[name])
    length = BLOCKS[name].length
    draws = [by.predict(model, X[3:4], 2 * length, seed=seed, draws=True).draws for seed in range(400)]
    probs = torch.stack(draws).softmax(-1)[:, :, 0, 0].reshape(400, 2, length)
    means = probs.mean(-1)
    assert torch.corrcoef(means.T)[0, 1].abs() < 4 / math.sqrt(400)
    if "Cauchy" not in name:
        halves = probs[:, 0, : length // 2].mean(-1), probs[:, 0, length // 2 :].mean(-1)
        assert torch.corrcoef(torch.stack(halves))[0, 1] < -0.2


def test_blocks_of_several_methods_end_where_all_of_them_end() -> None:
    assert blocks_of([by.Rank1(4), by.ECMP(5)], 4, "balanced") == Blocks(20)
    assert blocks_of([by.Rank1(4), by.Rank1(2, posterior="cauchy")], 4, "balanced") == Blocks(40, 4)
    assert blocks_of([by.MCDropout(0.1), by.MCDropout(0.15)], 1, "balanced") == Blocks(10)  # not 70
    assert blocks_of([by.Rank1(4), by.MCDropout(0.15)], 4, "balanced") == Blocks(20)  # not 140
    assert blocks_of([by.IBNN(3), by.MCDropout(0.05)], 3, "balanced") == Blocks(30)  # complete chains, not 60
    assert blocks_of([by.Rank1(20)], 20, "balanced") == Blocks(100, 5)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    model = by.convert(net, {"0": by.IBNN(2)}, keep_dropout=True)
    assert DrawnNetwork(model).blocks == Blocks(10)
    two = nn.Sequential(by.convert(nn.Linear(4, 4), by.Rank1(2)), by.convert(nn.Linear(4, 3), by.Rank1(2)))
    assert DrawnNetwork(two).blocks == Blocks(20, 4)  # 2 · 2 combinations


# Predictions.


def test_a_linear_network_with_normal_noise_is_known_exactly_after_a_chain() -> None:
    """f(x) = w·x with w normal: the mean over a chain is the mean, while draws alone are far from it."""
    model = by.convert(nn.Linear(4, 1, bias=False), by.MeanField(init_log_std=(-1.0, -1.0)))
    p = by.predict(model, X, 20, likelihood=by.Gaussian(1.0))
    alone = by.predict(model, X, 20, likelihood=by.Gaussian(1.0), design="independent")
    mean = by.draw(model, None)(X)
    assert (p.mean - mean).abs().max() < 1e-5 and p.standard_error.max() < 1e-5
    assert alone.standard_error.max() > 0.05 and alone.freedom.unique().tolist() == [19]


@pytest.mark.parametrize("samples", [40, 50])
@pytest.mark.parametrize("name", METHODS)
def test_margins_of_a_network_hold(name: str, samples: int) -> None:
    """Over seeds, against the mean of many draws: a little less often than they say where few draws dominate."""
    model = by.convert(network(), METHODS[name])
    seeds, likelihood = 60, by.Categorical()
    truth = by.predict(model, X, 4000, seed=10**6, design="balanced")
    found = [by.predict(model, X, samples, seed=seed, likelihood=likelihood) for seed in range(seeds)]
    held = torch.stack([(p.probs - truth.probs).abs() <= p.margin() + 2 * truth.standard_error for p in found])
    assert held.float().mean() > (0.85 if "Cauchy" in name else 0.9)
    if samples % BLOCKS[name].length == 0 and "ECMP" not in name:
        assert held.float().mean() < 0.995
    actual = torch.stack([(p.probs - truth.probs).square() for p in found]).mean().sqrt()
    said = torch.stack([p.standard_error.square() for p in found]).mean().sqrt()
    assert 0.7 < said / actual < (5 if samples % BLOCKS[name].length else 1.5)


@pytest.mark.parametrize("method", [by.BatchEnsemble(4, signs=0.5), by.Ensemble(3), by.LowRankEnsemble(20)])
def test_points_have_no_error_once_each_has_come_equally_often(method: Method) -> None:
    model, k = by.convert(nn.Linear(4, 3), method), method.components
    if isinstance(method, by.Ensemble):
        with torch.no_grad():
            for p in model.posterior.parameters():
                p.add_(torch.randn_like(p))
    for samples in (None, k, 3 * k):
        p = by.predict(model, X, samples)
        assert not p.standard_error.any() and not p.margin().any()
    exact = by.predict(model, X, k).probs
    some = by.predict(model, X, k + 1)
    assert torch.allclose(some.standard_error, (some.probs - exact).abs(), atol=1e-4) or k == 20
    assert by.predict(model, X, k - 1).standard_error.max() > 1e-3


def test_parts_that_were_converted_apart_are_exact_after_all_combinations() -> None:
    parts = [by.convert(nn.Linear(4, 4), by.BatchEnsemble(2, signs=0.5)) for _ in range(2)]
    model = nn.Sequential(*parts)
    assert by.predict(model, X, 2).standard_error.max() > 0 and not by.predict(model, X, 4).standard_error.any()


def test_of_a_single_draw_nothing_is_known() -> None:
    p = by.predict(by.convert(network(), by.MeanField()), X, 1)
    assert p.standard_error.isinf().all() and p.margin().isinf().all()


LIKELIHOODS: list[tuple[Any, Callable[[Any], Tensor]]] = [
    (by.Categorical(), lambda p: p.probs),
    (by.Bernoulli(), lambda p: p.probs),
    (by.Gaussian(1.0), lambda p: p.mean),
]


@pytest.mark.parametrize("likelihood, value", LIKELIHOODS)
def test_rows_batches_and_adaptive_sampling_have_the_errors_of_as_many_draws(likelihood: Any, value: Any) -> None:
    model = by.convert(network(), METHODS["Rank1"])
    whole = by.predict(model, X, 80, likelihood=likelihood, draws=False)
    assert whole.standard_error.shape == value(whole).shape == whole.margin().shape
    parts = by.predict(model, X, 80, likelihood=likelihood, draws=False, batch_size=7)
    assert torch.allclose(parts.margin(), whole.margin(), atol=1e-5)
    index = torch.tensor([3, 1])
    assert torch.equal(whole.rows(index).margin(), whole.margin()[index])
    p = by.predict(model, X, tolerance=0.02, likelihood=likelihood, batch_size=9)
    assert len(p.draws_used.unique()) > 1 and (p.draws_used % 20 == 0).all()
    for count in p.draws_used.unique().tolist():
        fixed = by.predict(model, X, count, likelihood=likelihood)
        same = p.draws_used == count
        assert torch.allclose(p.margin()[same], fixed.margin()[same], atol=1e-5)


def test_rows_in_another_dimension_have_their_own_margins() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.rnn(x)[0])
            return found

    model = by.convert(Tagger(), by.Rank1(2, prior_std=0.5, dropout_rate=0.1), batch_dim=1)
    x = torch.linspace(0.01, 6, 30).reshape(1, 30, 1) * torch.randn(5, 30, 3)
    p = by.predict(model, x, by.Adaptive(tolerance=0.03, max=400, claims="mean"))
    assert p.standard_error.shape == (5, 30, 2) and p.freedom.shape == (1, 30, 1) and len(p.draws_used.unique()) > 1
    assert p.margin().max() <= 0.03
    fixed = by.predict(model, x, p.samples, batch_size=11)
    last = p.draws_used == p.samples
    assert torch.allclose(fixed.margin()[:, last], p.margin()[:, last], atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("samples", [7, 40])
def test_on_the_meta_device_there_are_shapes(name: str, samples: int) -> None:
    model = by.convert(network(), METHODS[name]).to("meta")
    p = by.predict(model, X.to("meta"), samples)
    assert p.standard_error.shape == p.margin().shape == (24, 3) and p.margin().is_meta


# A tolerance in place of a number of draws.


@pytest.mark.parametrize("name", METHODS)
def test_with_a_tolerance_every_margin_is_within_it(name: str) -> None:
    model = by.convert(network(), METHODS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = by.predict(model, X, tolerance=0.15 if "Cauchy" in name else 0.04)
    assert p.margin().max() <= (0.15 if "Cauchy" in name else 0.04)
    assert (p.draws_used % BLOCKS[name].length == 0).all()


def test_a_tolerance_for_real_targets_is_in_predictive_standard_deviations() -> None:
    model, likelihood = by.convert(network(), METHODS["MeanField"]), by.Gaussian(0.01)  # a standard deviation of 10
    p = by.predict(model, X, tolerance=0.01, likelihood=likelihood)
    assert (p.margin() <= 0.01 * p.std).all() and p.margin().max() > 0.01


@pytest.mark.parametrize("groups, length", [(1, 5), (4, 20)])
@pytest.mark.parametrize("needed", [1.5, 4, 12])
def test_where_sampling_stops_a_margin_holds_as_often_as_it_says(groups: int, length: int, needed: float) -> None:
    """Means of blocks are normal, with a true margin equal to the tolerance after `needed` blocks."""
    from test_adaptive import simulated

    torch.manual_seed(0)
    tolerance, draws = 0.1, 400
    noise, turns = torch.randn(draws // length, 1, groups, 4000), length // groups
    deviation = tolerance * math.sqrt(groups * needed) / 1.96
    linear = chains(4000, draws, groups).reshape(-1, turns, groups, 4000)
    outputs = (linear + deviation * noise).flatten(0, 2).unsqueeze(-1)
    rule = by.Adaptive(max=draws, tolerance=tolerance, claims="mean")
    unit = by.Gaussian(1e6)  # so that the predictive deviation is that of the draws, here 1 and more
    p: Any = simulated(outputs, rule, unit, Blocks(length, groups))
    early = p.draws_used < draws
    wrong = (p.mean.abs() > tolerance * p.std).squeeze(1) & early
    assert early.float().mean() > 0.9 and wrong.float().mean() < 0.07


def test_a_tolerance_that_is_not_reached_is_said() -> None:
    model = by.convert(network(), METHODS["MeanField"])
    with pytest.warns(UserWarning, match=r"\d+ of 24 inputs have a margin above tolerance=0\.001 after 50 draws.*max="):
        p = by.predict(model, X, by.Adaptive(max=52, tolerance=0.001, claims="mean"))
    assert p.samples == 50  # whole blocks


def test_points_reach_every_tolerance_with_each_component_once() -> None:
    p = by.predict(by.convert(nn.Linear(4, 3), by.BatchEnsemble(4)), X, tolerance=1e-9)
    assert p.samples == 4


@pytest.mark.parametrize("tolerance", [0, -1, math.nan, "much", True])
def test_bad_tolerances_are_refused(tolerance: Any) -> None:
    with pytest.raises(by.BayesifyError, match=rf"tolerance={tolerance!r}: expected a number > 0"):
        by.predict(by.convert(network(), by.MeanField()), X, tolerance=tolerance)


def test_bad_uses_say_what_to_do() -> None:
    model = by.convert(network(), by.MeanField())
    with pytest.raises(by.BayesifyError, match=r"samples=20 and tolerance=0\.1: expected one of them"):
        by.predict(model, X, 20, tolerance=0.1)
    with pytest.raises(by.BayesifyError, match=r"claims='label'\): expected 'prediction' or 'mean'"):
        by.Adaptive(claims="label")  # type: ignore[arg-type]
    with pytest.raises(by.BayesifyError, match=r"margin\(95\): expected a probability"):
        by.predict(model, X, 20).margin(95)
    with pytest.raises(by.BayesifyError, match=r"draws=True"):
        by.predict(model, X, tolerance=0.1, draws=True)
