"""Prediction: what many draws say together, against brute force, scipy, and draws as networks of their own."""

from __future__ import annotations

import copy
import math
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import bayesify as by
from bayesify.methods.base import Method
from bayesify.methods.distributions import entropy
from bayesify.prediction.results import Classification


@pytest.fixture
def classifier() -> nn.Module:
    return by.convert(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), by.Rank1(4, dropout_rate=0.3))


def test_classification_quantities_equal_brute_force(classifier: nn.Module) -> None:
    x = torch.randn(9, 4)
    p = by.predict(classifier, x, samples=12, draws=True)
    each = p.draws.softmax(-1)  # (S, B, C)
    mean = each.mean(0)
    total = stats.entropy(mean.numpy(), axis=-1)
    aleatoric = stats.entropy(each.numpy(), axis=-1).mean(0)
    assert p.draws.shape == (12, 9, 3) and p.samples == 12
    assert torch.allclose(p.probs, mean, atol=1e-6)
    assert torch.equal(p.label, mean.argmax(-1)) and torch.allclose(p.confidence, mean.max(-1).values, atol=1e-6)
    assert torch.allclose(p.entropy, torch.tensor(total), atol=1e-5)
    assert torch.allclose(p.aleatoric, torch.tensor(aleatoric), atol=1e-5)
    assert torch.allclose(p.epistemic, torch.tensor(total - aleatoric).clamp_min(0), atol=1e-5)
    labels = each.argmax(-1)
    pairs = [(labels[i] != labels[j]).float() for i in range(12) for j in range(12) if i != j]
    assert torch.allclose(p.disagreement, torch.stack(pairs).mean(0), atol=1e-6)
    assert p.disagreement.max() > 0
    assert torch.equal(p.votes.long(), F.one_hot(labels, 3).sum(0))
    assert torch.allclose(p.variance, each.var(0, correction=0).mean(-1), rtol=1e-4, atol=1e-9)
    assert by.predict(classifier, x, samples=12).draws is None


def test_the_variance_of_probabilities_is_that_of_all_draws_whatever_the_batches(classifier: nn.Module) -> None:
    x = torch.randn(9, 4)
    expected = torch.stack([by.draw(classifier, 0, index=i)(x).double().softmax(-1) for i in range(10)])
    for batch_size in (None, 4, 1):
        p = by.predict(classifier, x, samples=10, batch_size=batch_size)
        assert torch.allclose(p.variance.double(), expected.var(0, correction=0).mean(-1), rtol=1e-4, atol=1e-9)
    maps = by.Categorical(class_dim=1).predictive(torch.randn(4, 2, 5, 6, 6))
    assert isinstance(maps, Classification) and maps.variance.shape == (2, 6, 6)


def test_a_small_variance_of_probabilities_survives_a_thousand_draws() -> None:
    """E[p²] - E[p]² in float32 would be lost in rounding, about 1e-8, here."""
    outputs = torch.tensor([1.0, 0.0, -1.0]) + 1e-4 * torch.randn(1000, 5, 3)
    p = by.Categorical().predictive(outputs)
    expected = outputs.double().softmax(-1).var(0, correction=0).mean(-1)
    assert isinstance(p, Classification)
    assert expected.max() < 2e-9 and torch.allclose(p.variance.double(), expected, rtol=0.01)
    alike = by.Categorical().predictive(outputs[:1].expand(7, 5, 3))
    assert isinstance(alike, Classification) and not alike.variance.any() and not alike.disagreement.any()


def test_votes_of_very_many_draws_do_not_overflow() -> None:
    accumulator = by.Categorical().accumulator(keep=False)
    by.Categorical().add(accumulator, torch.tensor([[[0.0, 1.0]]]))
    accumulator.count, accumulator.votes = 2**15, 2**15 * accumulator.votes
    assert accumulator.result().votes.tolist() == [[0, 2**15]] and not accumulator.result().disagreement.any()


def test_certain_and_impossible_classes_are_finite() -> None:
    outputs = torch.tensor([[[1e4, 0.0, -1e4]], [[1e4, 0.0, -1e4]]])
    p = by.Categorical().predictive(outputs)
    assert p.entropy == 0 and p.epistemic == 0 and torch.isfinite(p.aleatoric).all()
    assert entropy(torch.tensor([-math.inf, 0.0])) == 0


def test_log_probabilities_survive_underflow() -> None:
    """The log of a mean of exponentials in float32 would be -inf here."""
    p = by.Categorical().predictive(torch.tensor([[[0.0, -300.0]], [[0.0, -302.0]]]))
    expected = -300 + math.log((1 + math.exp(-2)) / 2)
    assert p.log_probs[0, 1].item() == pytest.approx(expected, rel=1e-5)


def test_segmentation_maps_have_classes_in_the_second_dimension() -> None:
    model = by.convert(nn.Conv2d(3, 5, 1), by.IBNN(4))
    p = by.predict(model, torch.randn(2, 3, 6, 6), likelihood=by.Categorical(class_dim=1))
    assert p.probs.shape == (2, 6, 6, 5) and p.label.shape == p.epistemic.shape == (2, 6, 6)
    assert torch.allclose(p.probs.sum(-1), torch.ones(2, 6, 6), atol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (7, 4)])
def test_binary_quantities_equal_brute_force(shape: tuple[int, ...]) -> None:
    outputs = 2 * torch.randn(10, *shape)
    p = by.Bernoulli().predictive(outputs)
    each = outputs.sigmoid()
    mean = each.mean(0)
    assert torch.allclose(p.probs, mean, atol=1e-6)
    assert torch.equal(p.label, (mean >= 0.5).long())
    assert torch.allclose(p.confidence, torch.maximum(mean, 1 - mean), atol=1e-6)
    two = torch.stack([mean, 1 - mean], -1)
    assert torch.allclose(p.entropy, torch.tensor(stats.entropy(two.numpy(), axis=-1)), atol=1e-5)
    aleatoric = stats.entropy(torch.stack([each, 1 - each], -1).numpy(), axis=-1).mean(0)
    assert torch.allclose(p.aleatoric, torch.tensor(aleatoric), atol=1e-5)
    yes = (outputs >= 0).float().mean(0)
    assert torch.allclose(p.disagreement, 2 * yes * (1 - yes) * 10 / 9, atol=1e-5)


def test_log_densities_equal_scipy() -> None:
    logits, labels = torch.randn(6, 4), torch.randint(4, (6,))
    assert torch.allclose(by.Categorical().log_prob(logits, labels), -F.cross_entropy(logits, labels, reduction="none"))
    yes = torch.randint(2, (6, 3)).float()
    expected = -F.binary_cross_entropy_with_logits(logits[:, :3], yes, reduction="none").sum(1)
    assert torch.allclose(by.Bernoulli().log_prob(logits[:, :3], yes), expected, atol=1e-6)
    target, std = torch.randn(6, 2), (-0.5 * logits[:, 2:]).exp()
    found = by.Gaussian("input").log_prob(logits, target)
    expected = stats.norm.logpdf(target.numpy(), logits[:, :2].numpy(), std.numpy()).sum(1)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float32), atol=1e-5)
    assert by.Gaussian(0.1).log_prob(torch.zeros(1, 1), torch.ones(1, 1)).item() == pytest.approx(
        stats.norm.logpdf(1, 0, math.sqrt(10)), rel=1e-5
    )


def test_regression_is_the_mixture_of_the_draws() -> None:
    model = by.convert(nn.Linear(3, 2), by.MeanField(init_log_std=(-1.0, -1.0)))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    p = by.predict(model, x, samples=40, likelihood=by.Gaussian(4.0))
    means = torch.stack([by.draw(model, 0, index=i)(x) for i in range(40)]).double()
    assert torch.allclose(p.mean.double(), means.mean(0), atol=1e-5)
    assert torch.allclose(p.epistemic_std.double(), means.std(0, correction=0), atol=1e-5)
    assert torch.allclose(p.aleatoric_std, torch.full((5, 2), 0.5))
    assert torch.allclose(p.std.double(), (means.var(0, correction=0) + 0.25).sqrt(), atol=1e-5)
    each = torch.tensor(stats.norm.logpdf(y.numpy(), means.detach().numpy(), 0.5)).sum(-1)
    assert torch.allclose(p.log_prob(y).double(), each.logsumexp(0) - math.log(40), atol=1e-4)
    low, high = p.interval(0.8)
    for bound, q in ((low, 0.1), (high, 0.9)):
        below = stats.norm.cdf(bound.numpy(), means.detach().numpy(), 0.5).mean(0)
        assert torch.allclose(torch.tensor(below), torch.tensor(q, dtype=torch.float64), atol=1e-4)


def test_regression_without_draws_is_the_gaussian_of_the_same_moments() -> None:
    model = by.convert(nn.Linear(3, 1), by.MeanField(init_log_std=(-1.0, -1.0)))
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    p = by.predict(model, x, samples=30, likelihood=by.Gaussian(2.0), draws=False)
    assert p.draws is None
    expected = stats.norm(p.mean.numpy(), p.std.numpy())
    assert torch.allclose(p.log_prob(y), torch.tensor(expected.logpdf(y.numpy())).sum(-1).float(), atol=1e-5)
    assert torch.allclose(p.interval(0.9)[1], torch.tensor(expected.ppf(0.95)).float(), atol=1e-4)


def test_precision_can_be_learned_or_depend_on_the_input() -> None:
    residual = 0.3 * torch.randn(500, 1)
    likelihood = by.Gaussian("learned")
    optimizer = torch.optim.Adam(likelihood.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        (-likelihood.log_prob(torch.zeros(500, 1), residual).mean()).backward()
        optimizer.step()
    assert likelihood.log_precision.exp().item() == pytest.approx(1 / residual.square().mean().item(), rel=0.05)
    model = by.convert(nn.Linear(2, 4), by.Rank1(2))
    p = by.predict(model, torch.randn(3, 2), likelihood=by.Gaussian("input"))
    assert p.mean.shape == p.aleatoric_std.shape == (3, 2) and p.aleatoric_std.std() > 0


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("precision", ["learned", "input", 3.0])
def test_noise_is_set_to_the_most_probable_of_held_out_rows(precision: Any, keep: bool) -> None:
    torch.manual_seed(0)
    outputs, y = torch.randn(6, 40, 4 if precision == "input" else 2), 2 * torch.randn(40, 2)
    likelihood = by.Gaussian(precision)
    p = likelihood.predictive(outputs, keep=keep)
    likelihood.calibrate(p, y)
    factor = math.exp(-0.5 * (float(likelihood.log_precision.detach()) - (math.log(3) if precision == 3.0 else 0)))

    def loss(log_factor: float) -> float:  # scipy's density of the mixture, or of the Gaussian with its moments
        means = outputs[..., :2].double().numpy()
        stds = np.exp(-0.5 * outputs[..., 2:].double().numpy()) if precision == "input" else np.ones_like(means)
        stds = stds * math.exp(log_factor) / (math.sqrt(3) if precision == 3.0 else 1)
        if not keep:
            return -float(stats.norm.logpdf(y, means.mean(0), np.sqrt(means.var(0) + (stds**2).mean(0))).sum())
        return -float(special.logsumexp(stats.norm.logpdf(y, means, stds).sum(-1), 0).sum())

    best = math.exp(optimize.minimize_scalar(loss, bounds=(-5, 5), method="bounded").x)
    assert factor == pytest.approx(best * math.sqrt(80 / 78), rel=2e-3)
    after = likelihood.predictive(outputs, keep=keep)
    torch.testing.assert_close(after.aleatoric_std, factor * p.aleatoric_std, rtol=1e-4, atol=0)


def test_the_temperature_is_the_most_probable_of_held_out_rows() -> None:
    torch.manual_seed(0)
    draws, y = 3 * torch.randn(5, 200, 4), torch.randint(4, (200,))
    likelihood = by.Categorical(temperature=0.5)
    likelihood.calibrate(likelihood.predictive(draws, keep=True), y)

    def loss(log_temperature: float) -> float:  # of the mean over draws, and the prior of the temperature's change
        log_probs = special.log_softmax(draws.double().numpy() / math.exp(log_temperature), -1)
        mixture = special.logsumexp(log_probs, 0) - math.log(5)
        return -float(mixture[np.arange(200), y].sum()) + (log_temperature - math.log(0.5)) ** 2 / 2

    best = optimize.minimize_scalar(loss, bounds=(-5, 5), method="bounded").x
    assert math.log(likelihood.temperature) == pytest.approx(best, abs=1e-3)


def test_few_rows_that_are_all_right_keep_the_temperature_finite() -> None:
    likelihood, logits = by.Categorical(), torch.tensor([[[2.0, 0.0]] * 5])
    likelihood.calibrate(likelihood.predictive(logits, keep=True), torch.zeros(5).long())
    assert 0.3 < likelihood.temperature < 1


def test_predictions_that_can_not_set_a_temperature_are_refused() -> None:
    likelihood, logits = by.Categorical(), torch.zeros(2, 3, 4)
    with pytest.raises(by.BayesifyError, match=r"no draws; use by.predict\(…, draws=True\)"):
        likelihood.calibrate(likelihood.predictive(logits), torch.zeros(3).long())
    with pytest.raises(by.BayesifyError, match=r"\(2,\) labels for predictions of \(3,\)"):
        likelihood.calibrate(likelihood.predictive(logits, keep=True), torch.zeros(2).long())


def test_intervals_hold_on_average_however_few_rows_set_the_noise() -> None:
    """For Gaussian residuals with an unknown variance; without n / (n - 2), 10 rows hold 86.9%: P(|t₁₀| < 1.645)."""
    for rows in (10, 40):
        held = []
        for seed in range(300):
            y = torch.randn(rows, 1, generator=torch.Generator().manual_seed(seed))
            likelihood = by.Gaussian(25.0)
            likelihood.calibrate(likelihood.predictive(torch.zeros(1, rows, 1), keep=True), y)
            _, high = likelihood.predictive(torch.zeros(1, 1, 1), keep=True).interval(0.9)
            held.append(2 * stats.norm.cdf(float(high)) - 1)
        assert 0.89 < np.mean(held) < 0.915


def test_held_out_rows_that_tell_nothing_of_the_noise_are_refused() -> None:
    likelihood = by.Gaussian()
    with pytest.raises(by.BayesifyError, match="calibrate: 2 targets; expected at least 3"):
        likelihood.calibrate(likelihood.predictive(torch.zeros(1, 2, 1)), torch.ones(2, 1))
    with pytest.raises(by.BayesifyError, match="each of them finite"):
        likelihood.calibrate(likelihood.predictive(torch.zeros(1, 3, 1)), torch.tensor([[0.0], [1.0], [math.nan]]))
    with pytest.raises(by.BayesifyError, match="targets have shape"):
        likelihood.calibrate(likelihood.predictive(torch.zeros(1, 3, 1)), torch.ones(3))


def test_loaders_and_batches_as_users_have_them(classifier: nn.Module) -> None:
    x, y = torch.randn(10, 4), torch.zeros(10)
    expected = by.predict(classifier, x, samples=4).log_probs
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    assert torch.allclose(by.predict(classifier, loader, samples=4).log_probs, expected, atol=1e-6)
    assert torch.allclose(by.predict(classifier, iter([x[:4], x[4:]]), samples=4).log_probs, expected, atol=1e-6)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier

        def forward(self, values: Tensor, scale: Tensor) -> tuple[Tensor, str]:
            return self.inner(values * scale), "more"

    batch = {"values": x, "scale": torch.ones(10, 1)}
    assert torch.allclose(by.predict(Named(), batch, samples=4).log_probs, expected, atol=1e-6)
    double = by.predict(classifier, x, samples=4, call=lambda net, batch: 2 * net(batch), draws=True)
    assert torch.allclose(double.draws, 2 * by.predict(classifier, x, samples=4, draws=True).draws, atol=1e-6)


@pytest.mark.parametrize("method", [by.Rank1(2), by.MeanField(), by.LowRankEnsemble(2)], ids=str)
def test_drawn_weights_keep_the_memory_format_of_the_network(method: Method) -> None:
    seen: list[bool] = []

    class Seen(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    network = by.convert(nn.Sequential(Seen(3, 4, 3), nn.ReLU(), Seen(4, 4, 3)), {Seen: method})
    x = torch.randn(8, 3, 7, 7)
    expected = by.predict(network, x, samples=4, likelihood=by.Bernoulli()).probs
    assert not any(seen)
    seen.clear()
    network.to(memory_format=torch.channels_last)
    found = by.predict(network, x, samples=4, likelihood=by.Bernoulli()).probs
    assert seen and all(seen)
    assert torch.allclose(found, expected, atol=1e-6)


def test_the_number_of_draws_fits_the_components() -> None:
    x = torch.randn(2, 4)
    assert by.predict(by.convert(nn.Linear(4, 3), by.LowRankEnsemble(7)), x).samples == 7
    assert by.predict(by.convert(nn.Linear(4, 3), by.Rank1(8)), x).samples == 24
    assert by.predict(by.convert(nn.Linear(4, 3), by.MeanField()), x).samples == 20


def test_draws_are_stratified_over_components() -> None:
    model = by.convert(nn.Linear(4, 3), by.BatchEnsemble(3))
    x = torch.randn(2, 4)
    members = torch.stack([member(x) for member in by.members(model)])
    draws = by.predict(model, x, samples=6, draws=True).draws
    assert torch.allclose(draws, members.repeat(2, 1, 1), atol=1e-6)


def test_draws_of_a_seed_differ_and_repeat(classifier: nn.Module) -> None:
    weights = [by.draw(classifier, 0, index=i)[0].weight for i in range(4)]
    assert len({tuple(w.flatten().tolist()) for w in weights}) == 4
    assert torch.equal(by.draw(classifier, 0, index=2)[0].weight, weights[2])
    assert not torch.equal(by.draw(classifier, 1, index=2)[0].weight, weights[2])
    big = by.draw(classifier, 2**40 + 1)[0].weight  # a CPU generator uses 32 bits; the seed's hash uses all
    assert not torch.equal(big, by.draw(classifier, 1)[0].weight)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_frozen_draw_keeps_the_parameters_of_a_scripted_part_apart() -> None:
    part = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model = by.convert(nn.Sequential(torch.jit.script(part), nn.Linear(8, 3)), {"1": by.BatchEnsemble(2)})
    x, drawn = torch.randn(9, 8), by.draw(model, 0)
    assert torch.allclose(drawn(x), drawn[1](part(x)), atol=1e-6)
    assert all(torch.equal(p, q) for p, q in zip(drawn[0].parameters(), part.parameters(), strict=True))


def test_a_frozen_draw_is_differentiable_in_its_input(classifier: nn.Module) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    by.draw(classifier, 0)(x).sum().backward()
    assert x.grad is not None and not by.draw(classifier, 0)[0].weight.requires_grad


# Draws vectorized, and one by one


class Head(nn.Module):
    """A body and a head, with something awkward behind them."""

    def __init__(self, awkward: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.awkward = nn.Linear(8, 64), nn.Linear(64, 3), awkward

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.body(x))
        return self.awkward(h, self.head(h))


def _adds_in_place(h: Tensor, y: Tensor) -> Tensor:
    y += h[:, :3]
    return y


def _writes_into_the_body(h: Tensor, y: Tensor) -> Tensor:
    h[:, :3] += y
    return h[:, :3] * 1


def _changes_the_body_later(h: Tensor, y: Tensor) -> Tensor:
    z = y + h[:, :3]
    h.mul_(3)
    return z


AWKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing": lambda h, y: y,
    "adds in place": _adds_in_place,
    "writes into the body": _writes_into_the_body,
    "changes the body later": _changes_the_body_later,
    "branches": lambda h, y: y if y.mean() > 0 else y * 2,
    "leaves torch": lambda h, y: torch.from_numpy(y.detach().numpy() + 1),
    "leaves torch for some rows": lambda h, y: y * 3 if len(y) > 2 and y.tolist()[0][0] > 0 else y,
    "mixes rows": lambda h, y: y - y.mean(0),
    "mixes rows that are large": lambda h, y: y / y.abs().amax().clamp_min(1.0),
    "asks for a random number": lambda h, y: y * (torch.rand(()) > -1),
}


def assert_as_drawn(model: nn.Module, x: Tensor, draws: int = 5) -> None:
    """A prediction has the outputs of the draws as networks of their own."""
    found = by.predict(model, x, samples=draws, seed=2, draws=True).draws
    loop = torch.stack([by.draw(model, 2, index=index)(x).detach().clone() for index in range(draws)])
    assert found is not None and torch.allclose(found, loop, atol=1e-5)
    assert not torch.allclose(loop[0], loop[1], atol=1e-5)


@pytest.mark.parametrize("awkward", AWKWARD)
@pytest.mark.parametrize("drawn", ["head", "*"])
def test_awkward_networks_are_drawn_as_they_are(drawn: str, awkward: str) -> None:
    torch.manual_seed(1)
    model = by.convert(Head(AWKWARD[awkward]), {drawn: by.MeanField(init_log_std=(-1.0, -1.0))})
    for rows in (2, 5, 3):
        assert_as_drawn(model, torch.randn(rows, 8))


class _Slope(nn.Sequential):
    """The gradient of a function that layers compute."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x)[0][:, :3]


class _Weights(nn.Sequential):
    """Its output is a drawn weight."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self[0].weight[: len(x)]


class _ReadsTheWeight(nn.Sequential):
    """Uses a layer's weight twice, once by a way that only finds parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ dict(self.named_parameters())["0.weight"].T


class _Reads(nn.Module):
    """Reads sequences (rows, time, numbers), or a single one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(6, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(self.first(x))[0])


class _TimeFirst(nn.Module):
    """Has its rows in the second dimension inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(6, 8), nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(self.first(x.transpose(0, 1)))[0]).transpose(0, 1)


class _Keeps(nn.Sequential):
    """Returns memory of its own, which its next call overwrites."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("output", torch.zeros(9, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.output[: len(x)].copy_(super().forward(x))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "a gradient": (lambda: _Slope(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), [(1, 6), (9, 6)]),
    "its weight": (lambda: _Weights(nn.Linear(6, 9)), [(2, 6), (9, 6)]),
    "its weight twice": (lambda: _ReadsTheWeight(nn.Linear(6, 6)), [(2, 6), (9, 6)]),
    "sequences": (_Reads, [(9, 5, 6), (5, 6), (2, 5, 6)]),
    "time first": (_TimeFirst, [(9, 1, 6), (9, 5, 6), (2, 5, 6)]),
    "memory of its own": (lambda: _Keeps(nn.Linear(6, 3)), [(9, 6), (2, 6)]),
}


@pytest.mark.parametrize("method", [by.Rank1(4, dropout_rate=0.2), by.BatchEnsemble(5, mean_std=0.5)], ids=str)
@pytest.mark.parametrize("network", NETWORKS)
def test_unusual_networks_are_drawn_as_they_are(network: str, method: Method) -> None:
    make, shapes = NETWORKS[network]
    model = by.convert(make(), {nn.Linear: method})
    for shape in shapes:
        assert_as_drawn(model, torch.randn(shape))


class _Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, training=True))


class _Skipping(nn.Linear):
    """Skips itself for some rows, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.rand(len(x), 1) >= 0.1)


@pytest.mark.parametrize("layer", [_Noisy, _Skipping])
@pytest.mark.parametrize("rows", [4, 50])
def test_a_network_that_is_random_itself_is_called_for_every_draw(layer: type[nn.Linear], rows: int) -> None:
    model = by.convert(nn.Sequential(layer(4, 8), nn.Linear(8, 3)), {"1": by.BatchEnsemble(2)})
    found = by.predict(model, torch.randn(rows, 4), samples=16, draws=True)
    assert found.draws is not None and len(found.draws[::2].unique(dim=0)) > 1


def test_an_output_of_adaptive_sampling_outlives_its_draw() -> None:
    model, x = by.convert(_Weights(nn.Linear(3, 5)), by.MeanField(init_log_std=(-1, 0))), torch.randn(5, 3)
    found = by.predict(model, x, samples=by.Adaptive(max=10, tolerance=1e-6))
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(10)])
    assert torch.allclose(found.probs, loop.softmax(-1).mean(0), atol=1e-6)


def test_what_torch_can_not_batch_runs_draw_by_draw_without_a_word() -> None:
    """Warnings are errors here; and those of others are theirs."""

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*(x.reshape(-1, 1, 2, 4),) * 3).flatten(1)

    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    before = list(warnings.filters)
    assert_as_drawn(by.convert(nn.Sequential(nn.Linear(4, 8), Attends()), by.MeanField()), torch.randn(2, 4))
    assert_as_drawn(by.convert(nn.Sequential(nn.Embedding(9, 8), encoder), by.MeanField()), torch.randint(9, (2, 5)))
    assert warnings.filters == before
    with pytest.warns(UserWarning, match="performance drop"):  # it is said to who calls torch.vmap himself
        torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q))(torch.randn(2, 1, 1, 2, 4))


class _Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x)


def test_threads_that_predict_at_once_leave_the_filters_of_warnings() -> None:
    """The second begins while the first runs, and ends after it."""
    model, x = by.convert(nn.Sequential(_Slow(4, 8), _Slow(8, 3)), {"1": by.Rank1(4)}), torch.randn(2, 4)
    before = list(warnings.filters)
    threads = [threading.Thread(target=by.predict, args=(model, x, 4)) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.03)
    for thread in threads:
        thread.join()
    assert warnings.filters == before


def _flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_the_deterministic_prefix_runs_once_per_batch() -> None:
    model = by.convert(Head(lambda h, y: y), {"head": by.Rank1(4)})
    x = torch.randn(32, 8)
    once = _flops(lambda: by.draw(model, 0)(x))
    head = 2 * 32 * 64 * 3
    assert _flops(lambda: by.predict(model, x, samples=50)) == once + 49 * head


def test_a_live_dropout_in_the_prefix_is_drawn_every_time() -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    model = by.convert(net, {"2": by.MeanField(init_log_std=(-30.0, -30.0))}, keep_dropout=True)
    draws = by.predict(model, torch.randn(4, 8), samples=6, draws=True).draws
    assert draws.std(0).min() > 1e-3


# Bad input


def test_a_wrong_number_of_samples_is_named(classifier: nn.Module) -> None:
    for samples in (0, -1, 2.5, True):
        with pytest.raises(by.BayesifyError, match=f"samples={samples!r}: expected an integer >= 1"):
            by.predict(classifier, torch.randn(2, 4), samples=samples)


def test_what_can_not_be_predicted_is_said(classifier: nn.Module) -> None:
    with pytest.raises(by.BayesifyError, match=r"no Bayesian layer: use by.convert"):
        by.predict(nn.Linear(4, 3), torch.randn(2, 4))
    with pytest.raises(by.BayesifyError, match="nothing to predict"):
        by.predict(classifier, torch.randn(0, 4))
    with pytest.raises(by.BayesifyError, match="nothing to predict"):
        by.predict(classifier, [])
    with pytest.raises(by.BayesifyError, match="expected a converted network, got list"):
        by.predict([classifier], torch.randn(2, 4))
    with pytest.raises(by.BayesifyError, match=r"failed on uint8 inputs of shape \(2, 4\).*scaled and normalised"):
        by.predict(classifier, torch.zeros(2, 4, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        by.predict(classifier, torch.randn(2, 7))
    with pytest.raises(by.BayesifyError, match=r"returned a str; expected a tensor.* Tell predict how .* call="):
        _predict_string(classifier)
    model = by.convert(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)), by.IBNN(2))
    with pytest.raises(by.BayesifyError, match="layer '1' is a batch norm without running statistics"):
        by.predict(model, torch.randn(2, 4))


def _predict_string(classifier: nn.Module) -> None:
    class Speaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier

        def forward(self, x: Tensor) -> str:
            return str(self.inner(x))

    by.predict(Speaks(), torch.randn(2, 4))


def test_wrong_shapes_and_options_of_likelihoods_are_named() -> None:
    with pytest.raises(by.BayesifyError, match=r"labels must have shape \(2,\); got \(3,\)"):
        by.Categorical().log_prob(torch.zeros(2, 4), torch.zeros(3).long())
    with pytest.raises(by.BayesifyError, match=r"outputs have shape \(2, 1\), labels \(2,\)"):
        by.Bernoulli().log_prob(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(by.BayesifyError, match="it must be even"):
        by.Gaussian("input").log_prob(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(by.BayesifyError, match=r"precision=0.*expected a number > 0"):
        by.Gaussian(0)
    with pytest.raises(by.BayesifyError, match=r"'guess'.*expected a number > 0, 'learned' or 'input'"):
        by.Gaussian("guess")
    p = by.Gaussian().predictive(torch.zeros(2, 3, 1))
    with pytest.raises(by.BayesifyError, match=r"interval\(95\): expected a probability"):
        p.interval(95)
    with pytest.raises(by.BayesifyError, match="targets have shape"):
        p.log_prob(torch.zeros(3))


@pytest.mark.parametrize("method", [by.Rank1(4), by.ECMP(3), by.MeanField(), by.Ensemble(2)], ids=str)
def test_few_rows_have_all_their_draws_in_one_call_of_the_network(method: Method) -> None:
    calls: list[int] = []
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    net[2].register_forward_hook(lambda module, args, output: calls.append(1))
    model, x = by.convert(net, method), torch.randn(2, 3, 4, 4)
    found = by.predict(model, x, samples=6, draws=True)
    assert len(calls) == 1
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(6)])
    assert found.draws is not None and torch.allclose(found.draws, loop, atol=1e-5)


def test_large_outputs_of_few_rows_are_counted_some_draws_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = by.convert(nn.Linear(4, 3), by.Rank1(4)), torch.randn(2, 4)
    together = by.predict(model, x, samples=7)
    monkeypatch.setattr("bayesify.prediction.plan.MAX_DRAWN_NUMBERS", 13)  # two draws of six numbers
    apart = by.predict(model, x, samples=7)
    assert torch.allclose(together.probs, apart.probs)
    assert torch.allclose(together.epistemic, apart.epistemic, atol=1e-6)
    assert together.samples == apart.samples == 7 and torch.equal(together.votes, apart.votes)


def test_a_prediction_inside_a_prediction_has_memory_of_its_own() -> None:
    inner, outer = (by.convert(nn.Linear(3, 3), by.MeanField(estimator="shared")) for _ in range(2))
    x = torch.randn(64, 3)

    def call(network: nn.Module, batch: Tensor) -> Tensor:
        return network(by.predict(inner, batch, samples=3).probs)

    found = by.predict(outer, x, samples=4, call=call)
    assert torch.allclose(found.probs, by.predict(outer, by.predict(inner, x, samples=3).probs, samples=4).probs)


@pytest.mark.parametrize("method", [by.LowRankEnsemble(3), by.Rank1(3)], ids=str)
def test_a_call_of_ones_own_finds_drawn_weights_wherever_it_looks(method: Method) -> None:
    model, x = by.convert(nn.Linear(4, 3, bias=False), method), torch.randn(50, 4)
    found = by.predict(model, x, samples=3, call=lambda net, batch: batch @ net.state_dict()["weight"].T, draws=True)
    assert torch.allclose(found.draws, by.predict(model, x, samples=3, draws=True).draws, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 10])
def test_no_draw_is_made_beyond_the_look_at_which_all_are_settled(rows: int) -> None:
    net, calls = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), []
    net[1].register_forward_hook(lambda module, args, output: calls.append(output.shape[:-1].numel()))
    model, x = by.convert(net, by.Rank1(4, dropout_rate=1e-9, mean_std=1e-6)), torch.randn(rows, 4)
    found = by.predict(model, x, samples=by.Adaptive())
    assert found.draws_used.tolist() == [20] * rows and calls == ([rows] if rows <= 4 else [rows] * 20)


@pytest.mark.parametrize("samples", [1, 4])
def test_layers_that_change_their_weight_change_none_of_the_models(samples: int) -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(min=0)
            return super().forward(x)

    model, x = by.convert(nn.Sequential(Clamped(4, 3)), {"0": by.EMP(3)}).eval(), torch.randn(5, 4)
    before = copy.deepcopy(model.state_dict())
    for seed in range(6):
        by.predict(model, x, samples=samples, seed=seed)
        with torch.no_grad():
            model(x)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_points_of_different_numbers_of_components_are_all_combined() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model, x = by.convert(net, {"0": by.BatchEnsemble(2), "1": by.BatchEnsemble(3)}), torch.randn(20, 4)
    six = by.predict(model, x, samples=6)
    for samples in (None, by.Adaptive()):
        found = by.predict(model, x, samples=samples)
        assert found.samples == 6 and torch.allclose(found.probs, six.probs, atol=1e-6)


def test_a_call_of_ones_own_is_made_for_every_draw() -> None:
    model, x, calls = by.convert(nn.Linear(4, 3), by.BatchEnsemble(2)), torch.randn(50, 4), []

    def call(network: nn.Module, batch: Tensor) -> Tensor:
        calls.append(1)
        return network(batch)

    by.predict(model, x, samples=8, call=call)
    assert len(calls) == 8


def test_adaptive_sampling_of_few_rows_goes_past_the_draws_that_are_made_at_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 239), nn.ReLU(), nn.Linear(239, 2))
    model = by.convert(net, by.MeanField(estimator="shared", init_log_std=(-3.0, -2.9)))
    by.predict(model, torch.randn(3, 100), samples=8)  # few rows, all draws in one call
    unclear = torch.randn(3, 100) * 3
    clear = torch.randn(12, 100) * torch.linspace(0.02, 0.5, 12).unsqueeze(1)
    found = by.predict(model, torch.cat([clear, unclear]), samples=by.Adaptive(max=200, tolerance=1e-4))
    assert int(found.draws_used.max()) == 200


def test_draws_that_a_call_keeps_are_its_own() -> None:
    model, x = by.convert(nn.Linear(3, 3), by.MeanField(estimator="shared")), torch.randn(64, 3)
    kept: list[Tensor] = []

    def call(network: nn.Module, batch: Tensor) -> Tensor:
        kept.append(network.weight.detach())
        return network(batch)

    by.predict(model, x, samples=3, call=call)
    by.predict(model, x, samples=3, seed=1)
    for index, weight in enumerate(kept):
        assert torch.equal(weight, by.draw(model, 0, index=index).weight)


def test_a_tuple_of_batches_is_not_taken_for_an_input_and_its_target() -> None:
    model, x = by.convert(nn.Linear(4, 3), by.Rank1(2)), torch.randn(10, 4)
    for parts in (x.split(4), x.split(6)):
        with pytest.raises(by.BayesifyError, match="give batches in a list"):
            by.predict(model, parts, samples=2)
    assert len(by.predict(model, list(x.split(4)), samples=2).probs) == 10
    assert len(by.predict(model, (x, torch.zeros(10)), samples=2).probs) == 10
