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
from bayesify.memory import COPIES
from bayesify.skeleton import Skeleton


class Network(nn.Module):
    """One with options of its own, and a count of its calls, which is nothing to watch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.scale, self.options, self.shape = 1.0, {"shift": 0.0}, (1, 3)
        self.register_buffer("offset", torch.zeros(3))
        self.parts = nn.ModuleDict({"first": nn.Tanh(), "second": nn.Softplus()})

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        for part in self.parts.values():
            y = part(y)
        y = self.second(y)
        return y * self.scale + self.options["shift"] + self.offset


class Changing(Network):
    """One whose calls change it in one way, and what it says by that."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls, self.list, self.dict = way, 0, [1.0], {"first": 2.0}
        self.register_buffer("seen", torch.ones(3))
        self.register_buffer("cache", None)
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
        if way == "a buffer that was none":
            self.cache = x.mean() if self.cache is None else self.cache
            return y * self.cache
        if way == "a longer buffer":
            self.seen = torch.cat([self.seen, self.seen])
            return y * self.seen.sum()
        if way == "a buffer less":
            y = y * (2 if "seen" in self._buffers else 1)
            self._buffers.pop("seen", None)
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
    COPIES.pop(model, None)


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


def new_attributes(model: nn.Module) -> None:
    model.norm.__dict__ = dict(model.norm.__dict__)
    model.norm.eps = 3.0


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
    "the order of modules": lambda model: model.parts.update({"first": model.parts.pop("first")}),
    "the attributes of a module": new_attributes,
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


WAYS = [
    *("a number", "a list", "a dict", "a buffer", "another buffer", "a tensor", "a module"),
    *("a buffer that was none", "a longer buffer", "a buffer less"),
]


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
    skeleton = COPIES[model].skeleton
    assert not skeleton.ahead and skeleton.targets
    assert sum(target.numel() for target in skeleton.targets.values()) == 0


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.parametrize("family", [by.Ensemble(3), by.ECMP(3), by.MCDropout(0.2), by.LowRankEnsemble(3)], ids=str)
def test_predictions_repeat_under_every_kind_of_draw(family: Any, norm: Callable[[int], nn.Module]) -> None:
    net = nn.Sequential(nn.Linear(4, 6), norm(6), nn.Linear(6, 3))
    model, x = by.convert(net, family).eval(), torch.randn(5, 4)
    first = [by.predict(model, x, samples=6).probs for _ in range(4)]
    assert all(torch.allclose(each, first[0], atol=1e-6) for each in first)


class Storing(nn.Module):
    """One whose calls put other tensors where its buffer was."""

    def __init__(self, stored: str) -> None:
        super().__init__()
        self.a, self.b, self.stored = nn.Linear(4, 4), nn.Linear(4, 4), stored
        self.register_buffer("last", torch.zeros(5, 4))
        self.register_buffer("weight", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.stored == "its input":
            self.last = x
        elif self.stored == "its input's memory":
            self.last.data = x
        else:
            self.weight = self.b.weight.detach()
        return self.a(self.b(x))


@pytest.mark.parametrize("stored", ["its input", "its input's memory", "a weight"])
def test_nothing_is_written_but_the_copys_own(stored: str) -> None:
    model, x = by.convert(Storing(stored), {"a": by.Rank1(4)}).eval(), torch.randn(5, 4)
    before, weight = x.clone(), model.b.weight.clone()
    for _ in range(3):
        probs(model, x)
    assert torch.equal(x, before) and torch.equal(model.b.weight, weight)


def test_another_model_in_the_same_wrapper_is_another_model() -> None:
    first, second = model_of(Network()), model_of(Network())
    wrapper, x = nn.DataParallel(first), torch.randn(5, 4)
    probs(wrapper, x)
    wrapper.module = second
    assert torch.allclose(probs(wrapper, x), probs(second, x))


@pytest.mark.parametrize("family", [by.IBNN(4), by.MeanField()], ids=str)
def test_a_model_that_changes_while_it_predicts(family: Any) -> None:
    model, x = model_of(Network()), torch.randn(5, 4)

    def batches() -> Any:
        yield x
        by.convert(by.revert(model), family).eval()
        model.scale = 7.0
        yield x

    by.predict(model, batches(), samples=8)
    after = probs(model, x)
    forgotten(model)
    assert torch.allclose(after, probs(model, x))


def test_a_function_that_knows_the_model_does_not_keep_it_alive() -> None:
    def predicted() -> weakref.ref[nn.Module]:
        model = model_of(Network())
        model.norm.forward = lambda x: x * model.scale
        by.predict(model, torch.randn(5, 4), samples=4)
        return weakref.ref(model)

    gone = predicted()
    gc.collect()
    assert gone() is None


def test_a_reverted_model_keeps_no_posterior() -> None:
    model = model_of(Network(), by.Ensemble(3))
    by.predict(model, torch.randn(5, 4))
    gone = weakref.ref(model.first.posterior)
    by.revert(model)
    gc.collect()
    assert gone() is None


def test_a_compiled_model_is_not_called_by_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of(Network()), torch.randn(5, 4)
    expected = probs(model, x)
    model._compiled_call_impl = lambda *args: pytest.fail("the model itself was called")
    assert torch.allclose(probs(model, x), expected)
