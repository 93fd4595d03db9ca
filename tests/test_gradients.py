"""What gradients reach: layers that are called, of first and second order, in calls of all kinds."""

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
from bayesify.layers import BayesianLayer, bayesian_layers
from bayesify.methods.base import Draws, Method, Perturbation, Site

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


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def grads(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("method", ELEMENTWISE, ids=str)
def test_a_layer_that_is_not_called_gets_no_gradient(method: Method) -> None:
    model = by.convert(Branches(), {"*": method})
    found = grads(model, torch.randn(6, 3, 5, 5))
    for name, grad in found.items():
        assert (grad is None) == name.startswith("unused"), name
        assert grad is None or grad.isfinite().all()


def drawn_weight(layer: BayesianLayer) -> Tensor:
    """The weight that a layer is about to use."""
    site = layer.sites()[""]
    return layer.one_draw(site, layer.perturbation(site))["weight"]


@pytest.mark.parametrize("method", ELEMENTWISE, ids=str)
def test_draws_of_layers_are_independent_and_new_in_each_call(method: Method) -> None:
    net = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    model = by.convert(net, {"*": method}).train()
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(1.0)
            for tensor in layer.posterior.parameters():
                tensor.copy_(torch.arange(2.0, 2 + len(tensor)).reshape(-1, 1, 1) if tensor.dim() == 3 else tensor)
    seen = []
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, args: seen.append(drawn_weight(layer)))
    for _ in range(2):
        model(torch.randn(4, 30))
    drawn = torch.stack([each.detach().flatten() for each in seen])
    correlations = torch.corrcoef(drawn).fill_diagonal_(0)
    assert drawn.std(1).min() > 0 and correlations.abs().max() < 0.15


@pytest.mark.parametrize("method", ELEMENTWISE[:2], ids=str)
def test_tensors_of_different_precision_are_drawn(method: Method) -> None:
    net = nn.Sequential(nn.Linear(3, 4).double(), nn.Linear(4, 4).double(), nn.Linear(4, 2).double())
    net[1].bias.data = net[1].bias.data.float()
    model = by.convert(net, {"*": method})
    model[1].bias.data = model[1].bias.data.double()
    y = model(torch.randn(5, 3, dtype=torch.float64))
    assert y.dtype == torch.float64 and y.isfinite().all()


def test_second_derivatives_of_drawn_layers() -> None:
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
@pytest.mark.parametrize("method", [*ELEMENTWISE, by.BatchEnsemble(4), by.Rank1(4)], ids=str)
def test_a_head_learns_behind_a_stem_without_gradients(stem: Any, method: Method) -> None:
    model = by.convert(Halves(lambda: nn.Conv2d(16, 16, 3, padding=1)), {"*": method})
    model.modes = (stem, contextlib.nullcontext)
    model(torch.randn(8, 16, 12, 12)).sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == name.startswith("head"), name


@pytest.mark.parametrize("method", ELEMENTWISE[:2], ids=str)
def test_a_layer_may_ask_for_gradients_in_a_call_without_them(method: Method) -> None:
    model = by.convert(Halves(lambda: nn.Linear(4, 4)), {"*": method})
    model.modes = (contextlib.nullcontext, torch.enable_grad)
    with torch.no_grad():
        y = model(torch.randn(3, 4))
    y.sum().backward()
    assert model.head.weight.grad is not None and model.stem.weight.grad is None


def _zero(layer: nn.Module, args: object) -> None:
    layer.weight.detach().zero_()


def test_a_weight_that_changes_during_a_call_is_drawn_as_it_is() -> None:
    for layer, method in (
        (lambda: nn.Linear(4, 4, bias=False), by.MeanField(estimator="shared", init_log_std=(-40.0, -40.0))),
        (lambda: nn.Conv2d(16, 16, 3, padding=1, bias=False), by.BatchEnsemble(4)),
    ):
        model = by.convert(Halves(layer), {"*": method})
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


# Tensors that something computes at each call of their layer.

COMPUTED: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "pruned": ("weight", lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5)),
    "pruned bias": ("bias", lambda layer: prune.l1_unstructured(layer, "bias", amount=0.5)),
    "weight norm": ("weight", nn.utils.weight_norm),
    "spectral norm": ("weight", nn.utils.spectral_norm),
    "parametrized": ("weight", nn.utils.parametrizations.spectral_norm),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("method", [by.MeanField(), by.BatchEnsemble(2)], ids=str)
@pytest.mark.parametrize("computed", COMPUTED)
def test_what_is_computed_after_conversion_is_refused_wherever_it_is_used(
    computed: str, method: Method, tmp_path: Path
) -> None:
    name, change = COMPUTED[computed]
    model, x = by.convert(mlp(), {"2": method}), torch.randn(6, 4)
    change(model[2])
    uses = [
        lambda: model(x),
        lambda: by.predict(model, x),
        lambda: by.draw(model),
        lambda: by.kl(model),
        lambda: by.add_kl_grad_(model, n=10),
        lambda: by.save(model, tmp_path / "model.safetensors"),
    ]
    for use in uses:
        with pytest.raises(by.BayesifyError, match=rf"layer '2': its {name} is not a parameter.*prune\.remove"):
            use()
    assert not list(tmp_path.iterdir())
    if computed == "pruned":
        prune.remove(model[2], "weight")
        assert by.draw(model, 0)(x).isfinite().all()


@pytest.mark.parametrize("tensor", ["weight_hh_l0", "in_proj_weight"])
def test_pruned_tensors_of_sequence_layers_are_refused(tensor: str) -> None:
    def make() -> nn.Module:
        return nn.LSTM(4, 4, batch_first=True) if "hh" in tensor else nn.MultiheadAttention(4, 2, batch_first=True)

    model = by.convert(nn.ModuleDict({"inner": make(), "head": nn.Linear(4, 3)}), {"inner": by.MeanField()})
    prune.random_unstructured(model["inner"], tensor, amount=0.5)
    with pytest.raises(by.BayesifyError, match=f"layer 'inner': its {tensor} is not a parameter"):
        by.draw(model)
    pruned = nn.ModuleDict({"inner": make(), "head": nn.Linear(4, 3)})
    prune.random_unstructured(pruned["inner"], tensor, amount=0.5)
    assert list(bayesian_layers(by.convert(pruned, by.MeanField()))) == ["head"]


def test_a_layer_with_a_pruned_bias_is_left_out_or_refused_by_name() -> None:
    net = mlp()
    prune.l1_unstructured(net[0], "bias", amount=1)
    with pytest.raises(by.ConversionError, match=r"0: it uses the old-style.*is pruned.*prune\.remove"):
        by.convert(net, {"0": by.EMP(3, init_copies="random")})
    assert "is pruned" in by.summary(by.convert(net, by.Rank1(2))).rows[0].note
    assert list(bayesian_layers(net)) == ["2"]


# Draws and gradients of methods' and torch's own making.


def test_a_method_of_ones_own_with_another_draw() -> None:
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
