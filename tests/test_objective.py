"""The objective: likelihood bounds, mixtures, annealing, parameter groups, regularisation, statistics."""

from __future__ import annotations

import copy
import math
import re
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


def certain_members(k: int, classes: int) -> nn.Module:
    """Members without noise; member c is certain of class c, and of class 0 if there is no such class."""
    model = by.convert(nn.Linear(1, classes, bias=False), by.Ensemble(k, jitter=0.0))
    with torch.no_grad():
        model.weight.copy_(50 * F.one_hot(torch.tensor(0), classes).float()[:, None])
        for c in range(1, k):
            model.posterior.weight[c - 1].copy_(50 * F.one_hot(torch.tensor(c % classes), classes).float()[:, None])
    return model


def test_uncertainty_loss_is_the_papers_hinge() -> None:
    """α·relu(γ - MI): with one point component MI is 0; with d certain ones of d classes it is ln d."""
    same = by.convert(nn.Linear(1, 2, bias=False), by.Ensemble(2, jitter=0.0))
    x = torch.ones(6, 1)
    assert by.uncertainty_loss(same, x, gamma=0.6, alpha=3.0).item() == pytest.approx(3 * 0.6, rel=1e-5)
    for draws in (2, 3, 5):
        model, bound = certain_members(5, 5), math.log(draws)
        for _ in range(3):  # always different components
            assert by.uncertainty_loss(model, x, gamma=bound, draws=draws).item() == pytest.approx(0, abs=1e-5)
            assert by.uncertainty_loss(model, x, gamma=0.9 * bound, draws=draws).item() == 0
    with pytest.warns(UserWarning, match="out of reach"):
        loss = by.uncertainty_loss(certain_members(2, 2), x, gamma=0.75, alpha=3.0, draws=2)
    assert loss.item() == pytest.approx(3 * (0.75 - math.log(2)), rel=1e-4)
    assert model.scope.start is None


def test_the_hinge_is_that_of_the_mutual_information_of_the_draws() -> None:
    """With as many draws as members it is the hinge of their exact mutual information."""
    torch.manual_seed(0)
    model = by.convert(nn.Linear(3, 4), by.LowRankEnsemble(5, std=1.0))
    x, gamma = torch.randn(50, 3), 0.05
    p = torch.stack([member(x).softmax(-1) for member in by.members(model)])
    exact = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
    assert (exact > gamma).any() and (exact < gamma).any()
    loss = by.uncertainty_loss(model, x, gamma=gamma, alpha=2.0, draws=5)
    assert loss.item() == pytest.approx(2 * (gamma - exact).clamp_min(0).mean().item(), rel=1e-4)


def test_draws_of_a_gaussian_have_the_mutual_information_of_a_monte_carlo_estimate() -> None:
    """The mean over many batches of the loss with gamma above all is gamma less the mean information of d draws."""
    torch.manual_seed(0)
    model = by.convert(nn.Linear(1, 2, bias=False), by.MeanField(init_log_std=(0.5, 0.5), estimator="exemplar"))
    logits = model.weight.detach()[:, 0] + math.exp(0.5) * torch.randn(20_000, 3, 2)
    p = logits.softmax(-1)
    information = torch.special.entr(p.mean(1)).sum(-1) - torch.special.entr(p).sum(-1).mean(1)
    loss = by.uncertainty_loss(model, torch.ones(20_000, 1), gamma=0.693, alpha=1.0, draws=3)
    error = information.std().item() / 20_000**0.5
    assert abs(0.693 - loss.item() - information.mean().item()) < 5 * 2**0.5 * error


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (certain_members(4, 5), {"draws": 2}, r"of 2 draws is at most ln 2 = 0.693.*take draws=3 or more, or choose"),
        (certain_members(4, 2), {}, r"of 2 classes is at most ln 2 = 0.693.*for ever, whatever gamma is; choose"),
        (certain_members(2, 5), {"draws": 4}, r"of 2 components without noise is at most ln 2 = 0.693.*gamma is; cho"),
        (certain_members(9, 9), {"draws": 8, "gamma": 2.1}, "of 8 draws is at most ln 8 = 2.079.*draws=9 or more"),
    ],
    ids=["draws", "classes", "components", "more draws"],
)
def test_a_gamma_that_nothing_reaches_is_warned_of(model: nn.Module, options: dict[str, float], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        by.uncertainty_loss(model, torch.ones(6, 1), **{"gamma": 0.75, **options})


def test_more_draws_than_components_are_fine_where_there_is_noise() -> None:
    by.uncertainty_loss(by.convert(nn.Linear(1, 9), by.Rank1(2)), torch.ones(6, 1), gamma=1.5, draws=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": 1}, "draws=1: the mutual information needs at least 2 draws"),
        ({"draws": 2.0}, "draws=2.0: the mutual"),
        ({"draws": True}, "draws=True: the mutual"),
        ({"gamma": 0}, "gamma=0: expected a number above 0"),
        ({"gamma": math.nan}, "gamma=nan: expected a number above 0"),
        ({"alpha": -1.0}, "alpha=-1.0: expected a number above 0"),
        ({"alpha": "3"}, "alpha='3': expected a number above 0"),
    ],
)
def test_uncertainty_loss_refuses_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(by.BayesifyError, match=re.escape(message)):
        by.uncertainty_loss(certain_members(2, 2), torch.ones(6, 1), **options)


def test_uncertainty_loss_needs_classes() -> None:
    for outputs in (nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))):
        with pytest.raises(by.BayesifyError, match=r"output has shape \(6.*expected logits of at least 2 classes"):
            by.uncertainty_loss(by.convert(outputs, by.Rank1(2)), torch.ones(6, 3))


def test_the_loss_of_an_input_does_not_depend_on_its_batch() -> None:
    """Batch norms use their running statistics, as in evaluation."""
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = by.convert(net, by.Ensemble(3, jitter=1.0))
    model(5 + torch.randn(60, 3))
    x, far = torch.randn(9, 3), 100 * torch.randn(9, 3)
    options = {"gamma": 1.09, "alpha": 1.0, "draws": 3}
    apart = [by.uncertainty_loss(model, rows, **options) for rows in (x, far)]
    both = by.uncertainty_loss(model, torch.cat([x, far]), **options)
    assert both.item() == pytest.approx(sum(apart).item() / 2, rel=1e-4)
    information = by.predict(model.eval(), x).epistemic
    assert apart[0].item() == pytest.approx((1.09 - information).clamp_min(0).mean().item(), rel=1e-4)


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


def test_uniform_noise_refuses_bytes_and_options() -> None:
    with pytest.raises(by.BayesifyError, match=r"inputs of type torch\.uint8 can't have noise"):
        by.uniform_noise(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(by.BayesifyError, match=r"epsilon=-0\.1: expected a number above 0"):
        by.uniform_noise(torch.zeros(2), -0.1)
    with pytest.raises(by.BayesifyError, match=r"low=1\.0, high=0\.0: expected the smallest and the largest value"):
        by.uniform_noise(torch.zeros(2), low=1.0, high=0.0)


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
