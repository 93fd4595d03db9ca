"""A copy that serves again says what a new one would, whatever happened to the model in between."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import bayesify as by
from bayesify import kept as kept_module
from bayesify.skeleton import Skeleton


class Network(nn.Module):
    """One with options of its own, and a count of its calls, which is nothing to watch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.scale, self.options, self.shape = 1.0, {"shift": 0.0}, (1, 3)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.norm(self.first(x))))
        return y * self.scale + self.options["shift"] + self.offset


class Changing(Network):
    """One whose calls change it in one way, and what it says by that."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls, self.list, self.dict = way, 0, [1.0], {"first": 2.0}
        self.register_buffer("seen", torch.ones(3))
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y, way = super().forward(x), self.way
        if way == "a number":
            self.calls += 1
            return y * self.calls
        if way == "a list":
            self.list.append(1.0)
            return y * len(self.list)
        if way == "a dict":
            y = y * self.dict.get("first", 1.0)
            self.dict.clear()
            return y
        if way == "a buffer":
            self.seen += 1
            return y * self.seen
        if way == "another buffer":
            self.seen = self.seen + 1
            return y * self.seen
        if way == "a tensor":
            y = y if self.state is None else y * self.state
            self.state = torch.full((3,), 3.0)
            return y
        if "late" not in self._modules:
            self.late = nn.Identity()
            return y * 2
        return y


def model_of(network: nn.Module, family: Any = None) -> nn.Module:
    with torch.no_grad():
        network.norm.running_mean.normal_()
    return by.convert(network, family or by.Rank1(4)).eval()


def probs(model: nn.Module, x: Tensor) -> Tensor:
    return by.predict(model, x, samples=8).probs


def forgotten(model: nn.Module) -> None:
    kept_module._KEPT.pop(model, None)


def new_copies(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that copies are made of from now on."""
    made: list[nn.Module] = []
    original = Skeleton.__init__

    def counted(self: Skeleton, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        made.append(model)
        original(self, model, *args, **kwargs)

    monkeypatch.setattr(Skeleton, "__init__", counted)
    return made


def load(model: nn.Module) -> None:
    model.load_state_dict({name: t + 1 if t.is_floating_point() else t for name, t in model.state_dict().items()})


def set_weight(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() + 1)


def hook(model: nn.Module) -> None:
    model.norm.register_forward_hook(lambda module, args, output: output + 1)


def prune_first(model: nn.Module) -> None:
    prune.l1_unstructured(model.first, "weight", amount=9)


def half_the_steps(model: nn.Module) -> None:
    model.train()
    torch.nn.functional.cross_entropy(model(torch.randn(9, 4)), torch.arange(9) % 3).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.eval()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a number": lambda model: setattr(model, "scale", 3.0),
    "an entry of a dict": lambda model: model.options.update(shift=torch.pi),
    "a value of a parameter": lambda model: model.first.weight.data.add_(1),
    "a value of the posterior": lambda model: model.second.posterior.in_loc.data.mul_(2),
    "a value of a buffer": lambda model: model.offset.data.copy_(torch.tensor([1.0, 0.0, 2.0])),
    "running statistics": lambda model: model.norm.running_mean.data.add_(1),
    "another parameter": set_weight,
    "another buffer": lambda model: setattr(model, "offset", torch.tensor([1.0, 0.0, 2.0])),
    "a state dict": load,
    "a module": lambda model: setattr(model, "norm", nn.BatchNorm1d(6).eval()),
    "the option of a module": lambda model: setattr(model.norm, "eps", 3.0),
    "a hook": hook,
    "pruning": prune_first,
    "a training step": half_the_steps,
    "double precision": lambda model: model.double(),
}


@pytest.mark.parametrize("family", [by.Rank1(4), by.MeanField(), by.BatchEnsemble(4), by.EMP(3)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_seen(change: str, family: Any) -> None:
    if change == "a value of the posterior" and not isinstance(family, by.Rank1):
        pytest.skip("it has another name there")
    model, x = model_of(Network(), family), torch.randn(5, 4)
    before = probs(model, x)
    assert torch.equal(before, probs(model, x))
    CHANGES[change](model)
    x = x.to(model.second.bias.dtype)
    again = probs(model, x)
    forgotten(model)
    assert torch.equal(again, probs(model, x))
    assert not torch.equal(before, again) or change == "double precision"


def test_a_copy_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of(Network()), torch.randn(5, 4)
    first = probs(model, x)
    made = new_copies(monkeypatch)
    assert torch.equal(first, probs(model, x))
    other = by.predict(model, x[:2], samples=20, seed=3).probs
    assert made == []
    forgotten(model)
    assert torch.equal(other, by.predict(model, x[:2], samples=20, seed=3).probs)
    assert made == [model]


WAYS = ["a number", "a list", "a dict", "a buffer", "another buffer", "a tensor", "a module"]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_calls_have_changed_does_not(way: str) -> None:
    model, x = model_of(Changing(way)), torch.randn(5, 4)
    probs(model, x)  # the first time further calls find out which way is shorter
    again = probs(model, x)
    forgotten(model)
    assert torch.equal(again, probs(model, x))


def test_a_call_of_ones_own_gets_a_copy_of_its_own() -> None:
    model, x = model_of(Network()), torch.randn(5, 4)
    before = probs(model, x)

    def call(network: nn.Module, batch: Tensor) -> Tensor:
        network.scale = 5.0
        network.norm.register_forward_hook(lambda module, args, output: output * 2)
        output: Tensor = network(batch)
        return output

    assert not torch.equal(before, by.predict(model, x, samples=8, call=call).probs)
    assert torch.equal(before, probs(model, x))


def test_an_error_loses_nothing() -> None:
    model, x = model_of(Network()), torch.randn(5, 4)
    before = probs(model, x)
    with pytest.raises(RuntimeError):
        probs(model, torch.randn(5, 7))
    assert torch.allclose(before, probs(model, x))


def test_threads_have_a_copy_each() -> None:
    model, inputs = model_of(Network()), [torch.randn(5, 4) for _ in range(4)]
    expected = [probs(model, x) for x in inputs]
    found: dict[int, list[Tensor]] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: [probs(model, inputs[i]) for _ in range(20)]}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, expected[i]) for i in range(4) for each in found[i])


@pytest.mark.parametrize("network", [Network, lambda: nn.Linear(4, 3)], ids=["network", "a layer alone"])
def test_a_kept_copy_keeps_no_model_alive(network: Callable[[], nn.Module]) -> None:
    model = by.convert(network(), by.Rank1(4)).eval()
    by.predict(model, torch.randn(5, 4), samples=4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_kept_copy_holds_no_draws() -> None:
    model = model_of(Network(), by.MeanField())
    by.predict(model, torch.randn(5, 4), samples=4)
    skeleton = kept_module._KEPT[model].skeleton
    assert not skeleton.ahead and skeleton.targets
    assert sum(target.numel() for target in skeleton.targets.values()) == 0
