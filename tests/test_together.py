"""Layers drawn or folded together: the same draws, gradients and independence as of each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.family import Family
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
