"""Prediction: what many draws say together, against brute force and scipy; what no draw touches, once."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import bayesify as by
from bayesify import memory
from bayesify.family import Family
from bayesify.prediction import Classification, entropy
from bayesify.sampler import Sampler
from bayesify.tally import ClassTally


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
    tally = ClassTally(keep=False)
    tally.add(torch.tensor([[[0.0, 1.0]]]))
    tally.count, tally.votes = 2**15, 2**15 * tally.votes
    assert tally.result().votes.tolist() == [[0, 2**15]] and not tally.result().disagreement.any()


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


def test_a_frozen_draw_is_differentiable_in_its_input(classifier: nn.Module) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    by.draw(classifier, 0)(x).sum().backward()
    assert x.grad is not None and not by.draw(classifier, 0)[0].weight.requires_grad


# What no draw touches is computed once


class Head(nn.Module):
    """A deterministic body and a Bayesian head, with something awkward between them."""

    def __init__(self, awkward: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.awkward = nn.Linear(8, 64), nn.Linear(64, 3), awkward

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.body(x))
        return self.awkward(h, self.head(h))


def _adds_in_place(h: Tensor, y: Tensor) -> Tensor:
    y += h[:, :3]
    return y


def _writes_into_the_prefix(h: Tensor, y: Tensor) -> Tensor:
    h[:, :3] += y
    return h[:, :3] * 1


def _changes_the_prefix_later(h: Tensor, y: Tensor) -> Tensor:
    z = y + h[:, :3]
    h.mul_(3)
    return z


def _branches(h: Tensor, y: Tensor) -> Tensor:
    return y if y.mean() > 0 else y * 2


def _leaves_torch(h: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(y.detach().numpy() + 1)


AWKWARD = [lambda h, y: y, _adds_in_place, _writes_into_the_prefix, _changes_the_prefix_later, _branches, _leaves_torch]


@pytest.mark.parametrize("awkward", AWKWARD)
def test_replayed_draws_equal_the_plain_loop(awkward: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    model = by.convert(Head(awkward), {"head": by.MeanField(init_log_std=(-1.0, -1.0))})
    for rows in (5, 3):
        x = torch.randn(rows, 8)
        found = by.predict(model, x, samples=6, draws=True).draws
        with torch.no_grad():
            expected = torch.stack([by.draw(model, 0, index=i)(x) for i in range(6)])
        assert torch.allclose(found, expected, atol=1e-5)


def _flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_the_deterministic_prefix_runs_once_per_batch() -> None:
    model = by.convert(Head(lambda h, y: y), {"head": by.Rank1(4)})
    x = torch.randn(32, 8)
    by.predict(model, x, samples=2)  # whether it can be replayed is found out once
    once = _flops(lambda: by.draw(model, 0)(x))
    head = 2 * 32 * 64 * 3
    assert _flops(lambda: by.predict(model, x, samples=50)) == once + 49 * head


def test_a_live_dropout_in_the_prefix_is_drawn_every_time() -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    model = by.convert(net, {"2": by.MeanField(init_log_std=(-30.0, -30.0))}, keep_dropout=True)
    draws = by.predict(model, torch.randn(4, 8), samples=6, draws=True).draws
    assert draws.std(0).min() > 1e-3


# Bad input


@pytest.mark.parametrize("samples", [0, -1, 2.5, True])
def test_a_wrong_number_of_samples_is_named(classifier: nn.Module, samples: object) -> None:
    with pytest.raises(by.BayesifyError, match=f"samples={samples!r}: expected a whole number >= 1"):
        by.predict(classifier, torch.randn(2, 4), samples=samples)


def test_what_can_not_be_predicted_is_said(classifier: nn.Module) -> None:
    with pytest.raises(by.BayesifyError, match=r"no Bayesian layer: use by.convert"):
        by.predict(nn.Linear(4, 3), torch.randn(2, 4))
    with pytest.raises(by.BayesifyError, match="nothing to predict"):
        by.predict(classifier, torch.randn(0, 4))
    with pytest.raises(by.BayesifyError, match="nothing to predict"):
        by.predict(classifier, [])
    with pytest.raises(
        by.BayesifyError, match=r"gave a str, where a tensor.* was expected; predict can be told how .* call="
    ):
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
    with pytest.raises(by.BayesifyError, match="expected a number, 'learned' or 'input'"):
        by.Gaussian("guess")
    p = by.Gaussian().predictive(torch.zeros(2, 3, 1))
    with pytest.raises(by.BayesifyError, match=r"interval\(95\): expected a probability"):
        p.interval(95)
    with pytest.raises(by.BayesifyError, match="targets have shape"):
        p.log_prob(torch.zeros(3))


@pytest.mark.parametrize("family", [by.Rank1(4), by.ECMP(3), by.MeanField(), by.Ensemble(2)], ids=str)
def test_few_rows_have_all_their_draws_in_one_call_of_the_network(family: Family) -> None:
    calls: list[int] = []
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    net[2].register_forward_hook(lambda module, args, output: calls.append(1))
    model, x = by.convert(net, family), torch.randn(2, 3, 4, 4)
    by.predict(model, x, samples=6)  # the first time it is compared with six calls
    calls.clear()
    found = by.predict(model, x, samples=6, draws=True)
    assert len(calls) == 1
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(6)])
    assert found.draws is not None and torch.allclose(found.draws, loop, atol=1e-5)


def test_large_outputs_of_few_rows_are_counted_some_draws_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = by.convert(nn.Linear(4, 3), by.Rank1(4)), torch.randn(2, 4)
    together = by.predict(model, x, samples=7)
    monkeypatch.setattr(sys.modules["bayesify.sampler"], "AT_A_TIME", 13)  # two draws of six numbers
    apart = by.predict(model, x, samples=7)
    assert torch.allclose(together.probs, apart.probs)
    assert torch.allclose(together.epistemic, apart.epistemic, atol=1e-6)
    assert together.samples == apart.samples == 7 and torch.equal(together.votes, apart.votes)


@pytest.mark.parametrize("awkward", [_branches, _leaves_torch, lambda h, y: y * (torch.rand(()) > 2)])
def test_what_does_not_run_at_once_is_called_for_each_draw(awkward: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return awkward(h, self.second(h))

    model, x = by.convert(Net(), by.Rank1(4)), torch.randn(2, 4)
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(4)])
    for _ in range(2):
        assert torch.allclose(by.predict(model, x, samples=4, draws=True).draws, loop, atol=1e-5)


class _ReadsItsWeight(nn.Module):
    """Its linear layer is called on the input, and read by another operation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x).relu(), self.inner.weight)


FACTOR_FAMILIES = [by.Rank1(4), by.IBNN(4), by.BatchEnsemble(4), by.MCDropout(0.3), by.Rank1(2, factors="input")]


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("family", FACTOR_FAMILIES, ids=str)
def test_factors_beside_a_weight_say_what_they_say_folded_into_it(family: Family, rows: int) -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), _ReadsItsWeight(), nn.Linear(6, 40, bias=False)).double()
    model, x = by.convert(net, {nn.Linear: family}).double(), torch.randn(rows, 5).double()
    folded = torch.stack([by.draw(model, 3, index=index)(x) for index in range(6)])
    found = by.predict(model, x, samples=6, seed=3, draws=True)
    assert found.draws is not None and torch.allclose(found.draws, folded, atol=1e-10)


def test_few_rows_of_a_wide_network_are_predicted_without_a_pass_over_its_weights() -> None:
    wide = 512
    net = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 3))
    model, x = by.convert(net, by.Rank1(4)), torch.randn(8, wide)
    by.predict(model, x, samples=2)

    class LargestMade(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            own = [out] if isinstance(out, Tensor) and not func.is_view else []
            self.numbers = max([self.numbers, *(tensor.numel() for tensor in own)])
            return out

    with LargestMade() as made:
        by.predict(model, x, samples=8)
    assert made.numbers < wide * wide


def test_draws_are_lent_to_the_copy_and_never_to_the_model() -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), by.EMP(2)), torch.randn(9, 4)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    first = by.predict(model, x, samples=4)
    assert all(before[name][0] == tensor.data_ptr() for name, tensor in model.state_dict().items())
    assert all(torch.equal(before[name][1], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(first.probs, by.predict(model, x, samples=4).probs)


def test_factors_of_linear_layers_share_one_matrix_product_for_all_draws() -> None:
    shapes: list[tuple[int, ...]] = []
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    net[1].register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    model, x = by.convert(net, by.BatchEnsemble(4)), torch.randn(20, 64)
    by.predict(model, x)  # the first time it is compared with four calls
    shapes.clear()
    found = by.predict(model, x, draws=True)
    assert len(shapes) == 1
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(4)])
    assert found.draws is not None and torch.allclose(found.draws, loop, atol=1e-5)
    shapes.clear()
    by.predict(model, torch.randn(2000, 64))
    assert len(shapes) == 4


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.threshold = -math.inf

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h if h.mean() > self.threshold else -h)


class _Centres(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y - y.mean(dim=tuple(range(y.dim() - 1)))


def test_draws_of_a_network_that_branches_are_never_copies_of_one_batch() -> None:
    """At first all draws take one way, then half of them another."""
    model, x = by.convert(_Branches(), by.BatchEnsemble(4, mean_std=1.0)), torch.randn(9, 4)
    networks = [by.draw(model, 0, index=index) for index in range(4)]
    means = torch.stack([network.first(x).mean() for network in networks])
    for threshold in (-math.inf, float(means.sort().values[1:3].mean())):
        for network in (model, *networks):
            network.threshold = threshold
        loop = torch.stack([network(x) for network in networks])
        assert torch.allclose(by.predict(model, x, samples=4, draws=True).draws, loop, atol=1e-5)


def test_draws_of_a_network_that_mixes_rows_are_never_copies_of_one_batch() -> None:
    """That all draws at once say the same was found out in the other way, for few rows of more dimensions."""
    model = by.convert(_Centres(nn.Linear(4, 4), nn.Linear(4, 3)), by.Rank1(4))
    for x in (torch.randn(2, 3, 4), torch.randn(9, 4)):
        loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(4)])
        for _ in range(2):
            assert torch.allclose(by.predict(model, x, samples=4, draws=True).draws, loop, atol=1e-5)


class _Bounds(nn.Sequential):
    """Divides all rows by the largest entry, where there is a large one."""

    def forward(self, x: Tensor) -> Tensor:
        h = self[0](x)
        y: Tensor = self[1](h / h.abs().amax().clamp_min(3.0))
        return y


def test_rows_that_mix_only_where_they_are_large_are_found_out_by_small_ones() -> None:
    model = by.convert(_Bounds(nn.Linear(4, 4), nn.Linear(4, 3)), by.BatchEnsemble(4, mean_std=1.0))
    for size in (0.1, 20.0):
        x = size * torch.randn(9, 4)
        loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(4)])
        assert torch.allclose(by.predict(model, x, samples=4, draws=True).draws, loop, atol=1e-4)


class _Slope(nn.Sequential):
    """The gradient of a function that layers compute."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x)[0][:, :3]


@pytest.mark.parametrize("family", [by.Rank1(4), by.IBNN(4), by.MCDropout(0.2)], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_networks_may_take_gradients_in_their_forward_pass(family: Family, rows: int) -> None:
    model = by.convert(_Slope(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), family)
    x = torch.randn(rows, 64)
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(5)])
    assert torch.allclose(by.predict(model, x, samples=5, draws=True).draws, loop, atol=1e-5)


class _Flattens(nn.Module):
    """Its view is one that channels last has not, unless images are as small as the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y.view(len(y), -1)[:, :5]


def _layouts(net: nn.Module) -> list[bool]:
    """Whether its convolution's weight has channels last, of each call to come."""
    seen: list[bool] = []

    def look(module: nn.Module, args: object, output: object) -> None:
        assert isinstance(module, nn.Conv2d)
        seen.append(not module.weight.is_contiguous())

    next(module for module in net.modules() if type(module) is nn.Conv2d).register_forward_hook(look)
    return seen


@pytest.mark.parametrize(
    "family", [by.Rank1(4), by.EMP(3, patches=("input", "norm")), by.MeanField(), by.BatchEnsemble(4)], ids=str
)
def test_convolutions_of_draws_have_channels_last_and_say_the_same(family: Family) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    layouts = _layouts(net)
    model, x = by.convert(net, family), torch.randn(9, 3, 6, 6)
    before = {name: (t.data_ptr(), t.stride(), t.clone()) for name, t in model.state_dict().items()}
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(4)])
    for _ in range(2):
        layouts.clear()
        draws = by.predict(model, x, samples=4, draws=True).draws
        assert torch.allclose(draws, loop, atol=1e-5) and draws.is_contiguous()
    assert layouts == [True] * 4
    for name, tensor in model.state_dict().items():
        assert (tensor.data_ptr(), tensor.stride()) == before[name][:2] and torch.equal(tensor, before[name][2])


@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(1, 8, 3), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 3)],
    ids=["one channel", "pointwise", "depthwise", "usual"],
)
@pytest.mark.parametrize("family", [by.Rank1(4), by.MeanField(), by.Ensemble(3)], ids=str)
def test_draws_with_channels_last_stay_the_same_from_batch_to_batch(conv: nn.Conv2d, family: Family) -> None:
    model = by.convert(nn.Sequential(copy.deepcopy(conv), nn.Flatten(), nn.LazyLinear(3)), {nn.Conv2d: family})
    x = torch.randn(18, conv.in_channels, 6, 6)
    model(x)
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(6)])
    for size in (18, 9, 5):
        draws = by.predict(model, x, samples=6, batch_size=size, draws=True).draws
        assert torch.allclose(draws, loop, atol=1e-5)


def test_a_layout_that_another_call_has_found_wanting_is_given_up_midway() -> None:
    model = by.convert(_Flattens(), by.Rank1(4))
    small, large = torch.randn(9, 3, 3, 3), torch.randn(9, 3, 5, 5)
    loop = torch.stack([by.draw(model, 0, index=index)(large) for index in range(4)])

    def batches() -> Iterator[Tensor]:
        yield small
        by.predict(model, large, samples=4)
        yield large

    assert torch.allclose(by.predict(model, batches(), samples=4, draws=True).draws[:, 9:], loop, atol=1e-5)


class _Kernel(nn.Module):
    """A network whose output is its drawn kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.conv(x)
        return self.conv.weight.flatten(1)


@pytest.mark.parametrize("family", [by.Rank1(4), by.MeanField(), by.Ensemble(3)], ids=str)
def test_an_output_that_is_a_drawn_kernel_is_not_overwritten(family: Family) -> None:
    model, x = by.convert(_Kernel(), family), torch.randn(9, 4, 6, 6)
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(4)])
    assert torch.allclose(by.predict(model, x, samples=4, draws=True).draws, loop)


def test_a_network_whose_views_need_the_usual_layout_has_it() -> None:
    net = _Flattens()
    layouts = _layouts(net)
    model = by.convert(net, by.Rank1(4))
    for side in (3, 5, 3):  # at first channels last do, then not
        x = torch.randn(9, 3, side, side)
        loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(4)])
        layouts.clear()
        assert torch.allclose(by.predict(model, x, samples=4, draws=True).draws, loop, atol=1e-5)
        assert layouts[-1] == (side == 3 and layouts == [False, True] + [True] * 4)
    with pytest.raises(RuntimeError, match=r"expected input.* to have 3 channels"):
        by.predict(model, torch.randn(9, 2, 5, 5), samples=4)


class Weights(nn.Module):
    """A network whose output is its drawn weight, for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)  # a layer that is not called is not drawn
        return self.layer.weight[: len(x)]


@pytest.mark.parametrize("samples", [6, by.Adaptive(max=8, tolerance=1e-6)], ids=["fixed", "adaptive"])
def test_an_output_outlives_the_memory_of_its_draw(samples: int | by.Adaptive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws are made in memory that serves the next ones; here each is a block of its own and is the output itself."""
    monkeypatch.setattr("bayesify.skeleton.AHEAD", 1)
    model, x = by.convert(Weights(), by.MeanField(estimator="shared", init_log_std=(-1, 0))), torch.randn(5, 3)
    found = by.predict(model, x, samples=samples)
    count = 6 if isinstance(samples, int) else int(found.draws_used.max())
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(count)])
    assert torch.allclose(found.probs, loop.softmax(-1).mean(0), atol=1e-6)


def test_memory_for_draws_is_kept_for_the_next_prediction_unless_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = by.convert(nn.Linear(30, 20), by.MeanField(estimator="shared")), torch.randn(64, 30)
    first = by.predict(model, x, samples=4)
    kept = memory._kept.memory.blocks[0].data_ptr()
    again = by.predict(model, x, samples=4)
    assert memory._kept.memory.blocks[0].data_ptr() == kept
    assert torch.equal(first.probs, again.probs)
    monkeypatch.setattr(memory, "LARGEST", 1000)
    by.predict(model, x, samples=4)
    assert "memory" not in vars(memory._kept)


def test_a_prediction_inside_a_prediction_has_memory_of_its_own() -> None:
    inner, outer = (by.convert(nn.Linear(3, 3), by.MeanField(estimator="shared")) for _ in range(2))
    x = torch.randn(64, 3)

    def call(network: nn.Module, batch: Tensor) -> Tensor:
        return network(by.predict(inner, batch, samples=3).probs)

    found = by.predict(outer, x, samples=4, call=call)
    assert torch.allclose(found.probs, by.predict(outer, by.predict(inner, x, samples=3).probs, samples=4).probs)


@pytest.mark.parametrize("family", [by.BatchEnsemble(3), by.Ensemble(3)], ids=str)
def test_points_that_come_again_are_not_computed_again(family: Family) -> None:
    calls: list[int] = []
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net[1].register_forward_hook(lambda module, args, output: calls.append(1))
    model, x = by.convert(net, family), torch.randn(2000, 4)
    by.predict(model, x, samples=8)  # the first time it is seen that they do
    calls.clear()
    found = by.predict(model, x, samples=8, draws=True)
    assert len(calls) == 3
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(8)])
    assert found.draws is not None and torch.allclose(found.draws, loop, atol=1e-5)
    assert torch.allclose(found.probs, loop.softmax(-1).mean(0), atol=1e-6)


@pytest.mark.parametrize(
    "family", [by.Rank1(4), by.IBNN(4), by.MCDropout(0.2), by.LowRankEnsemble(10), by.BatchEnsemble(10)], ids=str
)
@pytest.mark.parametrize("samples", [10, by.Adaptive(max=10, tolerance=1e-9)], ids=["fixed", "adaptive"])
def test_factors_of_many_draws_meet_many_vectors_in_few_calls(family: Family, samples: int | by.Adaptive) -> None:
    calls: list[int] = []
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net[2].register_forward_hook(lambda module, args, output: calls.append(len(output)))
    model, x = by.convert(net, {nn.Linear: family}), torch.randn(500, 4)
    by.predict(model, x, samples=10)  # the first time it is seen that they may
    calls.clear()
    found = by.predict(model, x, samples=samples)
    assert calls == [1500, 1500, 2000]
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(10)])
    assert torch.allclose(found.probs, loop.softmax(-1).mean(0), atol=1e-6)


@pytest.mark.parametrize("rows, calls_wanted", [(3, [30]), (40, [200, 200])])
def test_factors_of_many_draws_meet_tokens_in_few_calls(rows: int, calls_wanted: list[int]) -> None:
    calls: list[int] = []
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    net[2].register_forward_hook(lambda module, args, output: calls.append(len(output)))
    model, x = by.convert(net, {nn.Linear: by.Rank1(4)}), torch.randn(rows, 8, 4)
    by.predict(model, x, samples=10)
    calls.clear()
    found = by.predict(model, x, samples=10)
    assert calls == calls_wanted
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(10)])
    assert torch.allclose(found.probs, loop.softmax(-1).mean(0), atol=1e-6)


class _Reads(nn.Module):
    """Reads sequences (rows, time, numbers), or a single one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(6, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(self.first(x))[0])


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_found_of_inputs_with_some_dimensions_is_not_said_of_others(first: int) -> None:
    model, x = by.convert(_Reads(), {nn.Linear: by.Rank1(4)}), torch.randn(16, 12, 6)
    inputs = [x, x[0]]
    for each in (inputs[first], inputs[1 - first]):
        loop = torch.stack([by.draw(model, 0, index=index)(each) for index in range(10)])
        assert torch.allclose(by.predict(model, each, samples=10, draws=True).draws, loop, atol=1e-5)


@pytest.mark.parametrize("family", [by.LowRankEnsemble(3), by.Rank1(3)], ids=str)
def test_a_call_of_ones_own_finds_drawn_weights_wherever_it_looks(family: Family) -> None:
    model, x = by.convert(nn.Linear(4, 3, bias=False), family), torch.randn(50, 4)
    found = by.predict(model, x, samples=3, call=lambda net, batch: batch @ net.state_dict()["weight"].T, draws=True)
    assert torch.allclose(found.draws, by.predict(model, x, samples=3, draws=True).draws, atol=1e-5)


class _ReadsTheWeight(nn.Module):
    """Uses a layer's weight twice, once by a way that only finds parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ dict(self.named_parameters())["layer.weight"].T


@pytest.mark.parametrize("samples", [3, by.Adaptive(max=3)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("family", [by.LowRankEnsemble(3), by.Rank1(3, prior_std=1)], ids=str)
def test_a_network_finds_drawn_weights_wherever_it_looks(family: Family, samples: int | by.Adaptive) -> None:
    model, x = by.convert(_ReadsTheWeight(), family), torch.randn(50, 4)
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(3)])
    for _ in range(2):  # the first time it is tried
        found = by.predict(model, x, samples=samples)
        assert torch.allclose(found.probs, loop.softmax(-1).mean(0), atol=1e-6)


class _TimeFirst(nn.Module):
    """Has its rows in the second dimension inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(6, 8), nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(self.first(x.transpose(0, 1)))[0]).transpose(0, 1)


def test_what_is_found_of_inputs_of_one_step_is_not_said_of_longer_ones() -> None:
    model, x = by.convert(_TimeFirst(), {nn.Linear: by.Rank1(4, prior_std=1)}), torch.randn(20, 8, 6)
    for each in (x[:, :1], x):
        loop = torch.stack([by.draw(model, 0, index=index)(each) for index in range(10)])
        assert torch.allclose(by.predict(model, each, samples=10, draws=True).draws, loop, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 10])
def test_no_draw_is_made_beyond_the_look_at_which_all_are_settled(rows: int) -> None:
    net, calls = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), []
    net[1].register_forward_hook(lambda module, args, output: calls.append(output.shape[:-1].numel()))
    model, x = by.convert(net, by.Rank1(4, dropout_rate=1e-9, mean_std=1e-6)), torch.randn(rows, 4)
    by.predict(model, x, samples=by.Adaptive())
    calls.clear()
    found = by.predict(model, x, samples=by.Adaptive())
    assert found.draws_used.tolist() == [16] * rows and calls == [16 * rows]


def test_threads_that_meet_while_factors_are_tried_are_right() -> None:
    model, x = by.convert(_ReadsTheWeight(), by.Rank1(3, prior_std=1)), torch.randn(50, 4)
    sampler = Sampler(model, 3, seed=0, call=None, memory=memory.Memory(reused=False))
    by.predict(model, x, samples=3)  # another thread, which finds out
    with torch.no_grad():
        found = sampler.counted(x, by.Categorical(), keep=False)
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(3)])
    assert torch.allclose(found.probs, loop.softmax(-1).mean(0), atol=1e-6)


def test_what_a_hook_changes_is_tried_again() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model, x = by.convert(net, by.Rank1(4, prior_std=1)), torch.randn(20, 4)
    by.predict(model, x, samples=10)
    model[1].register_forward_hook(lambda module, args, output: output - output.mean(0, keepdim=True))
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(10)])
    assert torch.allclose(by.predict(model, x, samples=10, draws=True).draws, loop, atol=1e-5)


@pytest.mark.parametrize("rows", [6, 6000])
def test_outputs_in_memory_of_the_networks_own_are_kept_apart(rows: int) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("output", torch.zeros(rows, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.output.copy_(self.layer(x))

    model, x = by.convert(Keeps(), by.MeanField(init_log_std=(-1, -1))), torch.randn(rows, 4)
    loop = torch.stack([by.draw(model, 0, index=index)(x).clone() for index in range(4)])
    assert torch.allclose(by.predict(model, x, samples=4, draws=True).draws, loop, atol=1e-5)


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


def test_attention_of_all_draws_at_once_says_nothing_of_what_torch_can_not_batch() -> None:
    """Warnings are errors here, after which every draw would have a call of its own."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    calls: list[int] = []
    encoder.norm2.register_forward_hook(lambda module, args, output: calls.append(1))
    model, x = by.convert(nn.Sequential(nn.Embedding(9, 8), encoder), by.MeanField()), torch.randint(9, (2, 5))
    by.predict(model, x, samples=6)
    calls.clear()
    by.predict(model, x, samples=6)
    assert len(calls) == 1


def test_warnings_of_others_are_left_alone_while_draws_are_made_at_once() -> None:
    class Slow(nn.Module):  # an operation that torch can't batch
        def forward(self, x: Tensor) -> Tensor:
            filters.append(list(warnings.filters))
            return F.scaled_dot_product_attention(*(x.reshape(-1, 1, 2, 4),) * 3).flatten(1)

    filters: list[object] = []
    model, x = by.convert(nn.Sequential(nn.Linear(4, 8), Slow()), by.MeanField()), torch.randn(2, 4)
    before = list(warnings.filters)
    by.predict(model, x, samples=6)
    assert all(each == before for each in filters) and warnings.filters == before
    with pytest.warns(UserWarning, match="performance drop"):  # they are said again to who calls torch.vmap himself
        torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q))(torch.randn(2, 1, 1, 2, 4))


def test_points_of_a_network_that_is_random_itself_are_computed_each_time() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, training=True))

    model, x = by.convert(nn.Sequential(nn.Linear(4, 8), Noisy(8, 3)), {"0": by.BatchEnsemble(2)}), torch.randn(50, 4)
    found = by.predict(model, x, samples=8, draws=True)
    assert found.draws is not None and not torch.allclose(found.draws[0], found.draws[2])


def test_a_call_of_ones_own_is_made_for_every_draw() -> None:
    model, x, calls = by.convert(nn.Linear(4, 3), by.BatchEnsemble(2)), torch.randn(50, 4), []

    def call(network: nn.Module, batch: Tensor) -> Tensor:
        calls.append(1)
        return network(batch)

    by.predict(model, x, samples=8, call=call)
    assert len(calls) == 8


class Skipping(nn.Linear):
    """Skips itself for some rows, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.rand(len(x), 1) >= 0.1)


def test_rare_randomness_is_seen_by_its_operations() -> None:
    """Two rows of a network that seldom skips are mostly equal, and so are all of a layer that starts with zeros."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = by.convert(nn.Sequential(Skipping(4, 8), nn.Linear(8, 3)), {"1": by.BatchEnsemble(2)})
        found = by.predict(model, torch.randn(200, 4), samples=8, draws=True)
        assert found.draws is not None and not torch.equal(found.draws[0], found.draws[2])


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
