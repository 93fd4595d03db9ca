"""The copies that draws are written into: whole, apart from the model, and made anew for each prediction."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.conversion.drawn_network import DrawnNetwork


class Keeping(nn.Module):
    """A network whose modules keep things that are shared, refer back, or change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.cache: dict[str, int] = {}
        self.first.cache = self.cache
        self.path, self.settings = [self.second], {"scale": [1.0, 2.0]}
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("some_calls", self.calls[:2])
        self.scaled = self._scaled
        self.seen: Tensor | None = None

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.settings["scale"][1]

    def forward(self, x: Tensor) -> Tensor:
        self.cache["calls"] = self.cache.get("calls", 0) + 1
        self.calls += 1
        self.seen = self.norm(self.first(x))
        return self.path[0](self.scaled(self.seen))


class Careful(nn.Linear):
    """A module that says how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Careful:
        other = Careful(self.in_features, self.out_features)
        other.weight, other.bias, other.copied = self.weight, self.bias, True
        return other


class Stated(nn.Linear):
    """A module that says what of it is kept."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}


class Remembering(nn.Module):
    """A module that reads its layer when it is copied."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.width = self.layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Listing(list, nn.Module):  # type: ignore[type-arg]
    """A module that is a list too."""

    def __init__(self, *entries: int) -> None:
        list.__init__(self, entries)
        nn.Module.__init__(self)

    __hash__ = nn.Module.__hash__


def copied(model: nn.Module) -> nn.Module:
    """The plain network that a model's draws are written into."""
    return DrawnNetwork(model).network


def test_a_copy_has_everything_but_parameters_for_itself() -> None:
    net = Keeping().eval()
    net(torch.randn(5, 3))
    model = by.convert(net, {"first": by.MeanField()})
    made = copied(model)
    model.seen = None  # torch does not copy what has a gradient to come
    shared = dict(model.named_parameters())
    assert all(p is shared[name] for name, p in made.named_parameters()) and "first.weight" in dict(
        made.named_parameters()
    )
    assert [type(m) for m in made.modules()] == [type(m) for m in Keeping().modules()]
    assert all(torch.equal(one, other) for one, other in zip(made.buffers(), model.buffers(), strict=True))
    assert made.cache is made.first.cache and made.cache == {"calls": 1} and made.cache is not model.cache
    assert made.path[0] is made.second is not model.second
    assert made.scaled.__self__ is made
    assert made.settings == model.settings and made.settings["scale"] is not model.settings["scale"]
    made(torch.randn(5, 3))
    assert torch.equal(made.calls, torch.full((3,), 2.0)) and torch.equal(made.some_calls, made.calls[:2])
    assert torch.equal(model.calls, torch.ones(3)) and model.cache == {"calls": 1}


def test_running_statistics_of_a_copy_are_its_own() -> None:
    model = by.convert(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), {"1": by.Rank1(2)})
    made = copied(model)
    made.train()(torch.randn(8, 3) + 5)
    assert torch.equal(model[0].running_mean, torch.zeros(3)) and model[0].num_batches_tracked == 0


def test_running_statistics_that_are_a_view_stay_one() -> None:
    model = by.convert(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), {"1": by.Rank1(2)})
    model.register_buffer("all", torch.zeros(8))
    model[0].running_mean = model.all[:4]
    made = copied(model)
    made[0].running_mean += 1
    assert made.all.sum() == 4 and model.all.sum() == 0


def test_classes_with_a_word_to_say_are_copied_as_they_say() -> None:
    stated = Stated(2, 2)
    stated.handle = lambda: 0
    parts = nn.ModuleList([Careful(2, 2), stated, Listing(1, 2), nn.LSTM(2, 3), nn.Linear(2, 2)])
    made = copied(by.convert(parts, {"4": by.Rank1(2)}))
    assert made[0].copied and made[1].handle is None and list(made[2]) == [1, 2]
    assert all(one is other for one, other in zip(made[3]._flat_weights, made[3].parameters(), strict=True))


@pytest.mark.parametrize("method", [by.Rank1(2), by.BatchEnsemble(3), by.MeanField(), by.ECMP(3)])
def test_predicting_leaves_what_a_network_keeps(method: Any) -> None:
    model = by.convert(Keeping(), method).eval()
    by.predict(model, torch.randn(6, 3), samples=4)
    by.draw(model)(torch.randn(6, 3))
    assert model.cache == {} and model.seen is None and torch.equal(model.calls, torch.zeros(3))


PARTS = {
    "compiled": lambda part: torch.compile(part, backend="eager"),
    "traced": torch.fx.symbolic_trace,
    "remembering": lambda part: nn.Sequential(Remembering(part[0]), part[1]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_look_at_their_layers_while_they_are_copied(name: str) -> None:
    part = PARTS[name](nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model, x = by.convert(nn.Sequential(part, nn.Linear(4, 3)), by.ECMP(3)), torch.randn(6, 4)
    kept = by.predict(model, x, samples=2, draws=True).draws
    assert torch.allclose(kept[1], by.draw(model, 0, index=1)(x), atol=1e-6)


def test_a_seed_says_which_points_are_chosen() -> None:
    class Points(by.EMP):
        noisy = False

    model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), Points(5, jitter=0.5))
    x = torch.randn(2, 4)
    assert all(torch.equal(by.draw(model, 1)(x), by.draw(model, 1)(x)) for _ in range(5))


@torch.no_grad()
def test_ecmp_under_vmap() -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), by.ECMP(3)).eval(), torch.randn(5, 4)
    stacked = {name: torch.stack([p, p]) for name, p in model.named_parameters()}

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,))

    assert torch.vmap(run, randomness="different")(stacked).shape == (2, 5, 3)


def test_hooks_with_the_keys_of_the_scopes_in_another_place_stay() -> None:
    """As new ones may have after a model was unpickled in another process."""
    model, calls = by.convert(nn.Sequential(nn.Linear(4, 3)), by.Rank1(2)), []
    (key,) = model._forward_pre_hooks
    model._forward_hooks[key] = lambda module, args, output: calls.append(len(output))
    by.predict(model, torch.randn(10, 4), samples=3)
    assert calls
    assert key in by.revert(model)._forward_hooks and not model._forward_pre_hooks and len(model._forward_hooks) == 1


# Nothing of a prediction is left for the next.


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


def model_of(network: nn.Module, method: Any = None) -> nn.Module:
    with torch.no_grad():
        network.norm.running_mean.normal_()
    return by.convert(network, method or by.Rank1(4)).eval()


def probs(model: nn.Module, x: Tensor) -> Tensor:
    return by.predict(model, x, samples=8).probs


def load(model: nn.Module) -> None:
    model.load_state_dict({name: t + 1 if t.is_floating_point() else t for name, t in model.state_dict().items()})


def set_weight(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() + 1)


def hook(model: nn.Module) -> None:
    model.norm.register_forward_hook(lambda module, args, output: output + 1)


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
    "an entry of a dict": lambda model: model.options.update(shift=torch.tensor([1.0, 0.0, 2.0])),
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
    "a training step": half_the_steps,
    "the order of modules": lambda model: model.parts.update({"first": model.parts.pop("first")}),
    "the attributes of a module": new_attributes,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_seen(change: str) -> None:
    model, x = model_of(Network()), torch.randn(5, 4)
    before = probs(model, x)
    assert torch.equal(before, probs(model, x))
    CHANGES[change](model)
    after = probs(model, x)
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(8)])
    assert torch.allclose(after, loop.softmax(-1).mean(0), atol=1e-6) and not torch.allclose(before, after)


WAYS = [
    *("a number", "a list", "a dict", "a buffer", "another buffer", "a tensor", "a module"),
    *("a buffer that was none", "a longer buffer", "a buffer less"),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_network_that_its_calls_change_is_the_same_in_each_prediction(way: str) -> None:
    model, x = model_of(Changing(way)), torch.randn(5, 4)
    before, keys = copy.deepcopy(model.state_dict()), sorted(vars(model))
    assert torch.equal(probs(model, x), probs(model, x))
    assert list(model.state_dict()) == list(before) and sorted(vars(model)) == keys
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


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


@pytest.mark.parametrize("network", [Network, lambda: nn.Linear(4, 3)], ids=["network", "a layer alone"])
def test_a_prediction_keeps_no_model_alive(network: Callable[[], nn.Module]) -> None:
    model = by.convert(network(), by.Rank1(4)).eval()
    by.predict(model, torch.randn(5, 4), samples=4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


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


@pytest.mark.parametrize("method", [by.IBNN(4), by.MeanField()], ids=str)
def test_a_model_that_changes_while_it_predicts(method: Any) -> None:
    model, x = model_of(Network()), torch.randn(5, 4)

    def batches() -> Any:
        yield x
        by.convert(by.revert(model), method).eval()
        model.scale = 7.0
        yield x

    first = probs(model, x)
    found = by.predict(model, batches(), samples=8).probs
    assert torch.equal(found[:5], first) and found.isfinite().all()
    loop = torch.stack([by.draw(model, 0, index=index)(x) for index in range(8)])
    assert torch.allclose(probs(model, x), loop.softmax(-1).mean(0), atol=1e-6)


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


def test_a_compiled_model_is_not_called_by_its_copy() -> None:
    model, x = model_of(Network()), torch.randn(5, 4)
    expected = probs(model, x)
    model._compiled_call_impl = lambda *args: pytest.fail("the model itself was called")
    assert torch.allclose(probs(model, x), expected)


class Keeps(nn.Module):
    """A network that keeps an activation, as a hook for features would."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.last, self.where = nn.Linear(4, 8), nn.Linear(8, 3), where
        self.register_buffer("buffer", torch.zeros(8))
        self.kept: Any = {}
        self.itself: list[Any] = []
        self.itself.append(self.itself)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.where == "buffer":
            self.buffer = h.mean(0)
        self.first.output = h  # type: ignore[assignment]
        self.kept = {"dict": {"h": h}, "list": [h], "tuple": ([h], h)}.get(self.where, h)
        return self.last(h)


@pytest.mark.parametrize("where", ["attribute", "buffer", "dict", "list", "tuple"])
def test_networks_that_keep_activations_are_drawn_and_converted(where: str) -> None:
    net, x = Keeps(where), torch.randn(6, 4)
    net(x)
    model = by.convert(net, by.Ensemble(2, init_copies="random"), example=x)
    model(x).sum().backward()
    p = by.predict(model, x, samples=2, draws=True)
    assert torch.allclose(p.draws, torch.stack([by.draw(model, index=i)(x) for i in range(2)]), atol=1e-6)
    by.check(model, x)
    assert type(by.revert(model).first) is nn.Linear
