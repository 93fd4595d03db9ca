"""Copies of models against `copy.deepcopy`, for modules that keep more than layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.copies import plain_copy


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


def test_a_copy_has_everything_but_parameters_for_itself() -> None:
    model = Keeping().eval()
    model(torch.randn(5, 3))
    made = plain_copy(model)
    model.seen = None  # torch does not copy what has a gradient to come
    expected = copy.deepcopy(model)
    assert all(one is other for one, other in zip(made.parameters(), model.parameters(), strict=True))
    assert [type(m) for m in made.modules()] == [type(m) for m in expected.modules()]
    assert all(torch.equal(one, other) for one, other in zip(made.buffers(), expected.buffers(), strict=True))
    assert made.cache is made.first.cache and made.cache == expected.cache and made.cache is not model.cache
    assert made.path[0] is made.second is not model.second
    assert made.scaled.__self__ is made
    assert made.settings == model.settings and made.settings["scale"] is not model.settings["scale"]
    made(torch.randn(5, 3))
    assert torch.equal(made.calls, torch.full((3,), 2.0)) and torch.equal(made.some_calls, made.calls[:2])
    assert torch.equal(model.calls, torch.ones(3)) and model.cache == {"calls": 1}


def test_running_statistics_of_a_copy_are_its_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    made = plain_copy(model)
    made.train()(torch.randn(8, 3) + 5)
    assert torch.equal(model[0].running_mean, torch.zeros(3)) and model[0].num_batches_tracked == 0


def test_classes_with_a_word_to_say_are_copied_as_they_say() -> None:
    stated = Stated(2, 2)
    stated.handle = lambda: 0
    made = plain_copy(nn.ModuleList([Careful(2, 2), stated, Listing(1, 2), nn.LSTM(2, 3)]))
    assert made[0].copied and made[1].handle is None and list(made[2]) == [1, 2]
    assert all(one is other for one, other in zip(made[3]._flat_weights, made[3].parameters(), strict=True))


@pytest.mark.parametrize("family", [by.Rank1(2), by.BatchEnsemble(3), by.MeanField(), by.ECMP(3)])
def test_predicting_leaves_what_a_network_keeps(family: by.Family) -> None:
    model = by.convert(Keeping(), family).eval()
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


def test_running_statistics_that_are_a_view_stay_one() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    model.register_buffer("all", torch.zeros(8))
    model[0].running_mean = model.all[:4]
    made = plain_copy(model)
    made[0].running_mean += 1
    assert made.all.sum() == 4 and model.all.sum() == 0


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
