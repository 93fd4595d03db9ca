"""A row's samples in training: they keep its component, and their noise cancels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import bayesify as by
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Draws
from bayesify.methods.draw_design import balanced

OUT = by.Gaussian(precision=1.0)


def quiet(method: Any) -> Any:
    """The method with so little noise that outputs tell the component."""
    small = {by.IBNN: {"scale_mean": 1e-6, "scale_std": 0.0}, by.Rank1: {"dropout_rate": 1e-12}}
    return type(method)(method.components, mean_std=0.5, **small.get(type(method), {}))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("mixture", ["assign", "replicate"])
@pytest.mark.parametrize("method", [by.IBNN(4), by.Rank1(4), by.BatchEnsemble(4), by.LowRankEnsemble(4)], ids=str)
def test_a_row_keeps_its_component_in_every_layer_for_any_batch(method: Any, mixture: str, count: int) -> None:
    """10 rows and 4 components: each output of a layer is that of one component, the same for a row's samples."""
    method = by.LowRankEnsemble(4, std=0.5) if isinstance(method, by.LowRankEnsemble) else quiet(method)
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 6), nn.Linear(6, 3)
    model = by.convert(nn.Sequential(*layers), method).train()
    inputs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in bayesian_layers(model).items():
        layer.register_forward_hook(lambda m, args, out, name=name: inputs.update({name: (args[0], out)}))
    x, y = torch.randn(10, 2, 4, 4), torch.randint(3, (10,))
    by.elbo(model, x, y, n=10, samples=count, mixture=mixture)
    members, chosen = by.members(model), {}
    for name, (given, out) in inputs.items():
        each = torch.stack([member.get_submodule(name)(given) for member in members]).flatten(2)  # (K, rows, …)
        distances = (each - out.flatten(1)).abs().amax(2)
        chosen[name] = distances.argmin(0)
        assert distances.amin(0).max() < 1e-3
    first = next(iter(chosen.values()))
    assert all(torch.equal(first, other) for other in chosen.values())
    of_rows = first.reshape(10, -1, count)  # rows, components, samples
    assert torch.equal(of_rows, of_rows[..., :1].expand_as(of_rows))
    used = torch.bincount(of_rows[..., 0].flatten(), minlength=4)
    assert used.max() - used.min() <= 1
    if mixture == "replicate":
        assert torch.equal(of_rows[..., 0].sort(1).values, torch.arange(4).expand(10, 4))


def test_members_with_their_own_statistics_see_all_samples_of_their_rows() -> None:
    """An ensemble's batch norm: the statistics of a member are those of its rows, any number of samples of each."""
    x, y, found = torch.randn(10, 4), torch.randint(4, (10,)), []
    for count in (1, 2, 3):
        torch.manual_seed(0)
        model = by.convert(nn.Sequential(nn.BatchNorm1d(4, momentum=1.0)), by.Ensemble(3)).train()
        model[0].scope.start = torch.tensor([0])
        by.elbo(model, x, y, n=10, samples=count)
        found.append(torch.cat([model[0].running_mean[None], model[0].posterior.running_mean]))
    expected = torch.stack([x[member::3].mean(0) for member in range(3)])
    for each in found:
        assert torch.allclose(each, expected, atol=1e-6)


def outputs(model: nn.Module, x: Tensor, count: int, design: str = "balanced") -> Tensor:
    """The model's outputs (rows, samples, …) in one step."""
    kept: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, out: kept.append(out.detach()))
    with torch.no_grad():
        y = torch.zeros_like(model(x))
        by.elbo(model, x, y, n=len(x), likelihood=OUT, samples=count, design=design)
    hook.remove()
    return kept[-1].unflatten(0, (len(x), -1))


LINEAR_IN_NOISE = {
    "IBNN": by.IBNN(1, scale_mean=0.3, bias_noise=True),
    "Rank1 input": by.Rank1(1, factors="input", dropout_rate=0.1),
    "Rank1 output": by.Rank1(1, factors="output", dropout_rate=0.1),
    "Rank1 Cauchy": by.Rank1(1, factors="output", posterior="cauchy", dropout_rate=1e-4, clip=math.inf),
    **{e: by.MeanField(estimator=e, init_log_std=(-1.0, -1.0)) for e in ("exemplar", "flipout", "local", "shared")},
    "exemplar in chunks": by.MeanField(estimator="exemplar", rows_at_once=5, init_log_std=(-1.0, -1.0)),
}
LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Linear(5, 3), torch.randn(6, 5)),
    "tokens": lambda: (nn.Linear(5, 3), torch.randn(6, 4, 5)),
    "conv": lambda: (nn.Conv2d(2, 3, 3), torch.randn(6, 2, 5, 5)),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", LINEAR_IN_NOISE)
def test_two_samples_are_mirrored_at_the_mean(name: str, layer: str) -> None:
    """Through a layer that is linear in its noise, the mean of two samples is the mean network's output."""
    network, x = LAYERS[layer]()
    model = by.convert(network, LINEAR_IN_NOISE[name]).train()
    found, mean = outputs(model, x, 2), by.draw(model, None)(x)
    assert torch.allclose(found.mean(1), mean, atol=2e-4, rtol=1e-3)
    assert (found[:, 0] - found[:, 1]).abs().max() > 1e-3
    assert not torch.allclose(outputs(model, x, 2, "independent").mean(1), mean, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("estimator", ["exemplar", "flipout"])
def test_looked_up_entries_are_mirrored(estimator: Any) -> None:
    model = by.convert(nn.Sequential(nn.Embedding(7, 3)), {"0": by.MeanField(estimator=estimator)}).train()
    found = outputs(model, torch.tensor([[0, 1, 0], [2, 3, 4]]), 2)
    assert torch.allclose(found.mean(1), model[0].weight[torch.tensor([[0, 1, 0], [2, 3, 4]])], atol=1e-6)
    assert torch.equal(found[0, :, 0], found[0, :, 2])  # the same entry twice in a row


@pytest.mark.parametrize("name", ["IBNN", "exemplar", "local"])
def test_more_samples_add_up_to_the_mean(name: str) -> None:
    model = by.convert(nn.Linear(5, 3), LINEAR_IN_NOISE[name]).train()
    x = torch.randn(6, 5)
    assert torch.allclose(outputs(model, x, 3).mean(1), by.draw(model, None)(x), atol=1e-5)


def test_no_two_samples_drop_the_same_unit() -> None:
    """At a rate of 1/3, three samples drop each unit once; a layer of ones shows the masks."""
    model = by.convert(nn.Linear(64, 64, bias=False), by.MCDropout(1 / 3)).train()
    nn.init.eye_(model.weight)
    dropped = (outputs(model, torch.ones(20, 64), 3) == 0).sum(1)
    assert (dropped - 1).abs().float().mean() < 1e-3  # but for rounding at the edges


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("kind", "of"), [("normal", "norm"), ("cauchy", "cauchy"), ("uniform", "uniform")])
def test_each_sample_alone_has_exactly_the_distribution_of_its_noise(kind: str, of: str, count: int) -> None:
    torch.manual_seed(1)
    draws = balanced(Draws(torch.arange(50 * count)), count)
    noise = getattr(draws, kind)((400,)).unflatten(0, (50, count))
    for sample in range(count):
        assert stats.kstest(noise[:, sample].flatten().numpy(), of).pvalue > 1e-3
    correlation = torch.corrcoef(noise[:, 0].T[:20].atan())  # of different elements, over rows
    assert (correlation - torch.eye(20)).abs().mean() < 0.2
    if kind == "uniform":
        assert noise.min() >= 0 and noise.max() < 1


def test_samples_of_one_draw_for_the_batch_differ() -> None:
    """Methods with one draw per batch draw as many as there are samples; each serves all rows."""
    model = by.convert(nn.Linear(5, 3), by.MeanField(estimator="shared", init_log_std=(-1.0, -1.0))).train()
    x = torch.randn(1, 5).expand(6, 5)
    found = outputs(model, x, 3)
    assert torch.allclose(found, found[:1].expand_as(found), atol=1e-5)
    assert (found[0, 0] - found[0, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("method", [by.IBNN(4, scale_mean=0.3), by.MeanField(init_log_std=(-1.5, -1.5))], ids=str)
def test_gradients_vary_less_and_have_the_same_mean(method: Any) -> None:
    torch.manual_seed(0)
    model = by.convert(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)), method).train()
    x, y, found = torch.randn(12, 5), torch.randint(3, (12,)), {}
    for design in ("independent", "balanced"):
        grads = []
        for _ in range(300):
            loss = by.elbo(model, x, y, n=100, beta=0.0, samples=2, design=design).loss
            grads.append(
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, [model[0].weight, model[2].weight])])
            )
        found[design] = torch.stack(grads)
    one, other = found["independent"], found["balanced"]
    assert one.var(0).sum() > 1.25 * other.var(0).sum()  # standard error of the ratio: about 0.05
    error = ((one.var(0) + other.var(0)) / 300).sqrt()
    assert ((one.mean(0) - other.mean(0)) / error).square().mean() < 1.6


def test_the_mixture_bound_stays_below_the_likelihood_and_gets_tighter() -> None:
    """log mean p of two samples is at most log E p on average, by Jensen; balanced samples are nearer to it."""
    torch.manual_seed(0)
    model = by.convert(nn.Linear(5, 3), by.IBNN(1, scale_mean=1.0)).train()
    x, y = 2 * torch.randn(12, 5), torch.randint(3, (12,))
    options: dict[str, Any] = {"n": len(x), "mixture": "replicate", "bound": "mixture"}
    with torch.no_grad():
        exact = float(by.elbo(model, x, y, samples=20_000, design="independent", **options).log_likelihood)
        bounds = {
            design: torch.stack(
                [by.elbo(model, x, y, samples=2, design=design, **options).log_likelihood for _ in range(400)]
            )
            for design in ("independent", "balanced")
        }
    assert float(bounds["independent"].mean()) < float(bounds["balanced"].mean()) < exact


def test_parts_of_a_model_that_get_other_rows_draw_for_them() -> None:
    """A converted part that gets 5 rows in a step with 2 samples of each of 10."""
    first, second = by.convert(nn.Linear(4, 3), by.IBNN(4)), by.convert(nn.Linear(4, 3), by.BatchEnsemble(4))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(torch.ones(5, 4)).mean(0)

    y = torch.randint(3, (10,))
    with pytest.warns(UserWarning, match="could not check what is around the converted parts"):
        by.elbo(Both().train(), torch.randn(10, 4), y, n=10, samples=2).loss.backward()
    assert first.weight.grad is not None and second.weight.grad is not None


def test_a_row_for_all_is_repeated_for_all_samples() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.places(torch.ones(1, 4)))

    for method in (by.BatchEnsemble(4), by.Rank1(4)):
        model = by.convert(Positions(), method).train()
        loss = by.elbo(model, torch.randn(10, 4), torch.randint(3, (10,)), n=10, samples=2).loss
        assert loss.isfinite()


def test_a_compiled_step_mirrors_noise_too() -> None:
    model = by.convert(nn.Linear(5, 3), by.IBNN(4, scale_mean=0.3)).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for count in (2, 3):
        assert torch.allclose(outputs(compiled, torch.randn(6, 5), count).std(1).isfinite().float(), torch.ones(()))
    one = by.convert(nn.Linear(5, 3), by.IBNN(1, scale_mean=0.3)).train()
    x = torch.randn(6, 5)
    found = outputs(torch.compile(one, fullgraph=True, backend="eager"), x, 2)
    assert torch.allclose(found.mean(1), by.draw(one, None)(x), atol=1e-5)


def test_an_unknown_design_is_refused() -> None:
    model = by.convert(nn.Linear(5, 3), by.IBNN(4))
    with pytest.raises(by.BayesifyError, match="design='paired': expected 'balanced' or 'independent'"):
        by.elbo(model, torch.randn(6, 5), torch.zeros(6).long(), n=10, samples=2, design="paired")  # type: ignore[arg-type]


def test_samples_need_a_target_for_each_row() -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 3), nn.Flatten(0, 1)), by.Rank1(2))
    with pytest.raises(by.BayesifyError, match="the input has 5 rows and the targets 30"):
        by.elbo(model, torch.randn(5, 6, 4), torch.zeros(30).long(), n=5, samples=2)
