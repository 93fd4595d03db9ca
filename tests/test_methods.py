"""The methods against their formulas: divergences, initial values, estimators, exact optima."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import every_method
from torch import Tensor, nn
from torch.distributions import Cauchy, LogNormal, Normal
from torch.nn import functional as F

import bayesify as by
from bayesify.layers import bayesian_layers
from bayesify.methods import METHODS
from bayesify.methods.base import Draws, Method, Perturbation
from bayesify.methods.distributions import centre, distribution, kl, mixture_kl, rho_of, sample, scale_of


def within(estimates: Tensor, expected: float | Tensor, errors: float = 4.5) -> bool:
    """Whether the mean of estimates is within so many standard errors of what is expected."""
    error = estimates.std(0) / math.sqrt(estimates.shape[0])
    return bool(((estimates.mean(0) - expected).abs() <= errors * error + 1e-9).all())


# Divergences

PAIRS = {
    "normal": ("normal", Normal(1.0, 0.1), Normal),
    "cauchy": ("cauchy", Cauchy(1.0, 0.1), Cauchy),
    "lognormal": ("lognormal", LogNormal(0.0, 0.1), LogNormal),
    "cauchy prior": ("normal", Cauchy(1.0, 0.1), Normal),
}


@pytest.mark.parametrize("case", PAIRS)
def test_factor_kl_equals_monte_carlo(case: str) -> None:
    kind, prior, make = PAIRS[case]
    loc, scale = torch.tensor([0.3, 1.1]), torch.tensor([0.2, 0.05])
    loc = loc - 1 if kind == "lognormal" else loc
    q = make(loc, scale)
    value = q.sample((200_000,))
    estimates = q.log_prob(value) - prior.log_prob(value)
    found = kl(distribution(kind, loc, scale), prior, samples=200_000)
    assert within(estimates, found, 6)


@every_method
def test_kl_equals_monte_carlo(method: Method) -> None:
    """KL(q ‖ p) against E_q[log q - log p], or for points against the L2 that their prior gives, from draws alone."""
    layer = by.convert(nn.Linear(5, 4), {nn.Linear: method})
    method = layer.method  # with the options that conversion derives from its noise
    network = [by.draw(layer, 0, index=i) for i in range(600)]
    weights = torch.stack([torch.cat([n.weight.flatten(), n.bias]) for n in network])
    found = by.kl(layer).detach()
    if isinstance(method, by.MeanField):
        site = layer.sites()[""]
        mean = torch.cat([layer.weight.flatten(), layer.bias]).detach()
        std = torch.cat([site.posterior["weight_log_std"].flatten(), site.posterior["bias_log_std"]]).exp().detach()
        estimates = Normal(mean, std).log_prob(weights) - Normal(0, method.prior_std).log_prob(weights)
        assert within(estimates.sum(1), found)
    elif isinstance(method, by.BatchEnsemble):
        assert found == 0
    elif method.covers_base:
        assert within(weights.square().sum(1) / (2 * method.prior_std**2), found)
    else:
        assert within(_factor_estimates(method, layer), found, 6)


def _factor_estimates(method: Method, layer: nn.Module) -> Tensor:
    """Samples of the divergence of the factors, by torch.distributions alone."""
    kinds = {"normal": Normal, "cauchy": Cauchy, "lognormal": LogNormal}
    make = kinds[getattr(method, "posterior", "normal")]
    prior = make(0.0 if make is LogNormal else 1.0, method.prior_std)
    total = torch.zeros(100_000)
    tensors = dict(layer.posterior.named_parameters())
    for name in [n.removesuffix("_rho") for n in tensors if n.endswith("_rho")]:
        loc, scale = tensors[f"{name}_loc"].detach(), F.softplus(tensors[f"{name}_rho"].detach())
        if isinstance(method, by.IBNN):  # eq. 22-24
            q = Normal(loc.mean(0), (scale.square().sum(0) / len(scale) ** 2).sqrt())
            value = q.sample((100_000,))
            total += (q.log_prob(value) - prior.log_prob(value)).sum(-1)
        else:
            q = make(loc, scale)
            value = q.sample((100_000,))
            total += (q.log_prob(value) - prior.log_prob(value)).sum(-1).mean(-1)
    return total


def test_learned_mixing_adds_the_information_of_the_choices() -> None:
    for method, choices in ((by.EMP(3, learn_mixing=True), 1), (by.ECMP(3, learn_mixing=True), 8)):
        layer = by.convert(nn.BatchNorm1d(4), method)
        plain = by.kl(layer).detach()
        logits = layer.posterior.logits
        with torch.no_grad():
            logits.copy_(torch.tensor([0.5, 0.25, 0.25]).log())
        p = torch.tensor([0.5, 0.25, 0.25])
        copies = torch.stack([torch.cat([w, b]) for w, b in _members(layer)]).square().sum(1)
        information = choices * (p * (3 * p).log()).sum()
        expected = (p * copies).sum() / 2 + information
        assert torch.allclose(by.kl(layer), expected, rtol=1e-5)
        assert torch.allclose(plain, copies.mean() / 2, rtol=1e-5)


def _members(layer: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return [(member.weight.detach(), member.bias.detach()) for member in by.members(layer)]


def test_mixture_divergences_are_ordered() -> None:
    """The true divergence of a mixture is below the pairwise bound, which is below the average; sum is K of those."""
    loc, scale = torch.tensor([[0.8, 1.2], [1.1, 0.9], [1.0, 1.0]]), torch.full((3, 2), 0.1)
    q, p = Normal(loc, scale), Normal(torch.tensor(1.0), torch.tensor(0.3))
    component = torch.randint(3, (200_000,))
    value = Normal(loc[component], scale[component]).sample()
    log_q = torch.logsumexp(q.log_prob(value.unsqueeze(1)).sum(-1), 1) - math.log(3)
    true = (log_q - p.log_prob(value).sum(-1)).mean()
    average, pairwise = mixture_kl("average", q, p), mixture_kl("pairwise", q, p)
    assert true < pairwise < average
    assert torch.allclose(mixture_kl("sum", q, p), 3 * average)
    same = Normal(loc[:1].expand(3, 2), scale)
    assert torch.allclose(mixture_kl("pairwise", same, p), mixture_kl("average", same, p))  # no overlap to win
    far = Normal(torch.tensor([[0.0], [100.0]]), torch.ones(2, 1))
    gain = mixture_kl("average", far, p) - mixture_kl("pairwise", far, p)
    assert torch.allclose(gain, torch.tensor(2.0).log(), atol=1e-3)  # fully apart: the choice is worth log K


def test_pairwise_quadratic_term_is_a_quarter() -> None:
    """exp(-B) of two unit Gaussians at distance Δ is exp(-Δ²/8), since B = Δ²/(4(v+v))."""
    q = Normal(torch.tensor([[0.0], [2.0]]), torch.ones(2, 1))
    p = Normal(torch.tensor(0.0), torch.tensor(1.0))
    gain = mixture_kl("average", q, p) - mixture_kl("pairwise", q, p)
    assert torch.allclose(gain, -torch.tensor((1 + math.exp(-4 / 8)) / 2).log(), atol=1e-6)


def test_pairwise_counts_the_choice_of_a_component_once() -> None:
    """A draw has one component in all layers and factors, so components fully apart are worth log K in all."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    both = [by.convert(copy.deepcopy(net), by.Rank1(4, divergence=how)) for how in ("pairwise", "average")]
    both[1].load_state_dict(both[0].state_dict())
    for model in both:
        for layer in model:
            with torch.no_grad():
                layer.posterior.in_loc.copy_(10 * torch.arange(4.0).unsqueeze(1).expand(4, layer.in_features))
    assert torch.allclose(by.kl(both[1]) - by.kl(both[0]), torch.tensor(4.0).log(), atol=1e-2)


def test_total_kl_is_the_sum_over_layers_and_elements() -> None:
    for method in (by.Rank1(3), by.IBNN(3, bias_noise=True), by.MeanField(), by.Rank1(3, divergence="sum")):
        model = by.convert(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False)), method)
        each = [layer.method.total_kl([layer.sites()[""]]) for layer in bayesian_layers(model).values()]
        assert torch.allclose(by.kl(model), torch.stack(each).sum(), rtol=1e-5)


# Initial values


def test_scales_and_their_inverse() -> None:
    scale = torch.tensor([1e-6, 1e-3, 0.03, 1.0, 30.0])
    assert torch.allclose(scale_of(rho_of(scale)), scale, rtol=1e-3)


@pytest.mark.parametrize(("posterior", "scale"), [("normal", 0.2), ("cauchy", 1e-3)])
def test_rank1_scales_start_at_a_dropout_rate(posterior: str, scale: float) -> None:
    layer = by.convert(nn.Linear(7, 5), by.Rank1(4, posterior=posterior, noise=0.2))
    assert torch.allclose(scale_of(layer.posterior.in_rho), torch.full((4, 7), scale), rtol=1e-3)
    given = by.convert(nn.Linear(7, 5), by.Rank1(4, posterior=posterior, dropout_rate=0.2))
    assert torch.allclose(scale_of(given.posterior.out_rho), torch.full((4, 5), 0.5), rtol=1e-4)


def test_rank1_means_start_at_signs_or_around_one() -> None:
    signs = by.convert(nn.Linear(4000, 2), by.Rank1(4, signs=0.75)).posterior.in_loc
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs((signs > 0).float().mean() - 0.75) < 0.02
    near = by.convert(nn.Linear(4000, 2), by.Rank1(4, mean_std=0.5)).posterior.in_loc
    assert abs(near.mean() - 1) < 0.02 and abs(near.std() - 0.5) < 0.02


def test_rank1_factor_without_a_distribution_is_k_learned_points() -> None:
    layer = by.convert(nn.Linear(3, 2), by.Rank1(4, factors="input"))
    assert {n for n, _ in layer.posterior.named_parameters()} == {"in_loc", "in_rho", "out_loc"}
    weights = torch.stack([by.draw(layer, 0, index=4 * i).weight for i in range(50)])
    ratio = weights[:, 0] / weights[:, 1]  # the output factor is the same in every draw of a component
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-4)


def test_ibnn_scales_start_at_a_folded_normal() -> None:
    paper = by.IBNN(4, scale_mean=0.05, scale_std=0.02)
    scale = scale_of(by.convert(nn.Linear(5000, 2), paper).posterior.in_rho)
    assert abs(scale.mean() - 0.05) < 0.001 and abs(scale.std() - 0.02) < 0.001 and bool((scale > 0).all())


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_low_rank_product_starts_with_mean_one_and_the_given_deviation(rank: int) -> None:
    layer = by.convert(nn.Linear(200, 200), by.LowRankEnsemble(20, rank=rank, std=0.2))
    product = layer.posterior.left @ layer.posterior.right
    assert abs(product.mean() - 1) < 0.02
    assert abs(product.std() - 0.2) < 0.02


def test_mean_field_deviations_start_in_the_papers_range() -> None:
    log_std = by.convert(nn.Linear(50, 50), by.MeanField(init_log_std=(-6.0, -5.0))).posterior.weight_log_std
    assert -6 <= log_std.min() < -5.9 and -5.1 < log_std.max() <= -5


@pytest.mark.parametrize("init", ["jitter", "random"])
def test_copies_differ_from_the_start(init: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    by.convert(model, by.EMP(5, init_copies=init, jitter=0.05))
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
    for layer in model:
        stack = torch.cat([layer.weight.unsqueeze(0), layer.posterior.weight])
        assert torch.pdist(stack.flatten(1)).min() > 0
    spread = (model[1].posterior.weight - model[1].weight).abs().mean() / model[1].weight.abs().mean()
    assert (spread > 0.5) == (init == "random")
    assert (model[0].posterior.weight - 1).abs().max() < 0.5


# The size of the noise


def relative_noise(network: nn.Sequential, name: str, draws: int = 400) -> Tensor:
    """The standard deviation of the first layer's drawn weights over draws, relative to the weight's size."""
    weights = torch.stack([by.draw(network, 0, index=i).get_submodule(name).weight for i in range(draws)])
    base = network.get_submodule(name).weight
    return (weights - weights.mean(0)).square().mean().sqrt() / base.square().mean().sqrt()


@pytest.mark.parametrize(
    ("make", "sources"),
    [
        (by.MeanField, 1),
        (by.MCDropout, 1),
        (by.DropConnect, 1),
        (partial(by.IBNN, 1, mean_std=0.0, scale_std=0.0), 1),
        (partial(by.Rank1, 1, mean_std=0.0), 2),  # an input and an output factor
        (partial(by.BatchEnsemble, 400), 2),
        (partial(by.LowRankEnsemble, 400), 1),
        (partial(by.EMP, 400, patches=("norm", "output", "input")), 2),  # a jitter times and plus
    ],
    ids=lambda case: getattr(case, "func", case).__name__ if callable(case) else "",
)
def test_layers_get_less_noise_in_deep_networks(make: Callable[..., Method], sources: int) -> None:
    network = nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(9)))
    name = "1" if make is by.MCDropout else "0"
    layers = 8 if make is by.MCDropout else 2 if "patches" in getattr(make, "keywords", {}) else 9
    model = by.convert(network, make(noise=0.3))
    expected = 0.3 * (4 / max(layers, 4)) ** 0.75 * math.sqrt(sources)
    assert abs(relative_noise(model, name) / expected - 1) < 0.1


def test_given_options_are_kept_and_the_others_derived_from_the_noise() -> None:
    method = by.Rank1(4, noise=0.2, mean_std=0.5).sized(4)
    assert (method.mean_std, method.prior_std) == (0.5, 0.2)
    assert method.dropout_rate == pytest.approx(0.04 / 1.04, rel=1e-3)
    assert str(method) == "Rank1(4, noise=0.2, mean_std=0.5)"
    assert by.MCDropout(0.3).sized(9) == by.MCDropout(0.3)


def test_noise_must_be_positive() -> None:
    with pytest.raises(by.BayesifyError, match=r"Rank1\(noise=0\): expected a number > 0"):
        by.Rank1(noise=0)


# Draws


def test_cauchy_factors_are_clipped_and_normal_ones_are_not() -> None:
    layer = by.convert(nn.Linear(2000, 2), by.Rank1(1, posterior="cauchy", dropout_rate=0.5))
    factors = layer.method.draw(layer.sites()[""], Draws(torch.zeros(50, dtype=torch.long))).in_scale
    assert factors.max() == 10 and factors.min() == -10
    free = by.convert(nn.Linear(2000, 2), by.Rank1(1, posterior="cauchy", dropout_rate=0.5, clip=float("inf")))
    assert free.method.draw(free.sites()[""], Draws(torch.zeros(50, dtype=torch.long))).in_scale.max() > 10


@pytest.mark.parametrize("kind", ["normal", "cauchy", "lognormal"])
def test_samples_follow_their_distribution(kind: str) -> None:
    loc, scale = torch.full((100_000, 1), 0.4), torch.full((100_000, 1), 0.3)
    value = sample(kind, loc, scale, Draws(torch.arange(100_000))).flatten()
    if kind == "cauchy":  # medians and quartiles, for there are no moments
        assert torch.allclose(value.quantile(torch.tensor([0.25, 0.5, 0.75])), torch.tensor([0.1, 0.4, 0.7]), atol=0.01)
    else:
        assert abs(value.mean() - centre(kind, loc, scale)[0]) < 0.01


def test_dropout_keeps_the_mean_and_drops_as_often_as_told() -> None:
    layer = by.convert(nn.Linear(1, 1, bias=False), by.MCDropout(0.3))
    nn.init.ones_(layer.weight)
    kept = layer(torch.ones(20_000, 1)).flatten()
    assert torch.allclose(kept.unique(), torch.tensor([0.0, 1 / 0.7]))
    assert abs((kept == 0).float().mean() - 0.3) < 0.02 and abs(kept.mean() - 1) < 0.02


def test_drop_connect_never_drops_biases() -> None:
    layer = by.convert(nn.Linear(30, 30), by.DropConnect(0.5))
    drawn = by.draw(layer, 0)
    assert torch.equal(drawn.bias, layer.bias)
    assert abs((drawn.weight == 0).float().mean() - 0.5) < 0.06


def test_dropout_drops_whole_channels_of_a_convolution() -> None:
    layer = by.convert(nn.Conv2d(8, 4, 3), by.MCDropout(0.5))
    dropped = (by.draw(layer, 0).weight == 0).flatten(2).all(2)
    assert torch.equal(dropped, dropped[:1].expand_as(dropped)) and dropped.any() and not dropped.all()


def test_emp_chooses_a_layer_and_ecmp_an_element() -> None:
    values = torch.arange(5.0)
    for method, kinds in ((by.EMP(5), 1), (by.ECMP(5), 5)):
        layer = by.convert(nn.BatchNorm1d(400), method)
        with torch.no_grad():
            for name in ("weight", "bias"):
                getattr(layer, name).fill_(0.0)
                getattr(layer.posterior, name).copy_(values[1:, None].expand(4, 400))
        drawn = by.draw(layer, 0)
        assert len(drawn.weight.unique()) == kinds
        if kinds == 1:
            assert drawn.weight[0] == drawn.bias[0]
        seen = torch.stack([by.draw(layer, 0, index=i).weight for i in range(200)])
        assert torch.allclose(torch.stack([(seen == v).float().mean() for v in values]), torch.tensor(0.2), atol=0.1)


def test_emp_chooses_independently_between_layers() -> None:
    model = by.convert(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)), by.EMP(2))
    for layer in model:
        with torch.no_grad():
            layer.weight.fill_(0.0)
            layer.posterior.weight.fill_(1.0)
    pairs = torch.stack([torch.stack([layer.weight[0] for layer in by.draw(model, 0, index=i)]) for i in range(400)])
    assert abs(torch.corrcoef(pairs.T)[0, 1]) < 0.2


def test_normal_noise_follows_the_global_seed_and_not_the_default_dtype() -> None:
    def made(dtype: torch.dtype) -> torch.Tensor:
        torch.manual_seed(3)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return Draws(torch.arange(2)).normal((90_000,))
        finally:
            torch.set_default_dtype(before)

    first = made(torch.float32)
    assert first.dtype == torch.float32 and first.shape == (2, 90_000)
    assert torch.equal(first, made(torch.float64)) and not torch.equal(first[0], first[1])


@pytest.mark.parametrize("noise", ["normal", "uniform"])
def test_noise_of_a_draw_does_not_depend_on_the_others(noise: str) -> None:
    def seeded(*seeds: int) -> Tensor:
        return getattr(Draws.seeded(torch.arange(len(seeds)), list(seeds)), noise)((7, 3))

    both = seeded(3, 4)
    assert torch.equal(both[0], seeded(3)[0]) and torch.equal(both[1], seeded(4)[0]) and not both[0].equal(both[1])


@pytest.mark.parametrize("components", [2, 3, 5, 7, 9])
@pytest.mark.parametrize("learned", [False, True])
def test_noise_at_its_ends_chooses_the_first_and_the_last_copy(
    components: int, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = by.convert(nn.Linear(1, 2, bias=False), by.ECMP(components, learn_mixing=learned))
    ends = torch.tensor([0.0, 1 - 2**-24])  # the least and the largest that torch.rand gives
    monkeypatch.setattr(Draws, "uniform", lambda self, shape, period=1: ends.reshape(1, *shape))
    copies = torch.stack([model.weight[0], model.posterior.weight[-1, 1]])
    for drawn in (by.draw(model, 0).weight, model(torch.ones(1, 1)).detach().T):
        assert torch.allclose(drawn, copies)


@pytest.mark.parametrize("method", [by.EMP(2, learn_mixing=True), by.ECMP(2, learn_mixing=True)], ids=str)
def test_learned_mixing_finds_the_better_copy(method: Method) -> None:
    """The straight-through gradient raises the probability of the copy that lowers the loss."""
    layer = by.convert(nn.LayerNorm(3), method)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        layer.posterior.weight.zero_()
        layer.posterior.bias.fill_(1.0)
    optimizer = torch.optim.Adam([layer.posterior.logits], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        (layer(torch.randn(8, 3)) - 1).square().mean().backward()
        optimizer.step()
    assert layer.posterior.logits.softmax(0)[1] > 0.9


# The four estimators of a mean-field Gaussian


def _mean_field(estimator: str, kind: type[nn.Module], *sizes: int) -> nn.Module:
    """The same layer with the same posterior for every estimator."""
    torch.manual_seed(1)
    return by.convert(kind(*sizes), by.MeanField(estimator=estimator, init_log_std=(-2.0, -1.0)))


@pytest.mark.parametrize("estimator", ["exemplar", "shared", "flipout", "local"])
def test_estimators_have_the_mean_and_variance_they_claim(estimator: str) -> None:
    layer = _mean_field(estimator, nn.Linear, 5, 4)
    x = torch.randn(1, 5).expand(2, 5)
    with torch.no_grad():
        outputs = torch.stack([layer(x) for _ in range(6000)])  # (calls, rows, out)
        mean = F.linear(x[0], layer.weight, layer.bias)
        weight_var, bias_var = ((2 * p).exp() for p in layer.posterior.parameters())
        variance = F.linear(x[0].square(), weight_var, bias_var)
    assert within(outputs[:, 0], mean)
    assert torch.allclose(outputs.var(0), variance.expand(2, 4), rtol=0.1)
    centred = outputs - mean
    correlation = (centred[:, 0] * centred[:, 1]).mean(0) / variance
    assert torch.allclose(correlation, torch.full((4,), 1.0 if estimator == "shared" else 0.0), atol=0.06)


def test_estimators_agree_on_the_gradient() -> None:
    grads = {}
    x = torch.randn(8, 2, 5, 5)
    for estimator in ("exemplar", "shared", "flipout", "local"):
        layer = _mean_field(estimator, nn.Conv2d, 2, 3, 3)
        grads[estimator] = torch.stack([_gradient(layer, x) for _ in range(1000)])
    for estimator in ("shared", "flipout"):
        difference = grads[estimator].mean(0) - grads["exemplar"].mean(0)
        error = ((grads[estimator].var(0) + grads["exemplar"].var(0)) / 1000).sqrt()
        assert (difference.abs() / error).max() < 5
    # Local noise is independent between positions, so only the gradient of what positions share alike agrees.
    linear = {e: _mean_field(e, nn.Linear, 5, 4) for e in ("exemplar", "local")}
    found = {e: torch.stack([_gradient(m, x[:, 0, 0]) for _ in range(1000)]) for e, m in linear.items()}
    error = ((found["local"].var(0) + found["exemplar"].var(0)) / 1000).sqrt()
    assert ((found["local"].mean(0) - found["exemplar"].mean(0)).abs() / error).max() < 5


def _gradient(layer: nn.Module, x: Tensor) -> Tensor:
    layer.zero_grad()
    torch.sigmoid(layer(x)).square().mean().backward()
    return layer.posterior.weight_log_std.grad.flatten().clone()


def test_exemplar_reduces_gradient_variance_a_hundredfold() -> None:
    """BayesAdapter, section 4.4: with 256 identical rows the variance falls by about the batch size."""
    x = torch.randn(1, 3, 6, 6).expand(256, 3, 6, 6)
    variance = {}
    for estimator in ("exemplar", "shared"):
        layer = _mean_field(estimator, nn.Conv2d, 3, 4, 3)
        variance[estimator] = torch.stack([_gradient(layer, x) for _ in range(200)]).var(0).mean()
    assert variance["shared"] / variance["exemplar"] > 100


def test_mean_field_regression_converges_to_the_exact_optimum() -> None:
    """Mean of the true posterior, variances 1/diag(precision), for linear regression with known noise."""
    x, noise_precision, prior_std = torch.randn(40, 3), 4.0, 0.7
    y = x @ torch.tensor([[0.5], [-1.0], [2.0]]) + torch.randn(40, 1) / 2
    precision = noise_precision * x.T @ x + torch.eye(3) / prior_std**2
    mean = torch.linalg.solve(precision, noise_precision * x.T @ y).T
    model = by.convert(nn.Linear(3, 1, bias=False), by.MeanField(prior_std=prior_std, estimator="exemplar"))
    likelihood, n = by.Gaussian(noise_precision), len(x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9965)
    for _ in range(1600):
        optimizer.zero_grad()
        by.elbo(model, x, y, n=n, likelihood=likelihood, samples=8).loss.backward()
        optimizer.step()
        scheduler.step()
    assert torch.allclose(model.weight, mean, atol=0.01)
    variance = (2 * model.posterior.weight_log_std).exp()
    assert torch.allclose(variance, 1 / precision.diag().unsqueeze(0), rtol=0.05)


# Names and options


def test_methods_print_as_they_are_made() -> None:
    assert str(by.Rank1(4)) == "Rank1(4)"
    assert str(by.EMP(3, reach="row")) == "EMP(3, reach='row')"
    assert str(by.MCDropout(0.2)) == "MCDropout(0.2)"
    assert str(by.MeanField(estimator="local")) == "MeanField(estimator='local')"


def test_registry_has_the_ten_methods() -> None:
    assert len(METHODS) == 10 and all(METHODS[name]() == METHODS[name]() for name in METHODS)
    assert all(METHODS[name](**METHODS[name]().options()) == METHODS[name]() for name in METHODS)


def test_some_draws_of_a_perturbation_keep_no_others_in_memory() -> None:
    """Without the garbage collector, which runs late: a cycle would hold the weights of all rows."""
    stack = torch.randn(3, 2, 2)
    p = Perturbation(3, weight=stack, statistics={"mean": stack}, plus=Perturbation(3, weight=stack))
    gc.disable()
    try:
        one, others, alive = p.only(1), p.at(torch.tensor([2, 0])), weakref.ref(p)
        del p
        assert alive() is None
    finally:
        gc.enable()
    assert one.size == 1 and others.size == 2 and torch.equal(others.weight, stack[[2, 0]])
    assert torch.equal(one.plus.weight, stack[1:2]) and torch.equal(others.statistics["mean"], stack[[2, 0]])
