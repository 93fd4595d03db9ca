"""Adaptive sampling: its error rate by simulation, what a row gets against as many fixed draws, when it stops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify as by
from bayesify.methods.distributions import entropy
from bayesify.methods.draw_design import Blocks
from bayesify.prediction.adaptive import Adaptive, predict_adaptively
from bayesify.prediction.likelihood import Likelihood
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression

COPIES, TRUTH = 100, 20_000


class Simulated:
    """A plan whose outputs (S, B, …) are known; a row's input is its number."""

    drawn, row_dim = SimpleNamespace(batch_dim=0), 0

    def __init__(self, known: Tensor, blocks: Blocks) -> None:
        self.known, self.blocks = known, blocks

    def outputs(self, batch: Tensor, draws: range) -> Iterator[Tensor]:
        yield self.known[draws.start : draws.stop, batch]


def simulated(outputs: Tensor, rule: Adaptive, likelihood: Likelihood, blocks: Blocks | None = None) -> Prediction:
    """Adaptive sampling of rows whose outputs are known."""
    rows: Any = torch.arange(outputs.shape[1])
    plan: Any = Simulated(outputs, blocks or Blocks())
    return predict_adaptively(plan, rows, likelihood, rule, rule.stopping_points(plan.blocks.length))


def noisy(centres: Tensor, deviation: float, draws: int, copies: int, design: str = "independent") -> Tensor:
    """Draws (S, B × copies, …) around the centres (K, B, …) of components that take turns."""
    turns = centres[torch.arange(draws) % len(centres)].repeat_interleave(copies, 1)
    noise = torch.randn_like(turns)
    if design == "balanced":  # closed chains of differences over five draws of a component
        z = noise.unflatten(0, (-1, 5, len(centres)))
        noise = ((z - z.roll(1, 1)) / math.sqrt(2)).flatten(0, 2)
    return turns + deviation * noise


def mean_of_many(centres: Tensor, deviation: float) -> Tensor:
    """Probabilities as infinitely many draws would give them, a row for each copy."""
    means = [noisy(centres, deviation, 1000, 1).softmax(-1).mean(0) for _ in range(TRUTH // 1000)]
    return torch.stack(means).mean(0).repeat_interleave(COPIES, 0)


# The stated error rate.


@pytest.mark.parametrize("components", [1, 4])
@pytest.mark.parametrize("design", ["balanced", "independent"])
@pytest.mark.parametrize("deviation, tolerance", [(0.3, 0.02), (1.0, 0.05), (2.0, 0.1), (4.0, 0.1)])
def test_inputs_are_settled_wrongly_no_more_often_than_stated(
    components: int, deviation: float, tolerance: float, design: str
) -> None:
    """Inputs from ties to certain ones; the further from 0 a logit, the more skewed are the draws' probabilities."""
    rule = Adaptive(max=200, tolerance=tolerance, error=0.05)
    means = torch.linspace(0, 8, 30).unsqueeze(1) * torch.eye(3)[0] + 0.3 * torch.randn(30, 3)
    centres = means + (components > 1) * torch.randn(components, 30, 3)
    truth = mean_of_many(centres, deviation)
    blocks = Blocks(components * (5 if design == "balanced" else 1), components)
    p = simulated(noisy(centres, deviation, rule.max, COPIES, design), rule, by.Categorical(), blocks)
    assert isinstance(p, Classification)
    early, chosen = p.draws_used < rule.max, truth.gather(1, p.label.unsqueeze(1)).squeeze(1)
    wrong = early & ((truth.max(1).values - chosen > tolerance) | ((p.confidence - chosen).abs() > tolerance))
    entropy_wrong = early & ((p.entropy - entropy(truth.log())).abs() > tolerance * math.log(3))
    assert early.float().mean() > 0.1
    assert wrong.view(30, COPIES).float().mean(1).max() <= rule.error  # for every kind of input
    assert (wrong | entropy_wrong).float().mean() <= rule.error  # over all of them


def test_without_a_test_far_more_would_be_wrong() -> None:
    """The same inputs after the first look alone: the simulation can tell."""
    rule = Adaptive(tolerance=0.05)
    centres = torch.zeros(1, 30, 2)
    p = by.Categorical().predictive(noisy(centres, 1.0, rule.first, COPIES))
    assert isinstance(p, Classification)
    assert ((p.probs[:, 0] - 0.5).abs() > rule.tolerance).float().mean() > 4 * rule.error


@pytest.mark.parametrize("design", ["balanced", "independent"])
def test_real_targets_are_settled_wrongly_no_more_often_than_stated(design: str) -> None:
    rule = Adaptive(max=400, tolerance=0.1, error=0.05)
    means, stds = torch.linspace(-3, 3, 30), torch.linspace(0.05, 1, 30).repeat_interleave(COPIES)
    noise = noisy(torch.zeros(1, 30), 1.0, 400, COPIES, design)
    outputs = means.repeat_interleave(COPIES) + stds * noise
    p = simulated(outputs.unsqueeze(-1), rule, by.Gaussian(1.0), Blocks(5 if design == "balanced" else 1))
    assert isinstance(p, Regression)
    std = (stds.square() + 1).sqrt()
    wrong = (p.mean.squeeze(1) - means.repeat_interleave(COPIES)).abs() > rule.tolerance * std
    wrong |= (p.std.squeeze(1) - std).abs() > rule.tolerance * std
    early = p.draws_used < 400
    assert early.float().mean() > 0.5 and (early & wrong).float().mean() <= rule.error
    assert p.draws_used[:COPIES].float().mean() < p.draws_used[-COPIES:].float().mean() / 2


def test_balanced_draws_are_fewer() -> None:
    """The same inputs, rule and posterior: blocks know that the noise cancels."""
    rule, centres = Adaptive(max=400, tolerance=0.03), torch.randn(4, 30, 3)
    used = {}
    for design, turns in (("balanced", 5), ("independent", 1)):
        outputs = noisy(centres, 0.5, rule.max, 20, design)
        used[design] = simulated(outputs, rule, by.Categorical(), Blocks(4 * turns, 4)).draws_used.float().mean()
    assert used["balanced"] < 0.7 * used["independent"]


# A row's result is that of as many fixed draws.


def mlp(method: Any = None, outputs: int = 3) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))
    return by.convert(net, by.Rank1(4, dropout_rate=0.1) if method is None else method)


def assert_as_fixed(model: nn.Module, x: Tensor, p: Prediction, **options: Any) -> None:
    assert len(p.draws_used.unique()) > 1
    for count in p.draws_used.unique().tolist():
        rows = p.draws_used == count
        fixed = by.predict(model, x, samples=count, draws=False, **options)
        assert fixed.samples == count and (fixed.draws_used == count).all()
        for field in fields(p):
            if isinstance(found := getattr(p, field.name), Tensor):
                assert torch.allclose(found[rows], getattr(fixed, field.name)[rows], atol=1e-5), field.name
        if isinstance(p, (Classification, BinaryPrediction)):
            assert torch.allclose(p.disagreement[rows], fixed.disagreement[rows])


@pytest.mark.parametrize("likelihood, outputs", [(by.Categorical(), 3), (by.Bernoulli(), 2), (by.Gaussian("input"), 2)])
def test_each_row_has_what_as_many_fixed_draws_say(likelihood: Likelihood, outputs: int) -> None:
    model, x = mlp(outputs=outputs), torch.linspace(0.1, 4, 40).unsqueeze(1) * torch.randn(40, 4)
    p = by.predict(model, x, by.Adaptive(max=60, tolerance=0.04), likelihood=likelihood)
    assert p.samples == p.draws_used.max() <= 60 and p.draws is None
    assert_as_fixed(model, x, p, likelihood=likelihood)


def test_rows_before_a_bayesian_head_have_what_as_many_fixed_draws_say() -> None:
    """All draws up to a look are vectorized there, and rows that are settled leave."""
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model = by.convert(net, {"4": by.Rank1(4, dropout_rate=0.1), "*": None})
    x = torch.linspace(0.1, 60, 60).unsqueeze(1) * torch.randn(60, 4)
    calls: list[int] = []
    model[0].register_forward_hook(lambda layer, given, out: calls.append(len(out)))
    p = by.predict(model, x, by.Adaptive(max=100, tolerance=0.03))
    looks = len(p.draws_used.unique())
    assert calls[0] == 60 and calls == sorted(calls, reverse=True) and looks <= len(calls) <= 6
    assert_as_fixed(model, x, p)


def test_rows_in_another_dimension_and_in_dicts() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 8), nn.Linear(8, 2)

        def forward(self, words: Tensor, scale: Tensor) -> Tensor:
            found: Tensor = self.head(scale.unsqueeze(-1) * self.rnn(words)[0])
            return found

    model = by.convert(Tagger(), by.Rank1(2, dropout_rate=0.1), batch_dim=1)
    x = {"words": torch.randn(5, 30, 3), "scale": torch.linspace(0.01, 10, 30)}
    p = by.predict(model, x, by.Adaptive(max=80, tolerance=0.05))
    assert p.probs.shape == (5, 30, 2) and p.draws_used.shape == (30,) and len(p.draws_used.unique()) > 1
    for count in p.draws_used.unique().tolist():
        rows = p.draws_used == count
        assert torch.allclose(p.probs[:, rows], by.predict(model, x, count).probs[:, rows], atol=1e-5)


def test_a_loader_gives_what_one_batch_gives() -> None:
    model, x = mlp(), 2 * torch.randn(50, 4)
    rule = by.Adaptive(max=60, tolerance=0.05)
    whole, loader = by.predict(model, x, rule), DataLoader(TensorDataset(x, torch.zeros(50)), batch_size=16)
    for p in (by.predict(model, loader, rule), by.predict(model, x, rule, batch_size=7)):
        assert torch.equal(p.draws_used, whole.draws_used) and torch.allclose(p.probs, whole.probs, atol=1e-5)
        assert p.samples == whole.samples


# When it stops.


def test_settled_rows_are_not_drawn_again() -> None:
    model, x = mlp(), torch.cat([torch.zeros(20, 4), 5 * torch.randn(20, 4)])
    seen: list[int] = []

    def call(network: nn.Module, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        found: Tensor = network(batch)
        return found

    p = by.predict(model, x, by.Adaptive(max=64, tolerance=0.03), call=call)
    assert sum(seen) == p.draws_used.sum() and len(seen) == p.samples
    assert p.draws_used[:20].float().mean() < p.draws_used[20:].float().mean()


def test_a_lesser_tolerance_or_error_takes_more_draws() -> None:
    model, x = mlp(), 2 * torch.randn(50, 4)
    usual = by.predict(model, x, by.Adaptive(tolerance=0.05)).draws_used.sum()
    assert by.predict(model, x, by.Adaptive(tolerance=0.02)).draws_used.sum() > usual
    assert by.predict(model, x, by.Adaptive(tolerance=0.05, error=1e-4)).draws_used.sum() > usual


def test_looks_are_after_complete_blocks() -> None:
    assert Adaptive(max=200).stopping_points(1) == (16, 24, 36, 54, 81, 122, 183, 200)
    assert Adaptive(max=200).stopping_points(20) == (20, 40, 60, 100, 160, 200)
    assert Adaptive(max=58).stopping_points(12) == (12, 24, 36, 48) and Adaptive(max=12).stopping_points(12) == (12,)
    assert Adaptive(max=12).stopping_points(20) == (12,)
    model, x = mlp({"0": by.Rank1(3, dropout_rate=0.1), "2": by.IBNN(4)}), 2 * torch.randn(50, 4)
    used = by.predict(model, x, by.Adaptive(max=250, tolerance=0.05)).draws_used
    assert (used % 60 == 0).all() and used.min() < 240


def test_batches_without_rows_have_none() -> None:
    found = by.predict(mlp(), [torch.randn(3, 4), torch.zeros(0, 4)], by.Adaptive())
    assert len(found.probs) == len(found.draws_used) == 3


def test_points_take_one_turn() -> None:
    """After it draws only repeat, however far apart the components are."""
    p = by.predict(mlp(by.BatchEnsemble(5, signs=0.5)), torch.randn(6, 4), by.Adaptive(tolerance=1e-6))
    assert p.draws_used.tolist() == [5] * 6 and p.disagreement.max() > 0


def test_outputs_that_are_not_numbers_are_never_settled() -> None:
    outputs = torch.zeros(40, 3, 2)
    outputs[5, 1] = math.nan
    assert simulated(outputs, Adaptive(max=40), by.Categorical()).draws_used.tolist() == [16, 40, 16]


# Bad options.


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max": 0}, "max=0.*>= 1"),
        ({"max": 2.5}, "max=2.5.*integer"),
        ({"first": 1}, "first=1.*>= 2"),
        ({"tolerance": 0}, "tolerance=0.*> 0"),
        ({"tolerance": math.nan}, "tolerance=nan.*> 0"),
        ({"error": 1}, "error=1.*between 0 and 1"),
        ({"error": 0.0}, "error=0.0.*between 0 and 1"),
    ],
)
def test_bad_options_say_what_is_expected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(by.BayesifyError, match=words):
        by.Adaptive(**options)


def test_bad_uses_say_what_to_do() -> None:
    with pytest.raises(by.BayesifyError, match=r"max=3.*use max=4"):
        by.predict(mlp(), torch.randn(2, 4), by.Adaptive(max=3))
    with pytest.raises(by.BayesifyError, match=r"draws=True.*be kept"):
        by.predict(mlp(), torch.randn(2, 4), by.Adaptive(), draws=True)
    with pytest.raises(by.BayesifyError, match=r"6 rows.*for 2.*fixed number"):
        by.predict(mlp(), torch.randn(2, 3, 4), by.Adaptive(), call=lambda network, x: network(x).flatten(0, 1))
    with pytest.raises(by.BayesifyError, match=r"no Bayesian layer: use by\.convert"):
        by.predict(nn.Linear(4, 3), torch.randn(2, 4), by.Adaptive())
