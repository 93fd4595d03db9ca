"""The objective: likelihood bounds, mixtures, annealing, parameter groups, regularisation, statistics."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import bayesify as by
from bayesify.layers import bayesian_layers


@pytest.fixture
def ensemble() -> nn.Module:
    return by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.BatchEnsemble(4, mean_std=0.5))


def _member_log_probs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([-F.cross_entropy(m(x), y, reduction="none") for m in by.members(model)])


def test_replicate_sends_every_row_through_every_component(ensemble: nn.Module) -> None:
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    each = _member_log_probs(ensemble, x, y)
    found = by.elbo(ensemble, x, y, n=10, mixture="replicate")
    assert torch.allclose(found.log_likelihood, each.mean(), atol=1e-5)
    mixed = by.elbo(ensemble, x, y, n=10, mixture="replicate", bound="mixture")
    assert torch.allclose(mixed.log_likelihood, (each.logsumexp(0) - math.log(4)).mean(), atol=1e-5)
    assert mixed.log_likelihood >= found.log_likelihood


def test_assign_spreads_rows_evenly_over_components(ensemble: nn.Module) -> None:
    """On average over calls each row meets each component, and in one call none starves."""
    x = torch.eye(4)[:1].expand(8, 4)
    members = torch.stack([m(x[:1])[0] for m in by.members(ensemble)])
    ensemble.train()
    counts = torch.zeros(8, 4)
    for _ in range(200):
        chosen = torch.cdist(ensemble(x), members).argmin(1)
        assert torch.bincount(chosen, minlength=4).tolist() == [2, 2, 2, 2]
        counts += F.one_hot(chosen, 4)
    assert counts.min() > 25


def test_a_row_keeps_its_component_through_all_layers() -> None:
    """Members whose layers only work with each other's: mixing them would show."""
    model = by.convert(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), by.Ensemble(3))
    with torch.no_grad():
        for layer, power in zip(model, (1, -1), strict=True):
            layer.weight.fill_(2.0**power)
            layer.posterior.weight.copy_(torch.tensor([3.0, 5.0]).reshape(2, 1, 1) ** power)
    for rows in (1, 2, 6, 7):
        assert torch.allclose(model(torch.ones(rows, 1)), torch.ones(rows, 1))


@pytest.mark.parametrize("rows", [8, 10, 3])
def test_samples_repeat_rows_with_their_component(ensemble: nn.Module, rows: int) -> None:
    """Algorithm 1 of iBNN: for any batch, also one that K does not divide."""
    x, y = torch.randn(rows, 4), torch.randint(3, (rows,))
    scope = next(iter(bayesian_layers(ensemble).values())).scope
    scope.start = torch.tensor([0])
    once = by.elbo(ensemble, x, y, n=10)
    many = by.elbo(ensemble, x, y, n=10, samples=3)
    assert torch.allclose(once.log_likelihood, many.log_likelihood, atol=1e-6)


def test_loss_is_the_negative_bound_per_example() -> None:
    model = by.convert(nn.Linear(4, 3), by.MeanField(init_log_std=(-20.0, -20.0)))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    found = by.elbo(model, x, y, n=50, beta=0.3)
    assert torch.allclose(found.loss, F.cross_entropy(F.linear(x, model.weight, model.bias), y) + 0.3 * found.kl / 50)
    assert torch.allclose(found.kl, by.kl(model))


def test_shared_prior_covers_what_no_method_does() -> None:
    model = by.convert(
        nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), {"2": by.MeanField(), "0": by.Rank1(2)}
    )
    model[1].bias.requires_grad_(False)
    shared = [model[0].weight, model[0].bias, model[1].weight]
    expected = sum(t.square().sum() for t in shared) / (2 * 0.5**2)
    assert torch.allclose(by.kl(model, shared_std=0.5) - by.kl(model), expected, rtol=1e-4)
    plain = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model = by.convert(plain, by.EMP(5, prior_std=2.0))  # eq. 6: τ/2 on shared tensors, τ p_k / 2 on patches
    patched = sum(
        (
            layer.weight.square().sum()
            + layer.bias.square().sum()
            + layer.posterior.weight.square().sum()
            + layer.posterior.bias.square().sum()
        )
        / 5
        for layer in (model[1], model[2])
    )
    expected = (patched + model[0].weight.square().sum() + model[0].bias.square().sum()) / (2 * 4.0)
    assert torch.allclose(by.kl(model, shared_std=2.0), expected, rtol=1e-5)


def test_annealing_is_linear_then_flat() -> None:
    assert [by.anneal(e, over=200) for e in (-1, 0, 100, 200, 300)] == [0, 0, 0.5, 1, 1]
    assert by.anneal(0, over=0) == 1
    assert by.anneal(5, over=10, start=0.2, end=0.4) == pytest.approx(0.3)


def test_parameter_groups_hold_every_parameter_once() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    model = by.convert(net, {"0": by.Rank1(2), "2": by.MeanField()})
    model[1].weight.requires_grad_(False)
    groups = by.parameter_groups(model, lr=0.1, posterior_lr=2.0, weight_decay=1e-3)
    found = {group["name"]: {id(p) for p in group["params"]} for group in groups}
    assert found["base"] == {id(model[0].weight), id(model[0].bias), id(model[1].bias)}
    assert found["covered"] == {id(model[2].weight), id(model[2].bias)}
    assert sum(map(len, found.values())) == sum(p.requires_grad for p in model.parameters())
    settings = {g["name"]: (g["lr"], g["weight_decay"]) for g in groups}
    assert settings == {"base": (0.1, 1e-3), "covered": (0.1, 0.0), "posterior": (2.0, 0.0)}
    torch.optim.SGD(groups, lr=0.1)


def test_frozen_base_trains_the_posterior_alone() -> None:
    model = by.convert(nn.Linear(4, 3), by.MeanField())
    model.weight.requires_grad_(False)
    model.bias.requires_grad_(False)
    by.elbo(model, torch.randn(5, 4), torch.zeros(5).long(), n=10).loss.backward()
    by.add_kl_grad_(model, n=10)
    assert model.weight.grad is None and model.posterior.weight_log_std.grad is not None


def test_uncertainty_loss_is_the_papers_hinge() -> None:
    """α·relu(γ - MI): with one point component MI is 0; with two certain opposites it is ln 2."""
    model = by.convert(nn.Linear(1, 2, bias=False), by.Ensemble(2, jitter=0.0))
    x = torch.ones(6, 1)
    assert by.uncertainty_loss(model, x).item() == pytest.approx(3 * 0.75, rel=1e-5)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[50.0], [-50.0]]))
        model.posterior.weight.copy_(-model.weight)
    for _ in range(5):  # always two different components
        assert by.uncertainty_loss(model, x).item() == pytest.approx(3 * (0.75 - math.log(2)), rel=1e-4)
    assert by.uncertainty_loss(model, x, gamma=0.5).item() == 0
    scope = model.scope
    assert scope.start is None
    with pytest.raises(by.BayesifyError, match="at least 2 draws"):
        by.uncertainty_loss(model, x, draws=1)


@pytest.mark.parametrize("method", [by.MeanField(estimator="shared"), by.MeanField(), by.LowRankEnsemble(5), by.EMP(3)])
def test_uncertainty_loss_raises_the_uncertainty(method: by.methods.Method) -> None:
    torch.manual_seed(0)
    model = by.convert(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)), {"*": method})
    x = torch.randn(64, 4)
    before = by.predict(model, x, 20).epistemic.mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        by.uncertainty_loss(model, x).backward()
        optimizer.step()
    assert by.predict(model, x, 20).epistemic.mean() > 5 * before


def test_uniform_noise_stays_in_range() -> None:
    x = torch.rand(2000)
    noisy = by.uniform_noise(x, 0.1)
    assert noisy.min() >= 0 and noisy.max() <= 1 and 0.095 < (noisy - x).abs().max() <= 0.1 + 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n=0: expected the number of training examples"),
        ({"n": 10, "samples": 0}, "samples=0: expected an integer >= 1"),
        ({"n": 10, "mixture": "both"}, "mixture='both': expected 'assign' or 'replicate'"),
        ({"n": 10, "bound": "tight"}, "bound='tight': expected 'average' or 'mixture'"),
        ({"n": 10, "bound": "mixture"}, "use mixture='replicate'"),
        ({"n": 10, "shared_std": 0.0}, "shared_std=0.0: expected a standard deviation > 0"),
    ],
)
def test_wrong_options_are_named(ensemble: nn.Module, options: dict[str, object], message: str) -> None:
    with pytest.raises(by.BayesifyError, match=message):
        by.elbo(ensemble, torch.randn(4, 4), torch.zeros(4).long(), **options)


def test_replicate_needs_one_number_of_components() -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), {"0": by.Rank1(2), "1": by.Rank1(3)})
    with pytest.raises(by.BayesifyError, match=r"got \[2, 3\]; use 'assign'"):
        by.elbo(model, torch.randn(4, 4), torch.zeros(4).long(), n=10, mixture="replicate")


def test_a_plain_model_has_no_divergence() -> None:
    for call in (by.kl, lambda m: by.add_kl_grad_(m, n=1), lambda m: by.parameter_groups(m, lr=1.0)):
        with pytest.raises(by.BayesifyError, match=r"no Bayesian layer: use by.convert"):
            call(nn.Linear(2, 2))


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, temperature: Tensor) -> Tensor:
        return self.layer(x) / temperature


def test_one_number_for_all_rows_is_not_repeated() -> None:
    model, x, y = by.convert(Tempered(), by.BatchEnsemble(2)), torch.randn(6, 4), torch.randint(3, (6,))
    found = by.elbo(model, {"x": x, "temperature": torch.tensor(2.0)}, y, n=6, mixture="replicate")
    each = [F.cross_entropy(member(x, 2.0), y) for member in by.members(model)]
    assert torch.allclose(found.log_likelihood, -torch.stack(each).mean(), atol=1e-5)


@pytest.mark.parametrize("method", [by.Rank1(2), by.MeanField(), by.MCDropout(0.5), by.Ensemble(2)], ids=str)
def test_kept_dropout_has_no_divergence(method: by.Method) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    without = by.convert(copy.deepcopy(net), method)
    model, x, y = by.convert(net, method, keep_dropout=True), torch.randn(6, 3), torch.zeros(6).long()
    model.load_state_dict(without.state_dict())
    assert torch.equal(by.kl(model), by.kl(without))
    by.elbo(model, x, y, n=10, shared_std=1.0).loss.backward()
    by.add_kl_grad_(model, n=10)


class Masked(NamedTuple):
    x: Tensor
    mask: Tensor


def test_batches_may_be_named_tuples() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, batch: Masked) -> Tensor:
            return self.linear(batch.x) * batch.mask

    model, batch = by.convert(Net(), by.Rank1(2)), Masked(torch.randn(6, 3), torch.ones(6, 1))
    assert by.check(model, batch) == {"linear": 1}
    assert by.elbo(model, batch, torch.zeros(6).long(), n=10, samples=2).loss.isfinite()


def test_no_step_copies_a_number_to_the_device() -> None:
    """Such a copy waits for the device; a tensor that is filled there does not."""

    class Watched(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert function is not Tensor.new_tensor
            return function(*args, **(kwargs or {}))

    for method in (by.Rank1(2), by.IBNN(2), by.MeanField(), by.EMP(2), by.LowRankEnsemble(2), by.Ensemble(2)):
        model = by.convert(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)), method)
        with Watched():
            by.elbo(model, torch.randn(6, 3), torch.zeros(6).long(), n=10, shared_std=1.0).loss.backward()
            by.add_kl_grad_(model, n=10)
