"""Layers drawn or folded together: the same draws, gradients and independence as of each by itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import bayesify as by
from bayesify.family import Draws, Family, Perturbation, Site
from bayesify.layers import folding, kernel

ELEMENTWISE = [by.MeanField(estimator="shared"), by.ECMP(3, patches=("norm", "output", "input")), by.DropConnect(0.3)]


class Branches(nn.Module):
    """One of two layers is used, between others; some have biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.used, self.unused = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.used(self.norm(self.first(x))).mean((2, 3)))
        return y


def grads(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ELEMENTWISE, ids=str)
def test_a_layer_that_is_not_called_gets_no_gradient(family: Family) -> None:
    model = by.convert(Branches(), {"*": family})
    found = grads(model, torch.randn(6, 3, 5, 5))
    for name, grad in found.items():
        assert (grad is None) == name.startswith("unused"), name
        assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("family", ELEMENTWISE, ids=str)
def test_elements_drawn_together_have_the_gradients_of_each_alone(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of ones takes the order out of it; without a largest size, no layer is drawn with others."""
    model, x = by.convert(Branches(), {"*": family}), torch.randn(6, 3, 5, 5)
    ones = lambda self, shape: torch.full((self.size, *shape), 0.7)  # noqa: E731
    for noise in ("normal", "uniform", "coarse"):
        monkeypatch.setattr(f"bayesify.family.Draws.{noise}", ones)
    together = grads(model, x)
    monkeypatch.setattr(kernel, "MOST_ELEMENTS", 0)
    alone = grads(model, x)
    for name, grad in alone.items():
        other = together[name]
        assert (grad is None and other is None) or torch.allclose(other, grad, atol=1e-6), name


@pytest.mark.parametrize("family", ELEMENTWISE, ids=str)
def test_elements_drawn_together_are_independent_and_new_in_each_call(family: Family) -> None:
    net = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    model = by.convert(net, {"*": family}).train()
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(1.0)
            for tensor in layer.posterior.parameters():
                tensor.copy_(torch.arange(2.0, 2 + len(tensor)).reshape(-1, 1, 1) if tensor.dim() == 3 else tensor)
    seen = []
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, args: seen.append(layer.folded(layer.perturbation())["weight"]))
    for _ in range(2):
        model(torch.randn(4, 30))
    drawn = torch.stack([each.detach().flatten() for each in seen])
    correlations = torch.corrcoef(drawn).fill_diagonal_(0)
    assert drawn.std(1).min() > 0 and correlations.abs().max() < 0.15


def test_dropconnect_keeps_biases_also_where_weights_are_drawn_together() -> None:
    model = by.convert(nn.Sequential(nn.Linear(3, 50), nn.Linear(50, 20)), {"*": by.DropConnect(0.5)})
    assert torch.equal(model(torch.zeros(1, 3)) != 0, torch.ones(1, 20, dtype=torch.bool))


@pytest.mark.parametrize("family", ELEMENTWISE[:2], ids=str)
def test_tensors_of_different_precision_are_drawn_apart(family: Family) -> None:
    net = nn.Sequential(nn.Linear(3, 4).double(), nn.Linear(4, 4).double(), nn.Linear(4, 2).double())
    net[1].bias.data = net[1].bias.data.float()
    model = by.convert(net, {"*": family})
    model[1].bias.data = model[1].bias.data.double()
    y = model(torch.randn(5, 3, dtype=torch.float64))
    assert y.dtype == torch.float64 and y.isfinite().all()


def test_second_derivatives_of_elements_drawn_together() -> None:
    model, x = by.convert(Branches(), {"*": by.MeanField(estimator="shared")}).eval(), torch.randn(2, 3, 5, 5)
    torch.manual_seed(0)
    weight = model.first.weight
    (grad,) = torch.autograd.grad(model(x).square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), weight)
    with torch.no_grad():
        step = 1e-3 * torch.randn_like(weight)
        sides = []
        for sign in (1, -1):
            weight += sign * step
            with torch.enable_grad():
                torch.manual_seed(0)
                (moved,) = torch.autograd.grad(model(x).square().sum(), weight)
            sides.append(moved.square().sum())
            weight -= sign * step
    assert torch.allclose((sides[0] - sides[1]) / 2, (second * step).sum(), rtol=2e-2)


class Twins(nn.Module):
    """Convolutions of two shapes; one that is not called has the shape of others."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Conv2d(8, 16, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=bias) for bias in (True, False))
        self.unused = nn.Conv2d(16, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grow(x)
        for conv in self.body:
            x = conv(x).relu()
        return x.mean((2, 3))


def test_factors_folded_together_are_those_folded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = by.convert(Twins(), by.BatchEnsemble(4)), torch.randn(8, 8, 16, 16)
    calls = []
    fold = folding.folded_weights
    monkeypatch.setattr(folding, "folded_weights", lambda *parts: (calls.append(len(parts[0])), fold(*parts))[1])
    together = grads(model, x)
    assert calls == [1, 3]  # by shape
    monkeypatch.setattr(folding, "MOST_FOLDED", 0)
    alone = grads(model, x)
    assert calls == [1, 3]
    assert together["unused.weight"] is None and alone["unused.weight"] is None
    for name, grad in alone.items():
        other = together[name]
        assert (grad is None and other is None) or torch.allclose(other, grad, atol=1e-4), name


class Halves(nn.Module):
    """A stem and a head, each called in a mode of its own."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = layer(), layer()
        self.modes: tuple[Any, Any] = (contextlib.nullcontext, contextlib.nullcontext)

    def forward(self, x: Tensor) -> Tensor:
        with self.modes[0]():
            h = self.stem(x)
        with self.modes[1]():
            y: Tensor = self.head(h.clone())
        return y


@pytest.mark.parametrize("stem", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", [*ELEMENTWISE, by.BatchEnsemble(4), by.Rank1(4)], ids=str)
def test_a_head_learns_behind_a_stem_without_gradients(stem: Any, family: Family) -> None:
    model = by.convert(Halves(lambda: nn.Conv2d(16, 16, 3, padding=1)), {"*": family})
    model.modes = (stem, contextlib.nullcontext)
    model(torch.randn(8, 16, 12, 12)).sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == name.startswith("head"), name


@pytest.mark.parametrize("family", ELEMENTWISE[:2], ids=str)
def test_a_layer_may_ask_for_gradients_in_a_call_without_them(family: Family) -> None:
    model = by.convert(Halves(lambda: nn.Linear(4, 4)), {"*": family})
    model.modes = (contextlib.nullcontext, torch.enable_grad)
    with torch.no_grad():
        y = model(torch.randn(3, 4))
    y.sum().backward()
    assert model.head.weight.grad is not None and model.stem.weight.grad is None


def _zero(layer: nn.Module, args: object) -> None:
    layer.weight.detach().zero_()


def test_a_weight_that_changes_during_a_call_is_drawn_and_folded_as_it_is() -> None:
    for layer, family in (
        (lambda: nn.Linear(4, 4, bias=False), by.MeanField(estimator="shared", init_log_std=(-40.0, -40.0))),
        (lambda: nn.Conv2d(16, 16, 3, padding=1, bias=False), by.BatchEnsemble(4)),
    ):
        model = by.convert(Halves(layer), {"*": family})
        model.head.register_forward_pre_hook(_zero)
        x = torch.randn(8, 4) if isinstance(model.head, nn.Linear) else torch.randn(8, 16, 12, 12)
        assert model(x).abs().max() < 1e-6


def test_second_derivatives_that_reach_a_layer_by_another_way() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    model, x = by.convert(Both(), by.MeanField(estimator="shared")).double(), torch.ones(3, 4).double()
    psi = model.a.posterior.weight_log_std

    def value() -> Tensor:
        torch.manual_seed(0)
        a, b = model(x)
        (grad,) = torch.autograd.grad(a.sum(), psi, create_graph=True)
        return grad.square().sum() + b.square().sum()

    value().backward()
    with torch.no_grad():
        step, sides = 1e-3 * torch.randn_like(psi), []
        for sign in (1, -1):
            psi += sign * step
            with torch.enable_grad():
                sides.append(value().detach())
            psi -= sign * step
        assert torch.allclose((sides[0] - sides[1]) / 2, (psi.grad * step).sum(), rtol=1e-3)


@pytest.mark.parametrize("family", [by.MeanField(estimator="shared"), by.Rank1(2)], ids=str)
def test_weights_pruned_after_conversion_still_run(family: Family) -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), family)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    assert model(torch.randn(3, 4)).isfinite().all()


@pytest.mark.parametrize(
    "family",
    [
        by.MeanField(init_log_std=(-1, -1)),
        by.Rank1(2, prior_std=1),
        by.LowRankEnsemble(6),
        by.LowRankEnsemble(6, rank=2),
    ],
    ids=str,
)
def test_weights_pruned_after_conversion_are_drawn_by_predict_too(family: Family) -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(4, 4)), family), torch.randn(100, 4)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    draws = by.predict(model, x, samples=6, draws=True).draws
    assert draws is not None and draws.std(0).mean() > 1e-3
    assert torch.allclose(by.draw(model, 0, index=2)(x), draws[2], atol=1e-5)
    assert torch.equal(model[0].weight == 0, model[0].weight_mask == 0)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "pruned twice": lambda layer: [prune.random_unstructured(layer, "weight", amount=0.3) for _ in range(2)],
    "weight norm": nn.utils.weight_norm,
    "spectral norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("family", [by.LowRankEnsemble(1), by.LowRankEnsemble(1, rank=2), by.EMP(1)], ids=str)
@pytest.mark.parametrize("hook", HOOKS)
def test_weights_that_hooks_make_are_drawn_as_they_are_now(hook: str, family: Family) -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(4, 4)), {"0": family}).eval(), torch.randn(9, 4)
    HOOKS[hook](model[0])
    for _ in range(2):
        found = by.predict(model, x, samples=1, draws=True).draws
        frozen = by.draw(model, 0)
        assert found is not None and torch.allclose(found[0], model(x), atol=1e-6)
        assert torch.allclose(frozen(x), found[0], atol=1e-6) and set(frozen.state_dict()) == {"0.weight", "0.bias"}
        assert torch.allclose(frozen.double()(x.double()).float(), found[0], atol=1e-5)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3).add_(torch.randn_like(p))


def test_divergences_are_those_of_weights_as_they_are_now() -> None:
    model = by.convert(nn.Linear(4, 4, bias=False), by.MeanField())
    prune.l1_unstructured(model, "weight", amount=0.5)
    before = by.kl(model)
    with torch.no_grad():
        model.weight_orig.mul_(3)
    added = 4 * (model.weight_orig * model.weight_mask / 3).square().sum()  # half of 9 - 1, over the prior's variance
    assert torch.allclose(by.kl(model) - before, added / model.family.prior_std**2, rtol=1e-3)


@pytest.mark.parametrize("family", [by.LowRankEnsemble(3), by.Rank1(3), by.MeanField()], ids=str)
def test_pruned_biases_are_drawn_by_predict_and_frozen(family: Family) -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(4, 4)), family), torch.randn(50, 4)
    prune.l1_unstructured(model[0], "bias", amount=0.5)
    draws = by.predict(model, x, samples=3, draws=True).draws
    frozen = by.draw(model, 0, index=1)
    assert draws is not None and torch.allclose(draws[1], frozen(x), atol=1e-5)
    assert frozen[0].bias.data_ptr() != model[0].bias.data_ptr() and frozen.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("family", [by.ECMP(3), by.MeanField(), by.DropConnect(1e-7), by.Rank1(2)], ids=str)
@pytest.mark.parametrize("kl_first", [False, True])
def test_spectral_norms_added_after_conversion_still_train(family: Family, kl_first: bool) -> None:
    model, x = by.convert(mlp(), {nn.Linear: family}).train(), torch.randn(6, 4)
    nn.utils.spectral_norm(model[2])
    terms = [lambda: by.kl(model), lambda: model(x).square().sum()]
    sum(term() for term in (terms if kl_first else terms[::-1])).backward()
    assert model[2].weight_orig.grad.abs().sum() > 0


def test_a_training_call_uses_what_its_own_hook_makes() -> None:
    model, x = by.convert(mlp(), {nn.Linear: by.DropConnect(1e-7)}).train(), torch.randn(5, 4)
    nn.utils.spectral_norm(model[2])
    with torch.no_grad():
        found = model(x)
        hidden = nn.functional.linear(x, model[0].weight, model[0].bias).relu()
        assert torch.allclose(found, nn.functional.linear(hidden, model[2].weight, model[2].bias), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "family", [by.MeanField(), by.ECMP(3), by.EMP(3, learn_mixing=True), by.LowRankEnsemble(3)], ids=str
)
@pytest.mark.parametrize("hook", HOOKS)
def test_gradient_edits_reach_what_hooks_make_weights_of(hook: str, family: Family) -> None:
    model = by.convert(mlp(), {"2": family})
    HOOKS[hook](model[2])
    (by.kl(model) / 10).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    by.add_kl_grad_(model, n=10)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == found.keys() and any(name.startswith("2.weight_") for name in found)
    assert all(torch.allclose(found[name], grad, atol=1e-6) for name, grad in expected.items())
    covered = {
        id(p) for group in by.parameter_groups(model, lr=1.0) if group["name"] == "covered" for p in group["params"]
    }
    sources = [p for name, p in model.named_parameters() if name.startswith("2.weight_")]
    assert all(id(p) in covered for p in sources if p.requires_grad)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("hook", HOOKS)
def test_reverted_layers_keep_the_draw_that_a_hook_would_replace(hook: str) -> None:
    model, x = by.convert(mlp(), {nn.Linear: by.EMP(3)}).eval(), torch.randn(6, 4)
    HOOKS[hook](model[2])
    frozen = by.draw(model, 1, index=4)
    assert frozen.load_state_dict(frozen.state_dict())
    assert torch.allclose(by.revert(model, 1, index=4)(x), frozen(x), atol=1e-6)
    assert model[2].weight.requires_grad and set(model.state_dict()) == set(mlp().state_dict())


class _Sequence(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) if isinstance(self.inner, nn.LSTM) else self.inner(x, x, x))[0][:, -1]


@pytest.mark.parametrize("family", [by.EMP(3), by.MeanField(), by.BatchEnsemble(2)], ids=str)
@pytest.mark.parametrize("tensor", ["weight_hh_l0", "in_proj_weight"])
def test_pruned_sequence_layers_are_drawn_as_they_are_now(tensor: str, family: Family) -> None:
    inner = nn.LSTM(4, 4, batch_first=True) if "hh" in tensor else nn.MultiheadAttention(4, 2, batch_first=True)
    model, x = by.convert(_Sequence(inner), {"inner": family}).eval(), torch.randn(6, 7, 4)
    prune.random_unstructured(model.inner, tensor, amount=0.5)
    with torch.no_grad():
        getattr(model.inner, f"{tensor}_orig").mul_(3)
    before, frozen = by.predict(model, x, samples=4, draws=True).draws, by.draw(model, 0, index=1)
    model(x)
    assert torch.allclose(before, by.predict(model, x, samples=4, draws=True).draws, atol=1e-6)
    assert torch.allclose(before[1], frozen(x), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("hook", HOOKS)
def test_what_could_not_be_loaded_is_not_saved(hook: str, tmp_path: Path) -> None:
    model, x, file = by.convert(mlp(), {"2": by.BatchEnsemble(2)}), torch.randn(6, 4), tmp_path / "model.safetensors"
    HOOKS[hook](model[2])
    with pytest.raises(by.CheckpointError, match=r"layer '2': its weight was pruned or normalised.*prune\.remove"):
        by.save(model, file)
    assert not list(tmp_path.iterdir())
    if hook == "pruned":
        prune.remove(model[2], "weight")
        by.save(model, file)
        found = by.predict(by.load(mlp(), file), x, samples=2)
        assert torch.allclose(found.probs, by.predict(model, x, samples=2).probs)


def test_a_layer_with_a_pruned_bias_gets_fresh_copies() -> None:
    layer = prune.l1_unstructured(nn.Linear(4, 3), "bias", amount=1)
    before = layer.bias.clone()
    model = by.convert(layer, by.EMP(3, init_copies="random"))
    assert torch.equal(layer.bias, before) and model.posterior.bias.shape == (2, 3)


def test_a_subclass_with_a_draw_of_its_own_is_not_drawn_with_others() -> None:
    class Doubled(by.MeanField):
        def draw(self, site: Site, draws: Draws) -> Perturbation:
            assert site.in_size is not None
            return Perturbation(1, weight=2 * site.base["weight"].unsqueeze(0), bias=None)

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    plain, x = copy.deepcopy(net), torch.randn(3, 4)
    y = by.convert(net, Doubled(estimator="shared"))(x)
    expected = 2 * (2 * x @ plain[0].weight.T + plain[0].bias) @ plain[1].weight.T
    assert torch.allclose(y, expected, atol=1e-5)


def test_batched_gradients_of_folded_convolutions() -> None:
    model = by.convert(Halves(lambda: nn.Conv2d(16, 16, 3, padding=1, bias=False)), {"*": by.BatchEnsemble(4)}).train()
    y = model(torch.randn(64, 16, 4, 4)).mean((0, 2, 3))
    weight = model.head.weight
    (each,) = torch.autograd.grad(y, weight, torch.eye(16), is_grads_batched=True, retain_graph=True)
    (first,) = torch.autograd.grad(y[3], weight)
    assert torch.allclose(each[3], first, atol=1e-5)
