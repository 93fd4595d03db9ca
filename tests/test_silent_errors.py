"""Networks that once gave wrong numbers without a word, and their relatives: right now, or refused."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from draws import watched_calls
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.conversion import check_rows
from bayesify.errors import BayesifyError, RowError
from bayesify.layers.call_scope import OpenScope

METHODS = [by.Rank1(3, dropout_rate=0.1), by.MeanField(init_log_std=(-1.0, -1.0)), by.BatchEnsemble(3, mean_std=0.5)]
METHODS += [by.ECMP(3, patches=("output",), init_copies="random"), by.DropConnect(0.3)]


def by_hand(model: nn.Module, x: Any, samples: int, seed: int = 0) -> Tensor:
    """The predictive as the average over networks that are each drawn and called by themselves."""
    outputs = []
    for index in range(samples):
        network = by.draw(model, seed, index=index)
        outputs.append(network(**x) if isinstance(x, dict) else network(x))
    return torch.stack(outputs).softmax(-1).mean(0)


def agrees(model: nn.Module, x: Any, samples: int = 6, **options: Any) -> bool:
    found = by.predict(model, x, samples, **options).probs
    return torch.allclose(found, by_hand(model, x, samples), atol=1e-5)


# Nothing that was found out about a network outlives it.


class ReadsItself(nn.Module):
    """Calls a layer, and computes with its weight too; by flags it mixes rows, or changes its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.mixes, self.reads = False, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        if self.mixes or len(x) > 8:
            h = h - h.mean(0)
        return self.second(h) / (1 + self.second.weight.norm() * self.reads)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("flag", ["mixes", "reads"])
def test_verdicts_do_not_outlive_what_they_were_tested_on(method: Any, flag: str) -> None:
    model, x = by.convert(ReadsItself(), method).eval(), torch.randn(3, 4)
    assert agrees(model, x)
    setattr(model, flag, True)
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    assert agrees(model, x) and agrees(model, torch.randn(12, 4))
    for rows in (1, 2, 20):
        assert agrees(model, torch.randn(rows, 4))


class Activated(nn.Module):
    """A third-party layer whose activation can be exchanged."""

    def __init__(self, activation: Any = None) -> None:
        super().__init__()
        self.weight, self.activation = nn.Parameter(torch.randn(3, 4)), activation or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x @ self.weight.T)


def test_a_layer_that_changed_between_conversions_is_tried_again() -> None:
    net = nn.Sequential(Activated())
    by.revert(by.convert(net, by.Rank1(2)))
    net[0].activation = nn.Hardtanh()
    with pytest.raises(by.ConversionError, match="found no layer"):  # no longer linear
        by.convert(net, by.Rank1(2, mean_std=3.0))
    by.check(by.convert(net, {"0": by.MeanField()}), torch.randn(6, 4))


# Shapes that depend on the data.


class Experts(nn.Module):
    """Routes rows to experts by their own values, in the ways that people write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gate = how, nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = self.gate(x).argmax(1), x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            if self.how == "mask":
                y[chosen == number] = expert(x[chosen == number])
            elif self.how == "nonzero":
                rows = (chosen == number).nonzero().flatten()
                if len(rows):
                    y = y.index_add(0, rows, expert(x[rows]))
            else:
                used = chosen.unique()
                y = y + (expert(x) * (chosen == number).unsqueeze(1) if number in used.tolist() else 0)
        return y


@pytest.mark.parametrize("how", ["mask", "nonzero", "unique"])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_data_dependent_shapes_are_computed_draw_by_draw(how: str, method: Any, rows: int) -> None:
    torch.manual_seed(rows)
    model = by.convert(Experts(how), {"*": by.MeanField(init_log_std=(-1.0, -1.0))} if rows == 17 else method)
    assert agrees(model.eval(), torch.randn(rows, 4))


# Third-party layers with a fused nonlinearity.


class ConvReLU(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.clamp_min(0), self.bias)


class Leaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x @ self.w)


class Bounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-30, 30)


class NormReLU(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class PositiveNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight.abs(), self.bias, self.training)


FUSED = {
    "conv-relu": (lambda: ConvReLU(2, 3, 3), (7, 2, 5, 5)),
    "clamped": (lambda: Clamped(4, 3), (7, 4)),
    "leaky": (Leaky, (7, 4)),
    "bounded": (lambda: Bounded(4, 3), (7, 4)),
    "norm-relu": (lambda: NormReLU(4), (7, 4)),
    "positive-norm": (lambda: PositiveNorm(4), (7, 4)),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize(
    "method", [by.Rank1(2, mean_std=2.0), by.IBNN(2, mean_std=2.0), by.Ensemble(2, init_copies="random")], ids=str
)
def test_a_fused_nonlinearity_trains_the_function_that_it_predicts(name: str, scale: float, method: Any) -> None:
    make, shape = FUSED[name]
    net = nn.Sequential(make(), nn.Flatten(), nn.LazyLinear(3))
    x = scale * torch.randn(shape)
    net(x)
    try:
        model = by.convert(net, {"0": method}).eval()
    except BayesifyError:
        return  # refused, with a reason
    with torch.no_grad():
        with watched_calls(model) as call, model[0].scope.drawing(per_row=True):
            found = model(x)
        for row in range(len(x)):
            expected = call.network(model, row).eval()(x)[row]
            assert torch.allclose(found[row], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    by.check(model, x)


def test_check_compares_a_training_row_with_the_drawn_network() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.layer.weight.norm()

    model, x = by.convert(Reads(), by.Rank1(2, mean_std=1.0)), torch.randn(6, 4)
    for call in (lambda: by.check(model, x), lambda: model.train()(x)):
        with pytest.raises(RowError, match="layer 'layer': its weight is read outside of its call"):
            call()


def test_check_finds_rows_that_are_mixed_after_the_last_layer() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y - 0.5 * y.mean(0)

    with pytest.raises(RowError, match="mixes rows of the batch"):
        by.check(by.convert(Mixes(), by.Rank1(2, mean_std=1.0)), torch.randn(6, 4))


def test_check_finds_mixed_outputs_beside_much_larger_ones() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return torch.cat([1e4 * y[:, :1], y[:, 1:] - 0.5 * y[:, 1:].mean(0)], 1)

    with pytest.raises(RowError, match="mixes rows of the batch"):
        by.check(by.convert(Mixes(), by.Rank1(2, mean_std=1.0)), torch.randn(6, 4))


def test_check_takes_outputs_that_are_rounding_errors_beside_others() -> None:
    class Cancels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 64), nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.first(x).relu())
            total = y.sum(1, keepdim=True)
            return torch.cat([y, total - y[:, :1] - y[:, 1:2] - y[:, 2:], 0 * total, (y[:, :1] - 1e3).exp()], 1)

    for seed in range(20):
        torch.manual_seed(seed)
        by.check(by.convert(Cancels(), by.Rank1(2, mean_std=1.0)), torch.randn(6, 4))


# Networks that keep what they computed.


class Box:
    def __init__(self) -> None:
        self.value: Tensor | None = None


class Keeps(nn.Module):
    """Computes class embeddings once, and keeps them in one of many ways."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.text, self.image = where, nn.Linear(5, 4), nn.Linear(4, 4)
        self.names: Tensor
        self.register_buffer("names", torch.randn(3, 5))
        self.register_buffer("kept_buffer", None)
        self.kept, self.table, self.rows, self.is_ready, self.box = None, {}, [], False, Box()

    def classes(self) -> Tensor:
        if self.where == "attribute":
            if self.kept is None:
                self.kept = self.text(self.names)
            return self.kept
        if self.where == "buffer":
            if self.kept_buffer is None:
                self.kept_buffer = self.text(self.names)
            return self.kept_buffer
        if self.where == "dict":
            if "classes" not in self.table:
                self.table["classes"] = self.text(self.names)
            return self.table["classes"]
        if self.where == "list":
            if not self.rows:
                self.rows.append(self.text(self.names))
            return self.rows[0]
        if self.where == "object":
            if self.box.value is None:
                self.box.value = self.text(self.names)
            return self.box.value
        if not self.is_ready:
            self.is_ready, self.late = True, self.text(self.names)
        return self.late

    def forward(self, x: Tensor) -> Tensor:
        return self.image(x) @ self.classes().T


KEPT = ["attribute", "buffer", "dict", "list", "flag", "object"]


def keeping(where: str) -> nn.Module:
    torch.manual_seed(0)
    method = by.MeanField(init_log_std=(-0.5, -0.5), estimator="shared")
    return by.convert(Keeps(where), {"text": method}).eval()


@pytest.mark.parametrize("where", KEPT)
@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("called_before", [False, True])
def test_each_draw_starts_without_what_others_have_kept(where: str, rows: int, called_before: bool) -> None:
    model, x = keeping(where), torch.randn(rows, 4)
    fresh = copy.deepcopy(model)
    if called_before:
        with torch.no_grad():
            model(x)
    p = by.predict(model, x, 8)
    assert torch.allclose(p.probs, by_hand(fresh, x, 8), atol=1e-5)
    assert torch.allclose(p.probs, by_hand(model, x, 8), atol=1e-5)
    assert p.epistemic.max() > 0.05
    assert torch.allclose(by.predict(model, x, 8, batch_size=1).probs, p.probs, atol=1e-5)
    assert torch.allclose(by.predict(pickle.loads(pickle.dumps(model)), x, 8).probs, p.probs, atol=1e-6)


def test_the_only_draw_does_not_start_from_what_a_call_has_read_from_the_weight() -> None:
    """The call that is refused has stored what it read; all draws of one component are the same."""

    class Merges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.merged = nn.Linear(4, 3), None

        def forward(self, x: Tensor) -> Tensor:
            if self.merged is None:
                self.merged = 2 * self.layer.weight
            return self.layer(x) + x @ self.merged.mT

    torch.manual_seed(0)
    model = by.convert(Merges().bfloat16(), by.BatchEnsemble(1, mean_std=0.5)).eval()
    x = torch.randn(5, 4).bfloat16()
    expected = by.predict(model, x, 2).probs
    with torch.no_grad(), pytest.raises(RowError, match="the plain network with that draw"):
        model(x)
    assert torch.equal(by.predict(model, x, 2).probs, expected)


@pytest.mark.parametrize("where", KEPT)
def test_a_call_that_may_use_what_another_draw_has_kept_is_warned_of(where: str) -> None:
    model, x = keeping(where), torch.randn(9, 4)
    with torch.no_grad():
        model(x)
        with pytest.warns(UserWarning, match=r"the network stores results of its calls in '.*another draw"):
            model(x)
        model(x)  # once


def test_what_does_not_depend_on_a_draw_may_be_kept() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.table, self.calls = nn.Linear(4, 3), None, []

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(len(x))
            if self.table is None:
                self.table = torch.arange(4.0)
            return self.layer(x + self.table)

    model, x = by.convert(Positions(), by.Rank1(2)).eval(), torch.randn(9, 4)
    for _ in range(3):
        model(x)
    assert len(model.calls) == 3 and agrees(model, x)


@pytest.mark.parametrize("samples", [2, 8])
def test_a_network_that_keeps_results_out_of_sight_is_refused(samples: int) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept, self.is_kept = nn.Linear(4, 3), np.zeros((3, 4), np.float32), np.zeros(1, bool)

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_kept[0]:
                self.kept[:], self.is_kept[:] = self.layer.weight.numpy(), True
            return x @ torch.from_numpy(self.kept).T

    with pytest.raises(BayesifyError, match="keeps results of its calls where they can't be seen"):
        by.predict(by.convert(Hidden(), by.Rank1(2)).eval(), torch.randn(9, 4), samples)


def test_what_somebody_sets_after_conversion_stays() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), None

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if self.scale is None else self.layer(x) * self.scale

    model, x = by.convert(Scaled(), by.Rank1(2)).eval(), torch.randn(5, 4)
    before = by.predict(model, x, 4, draws=True).draws
    model(x)
    model.scale = torch.tensor(3.0)
    model(x)
    assert torch.allclose(by.predict(model, x, 4, draws=True).draws, 3 * before, atol=1e-5)


def test_a_parameter_that_a_call_changes_is_refused_by_name() -> None:
    class Merges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.other.weight.add_(1)
            return self.layer(x) + self.other(x)

    with pytest.raises(BayesifyError, match=r"'other\.weight' changed"):
        by.predict(by.convert(Merges(), {"layer": by.Rank1(2)}).eval(), torch.randn(9, 4), 3)


# Composed models.


def test_parts_that_were_converted_apart_draw_noise_of_their_own() -> None:
    method = by.MeanField(init_log_std=(0.0, 0.0))
    block = nn.Sequential(nn.Linear(4, 4, bias=False))
    first = by.convert(copy.deepcopy(block), method)
    for second in (by.convert(copy.deepcopy(block), method), copy.deepcopy(first)):
        model = nn.Sequential(first, second)
        noise = torch.stack(
            [
                torch.stack([draw[0][0].weight - block[0].weight, draw[1][0].weight - block[0].weight]).flatten(1)
                for draw in (by.draw(model, index=i) for i in range(200))
            ]
        )
        correlation = torch.corrcoef(noise.detach().transpose(0, 1).flatten(1))[0, 1]
        assert abs(float(correlation)) < 0.1
        assert agrees(model.eval(), torch.randn(9, 4))


def test_parts_that_were_converted_apart_meet_in_all_combinations_of_components() -> None:
    parts = [by.convert(nn.Sequential(nn.Linear(1, 1, bias=False)), by.BatchEnsemble(3)) for _ in range(2)]
    for part in parts:
        part[0].posterior.in_loc.data = torch.tensor([[1.0], [2.0], [3.0]])
        part[0].posterior.out_loc.data.fill_(1)
        part[0].weight.data.fill_(1)
    model = nn.Sequential(*parts)
    drawn = [(d[0][0].weight.item(), d[1][0].weight.item()) for d in (by.draw(model, index=i) for i in range(9))]
    assert len(set(drawn)) == 9


def test_a_converted_network_draws_the_same_inside_of_another() -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(4, 3)), by.IBNN(2)), torch.randn(5, 4)
    assert torch.equal(by.predict(nn.Sequential(model).eval(), x, 4).probs, by.predict(model.eval(), x, 4).probs)


# Tolerances.


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e6])
def test_rows_that_are_mixed_in_tiny_or_large_numbers_are_found(size: float) -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(size * (x + 0.01 * x.mean(0)))

    class BesideLargeNumbers(Mixes):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.cat([1e6 + 0 * x[:, :1], size * (x + 0.01 * x.mean(0))[:, 1:]], 1))

    for net in (Mixes(), BesideLargeNumbers()):
        with pytest.raises(RowError, match="Rows are mixed"):
            by.check(by.convert(net, by.Rank1(2)), torch.randn(6, 4))


# Threads.


@pytest.mark.parametrize("kind", ["linear", "third-party"])
def test_calls_from_several_threads_are_draws_of_their_own(kind: str) -> None:
    net = nn.Sequential(nn.Linear(4, 16) if kind == "linear" else Activated(), nn.Tanh())
    model = by.convert(net, by.BatchEnsemble(4, mean_std=1.0)).eval()
    x = torch.randn(8, 4)
    members = torch.stack([member(x) for member in by.members(model)])
    start = threading.Barrier(4)

    def call(_: int) -> list[Tensor]:
        start.wait()
        with torch.no_grad():
            return [model(x) for _ in range(100)]

    with ThreadPoolExecutor(4) as pool:
        outputs = [output for outputs in pool.map(call, range(4)) for output in outputs]
    distances = torch.stack([(members - output).abs().amax((1, 2)) for output in outputs])
    assert distances.min(1).values.max() < 1e-5
    assert len(distances.argmin(1).unique()) == 4


def test_a_buffer_that_another_thread_changes_meanwhile_is_not_taken_for_a_result_of_a_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = by.convert(nn.Sequential(Counts()), {"0": by.BatchEnsemble(2)}).eval()

    def called_elsewhere(network: nn.Module) -> bool:
        model[0].calls += 1
        return True

    monkeypatch.setattr(check_rows, "may_store", called_elsewhere)
    for _ in range(3):  # warnings are errors
        model(torch.randn(2, 4))


def test_threads_that_call_a_model_with_a_compiled_part_at_once_are_refused() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(20)
            return x

    model = by.convert(nn.Sequential(nn.Linear(3, 3), Waits(), nn.Linear(3, 3)), by.BatchEnsemble(2)).eval()
    x = torch.randn(5, 3)
    for compiled in (False, True):
        if compiled:
            model[2].compile(backend="eager")
        model(x)
        inside.clear(), go_on.clear()
        thread = threading.Thread(target=lambda: model(x))
        thread.start()
        assert inside.wait(20)
        if compiled:
            with pytest.raises(BayesifyError, match="compiled part at once"):
                model(x)
        else:
            model(x)
        go_on.set()
        thread.join(20)


def test_draws_per_row_in_one_thread_leave_those_of_another_shared() -> None:
    model = by.convert(nn.Linear(4, 3), by.Rank1(2, dropout_rate=0.3)).eval()
    x, y = torch.ones(64, 4), torch.zeros(64).long()
    stop = threading.Event()

    def bounds() -> None:
        while not stop.is_set():
            by.elbo(model, x, y, n=64)

    thread = threading.Thread(target=bounds)
    thread.start()
    try:
        with torch.no_grad():
            assert all(torch.equal(out, out[:1].expand_as(out)) for out in (model(x) for _ in range(200)))
    finally:
        stop.set()
        thread.join()


# Dicts.


class Named(nn.Module):
    """Takes an input with rows, and something that is the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.layer(x + shift)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, None])
@pytest.mark.parametrize("rows", [2, 3, 8, 9])
@pytest.mark.parametrize("order", [("x", "shift"), ("shift", "x")])
def test_entries_of_a_dict_that_have_no_rows_are_found(batch_size: int | None, rows: int, order: Any) -> None:
    model = by.convert(Named(), by.Rank1(2, mean_std=1.0)).eval()
    inputs = {"x": torch.randn(rows, 8), "shift": torch.randn(8)}
    data = {key: inputs[key] for key in order}
    p = by.predict(model, data, 4, batch_size=batch_size)
    assert p.probs.shape == (rows, 3)
    assert torch.allclose(p.probs, by_hand(model, data, 4), atol=1e-5)
    adaptive = by.predict(model, data, by.Adaptive(max=40, first=4, tolerance=0.3))
    assert adaptive.probs.shape == (rows, 3)


def test_a_table_beside_time_major_sequences_is_not_cut() -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mix = nn.Linear(4, 3), nn.Linear(6, 1)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:  # (T, B, 4), (T, 6)
            return self.layer(x + self.mix(table)[:, None]).mean(0)

    model = by.convert(Sequences(), {"layer": by.Rank1(2, mean_std=1.0)}, batch_dim=1).eval()
    data = {"x": torch.randn(5, 6, 4), "table": torch.randn(5, 6)}
    p = by.predict(model, data, 4, batch_size=4)
    assert p.probs.shape == (6, 3) and torch.allclose(p.probs, by_hand(model, data, 4), atol=1e-5)


def test_an_entry_that_may_have_rows_or_not_is_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return self.layer(x + other.mean())

    model = by.convert(Both(), by.Rank1(2)).eval()
    with pytest.raises(BayesifyError, match=r"'other' may have a row for each of 6 rows or be the same for all"):
        by.predict(model, {"x": torch.randn(6, 4), "other": torch.randn(6)}, 4, batch_size=2)


@pytest.mark.parametrize("options", [{"samples": 2}, {"mixture": "replicate"}], ids=str)
@torch.no_grad()
def test_the_bound_does_not_repeat_what_is_the_same_for_all_rows(options: Any) -> None:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, prototypes: Tensor, x: Tensor) -> Tensor:
            return self.layer(x) @ prototypes.T  # repeated prototypes would be further classes

    prototypes, x, y = torch.randn(3, 5), torch.randn(6, 4), torch.randint(3, (6,))
    model = by.convert(Prototypes(), by.BatchEnsemble(2, mean_std=1.0)).eval()
    members = torch.stack([member(prototypes, x).log_softmax(1) for member in by.members(model)])
    found = by.elbo(model, {"x": x, "prototypes": prototypes}, y, n=6, **options).log_likelihood
    each = members.gather(2, y.expand(2, 6).unsqueeze(2)).squeeze(2)
    halves = [(each[k, ::2].mean() + each[1 - k, 1::2].mean()) / 2 for k in (0, 1)]  # a row keeps its component
    expected = [each.mean()] if "mixture" in options else halves
    assert min(float((found - value).abs()) for value in expected) < 1e-5


# Rows that are chosen by what they contain.


@pytest.mark.parametrize("how", ["mask", "nonzero"])
def test_experts_that_get_rows_by_their_content_are_refused_in_training(how: str) -> None:
    model = by.convert(Experts(how), by.Rank1(2))
    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(RowError):
            model(torch.randn(6, 4))
    by.convert(Experts(how), by.MeanField(estimator="shared"))(torch.randn(6, 4))


# The first step of training.


class TimeMajor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # (T, B, 3)
        return self.head(self.embed(x).relu().mean(0))


class RareExpert(nn.Module):
    """A layer for all rows, and one more for those whose first feature is large."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output, rows = self.common(x), (x[:, 0] > 5).nonzero().flatten()
        return output.index_add(0, rows, self.rare(x[rows])) if len(rows) else output


@pytest.mark.parametrize("rare", [1, 2])
def test_an_expert_that_gets_one_row_of_a_batch_says_what_to_do(rare: int) -> None:
    model, x = by.convert(RareExpert(), by.Rank1(2)).train(), torch.rand(4, 3)
    model(x)  # none of these rows is for the expert
    x[:rare, 0] = 9.0
    with pytest.raises((RuntimeError, IndexError, RowError)) as caught:
        model(x)
    said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert "layer 'rare' got" in said[-1] and "convert(model, {'rare': None, '*': method})" in said[-1]
    left_out = by.convert(RareExpert(), {"rare": None, "*": by.Rank1(2)}).train()
    assert left_out(x).shape == (4, 2)


class SortedExperts(nn.Module):
    """Rows or tokens, sorted by their expert, go through the experts, and are put back into order."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 3)
        chosen = tokens[:, 0].clamp(0, 2).long()
        parts = [expert(tokens[chosen == k]) for k, expert in enumerate(self.experts) if bool((chosen == k).any())]
        return torch.cat(parts)[chosen.argsort(stable=True).argsort()].reshape(*x.shape[:-1], 2)


@pytest.mark.parametrize("method", [each for each in METHODS if each.draws_per != "batch"], ids=str)
@pytest.mark.parametrize("chosen", [[2, 0, 1], [[0, 0, 0, 1], [0, 1, 1, 1]]], ids=["rows", "tokens"])
def test_experts_that_get_one_row_each_in_a_later_batch_are_refused(method: Any, chosen: Any) -> None:
    """Each expert's row was repeated for the batch, so the first rows of all were those of the first expert."""
    experts = torch.tensor(chosen)
    first = torch.rand(*experts.shape, 3)
    x = torch.cat([experts.unsqueeze(-1).float(), first[..., 1:]], -1)
    model = by.convert(SortedExperts(), method).train()
    for _ in range(2):
        model(first)  # all rows are for the first expert
    for _ in range(2):
        with pytest.raises(RowError, match="which rows it gets depends on their contents"):
            model(x)


def test_a_layer_that_is_called_in_later_batches_only_is_checked_then(monkeypatch: pytest.MonkeyPatch) -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias, self.uses_bias = nn.Linear(3, 2), nn.Linear(1, 2), False

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.bias(torch.ones(1, 1)) if self.uses_bias else self.layer(x)

    model, x, checked = by.convert(Grows(), by.Rank1(2)).train(), torch.randn(4, 3), []
    opens = next(hook for hook in model._forward_pre_hooks.values() if isinstance(hook, OpenScope))
    check = opens.check
    monkeypatch.setattr(opens, "check", lambda *call: (checked.append(model.uses_bias), check(*call)))
    for model.uses_bias in (False, False, True, True, False):
        with watched_calls(model) as call:
            output = model(x)
        assert torch.allclose(call.network(model, 3)(x)[3], output[3], atol=1e-6) if model.uses_bias else True
    assert checked == [False, True]


@pytest.mark.parametrize("steps", [2, 4, 8])
def test_the_first_step_of_training_proves_that_rows_are_followed(steps: int) -> None:
    model, x = by.convert(TimeMajor(), by.Rank1(2)), torch.randn(steps, 2, 3)
    for _ in range(2):
        with pytest.raises(RowError, match="batch_dim"):
            model(x)
    with pytest.raises(RowError, match="batch_dim"):
        by.elbo(model, x, torch.zeros(2).long(), n=10)
    by.convert(TimeMajor(), by.Rank1(2), batch_dim=1)(x).sum().backward()


def test_the_proof_of_a_compiled_model_runs_in_elbo() -> None:
    model = torch.compile(by.convert(TimeMajor(), by.Rank1(2)), backend="eager")
    with pytest.raises(RowError, match="batch_dim"):
        by.elbo(model, torch.randn(4, 2, 3), torch.zeros(2).long(), n=10)


def test_the_proof_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))
    calls: list[int] = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    model, x = by.convert(net, by.Rank1(2)), torch.randn(8, 4)
    other, given = copy.deepcopy(model), x.clone()
    other[0].scope.check_from[True] = 33  # numbers, of which x has 32
    calls.clear()
    torch.manual_seed(1)
    first = model(x)
    assert calls == [1] and model.training and torch.equal(x, given)
    torch.manual_seed(1)
    assert torch.equal(first, other(x))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


def test_hidden_units_that_are_zero_for_most_rows_are_no_table() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.constant_(net[0].weight, 0.5)
    nn.init.constant_(net[0].bias, -50)
    x = torch.randn(8, 4)
    x[5] = 30
    by.elbo(by.convert(net, by.Rank1(2)), x, torch.zeros(8).long(), n=8).loss.backward()


def test_a_larger_batch_is_proven_again() -> None:
    class MixesMany(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0) if len(x) > 5 else x)

    model = by.convert(MixesMany(), by.Rank1(2))
    model(torch.randn(3, 4))
    with pytest.raises(RowError, match="Rows are mixed"):
        model(torch.randn(6, 4))


def test_a_longer_sequence_is_proven_again() -> None:
    class ReadsForMany(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x) / (1 + self.layer.weight.norm())
            return y - y.mean(1, keepdim=True)  # zero for a single step, whatever the weight

    model = by.convert(ReadsForMany(), by.BatchEnsemble(2))
    model(torch.randn(3, 1, 4))
    with pytest.raises(RowError, match="the plain network with that"):
        model(torch.randn(3, 2, 4))


@pytest.mark.parametrize("method", [by.DropConnect(0.3), by.ECMP(2, patches=("output",)), by.Rank1(2)], ids=str)
@pytest.mark.parametrize(("training", "rows"), [(True, 1), (True, 4), (False, 1), (False, 4)])
def test_a_network_that_reads_the_weight_of_a_layer_is_refused(method: Any, training: bool, rows: int) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) / (1 + self.layer.weight.norm())

    with pytest.raises(RowError, match="the plain network with that"):
        by.convert(Reads(), method).train(training)(torch.randn(rows, 4))


def test_a_network_that_is_random_returns_a_dict_or_takes_logarithms_is_not_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.first(x.log())
            return {"out": self.second(h + torch.randn_like(h)), "other": h}

    for method in (by.Rank1(2), by.MeanField(), by.MeanField(estimator="local"), by.DropConnect(0.1)):
        model = by.convert(Noisy(), method)
        for mode in (True, False):
            model.train(mode)(torch.rand(6, 4))


def test_the_check_leaves_parameters_that_forward_changes_as_they_were() -> None:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.slow = nn.Linear(4, 3), nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.slow.mul_(0.9)
            return self.layer(x)

    model = by.convert(Momentum(), by.Rank1(2))
    model(torch.randn(6, 4))
    assert torch.allclose(model.slow, torch.full((3,), 0.9))


def test_a_part_of_a_model_may_be_compiled() -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.BatchEnsemble(2))
    x = torch.randn(6, 4)
    model[0].scope.start = torch.tensor([0])
    expected = model(x)
    model[0].compile(fullgraph=True, backend="eager")
    assert torch.allclose(model(x), expected, atol=1e-6)


def test_a_network_that_fails_in_evaluation_trains_with_a_warning() -> None:
    class TrainsOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise RuntimeError("only for training")
            return self.layer(x)

    model = by.convert(TrainsOnly(), by.Rank1(2))
    with pytest.warns(UserWarning, match=r"the check failed with RuntimeError: only for training"):
        model(torch.randn(4, 4))
    model(torch.randn(4, 4))


# Numbers.


@pytest.mark.parametrize("labels", [[0, 2], [-1, 1], [float("nan"), 1]])
def test_bernoulli_refuses_targets_that_are_no_probabilities(labels: list[float]) -> None:
    with pytest.raises(BayesifyError, match="expected 0 or 1"):
        by.Bernoulli().log_prob(torch.zeros(2), torch.tensor(labels))


def test_bernoulli_takes_soft_labels_as_torch_does() -> None:
    output, target = torch.randn(5, 3), torch.rand(5, 3)
    expected = -F.binary_cross_entropy_with_logits(output, target, reduction="none").sum(1)
    assert torch.allclose(by.Bernoulli().log_prob(output, target), expected, atol=1e-6)


@pytest.mark.parametrize("log_std", [-1.0, -10.0, -16.0])
@pytest.mark.parametrize("estimator", ["exemplar", "shared", "flipout"])
def test_the_gradient_of_a_small_scale_is_exact(log_std: float, estimator: Any) -> None:
    """For y = w x with w = μ + exp(ψ) ε the gradient with respect to ψ is exp(ψ) ε x, however small exp(ψ) is."""
    method = by.MeanField(init_log_std=(log_std, log_std), estimator=estimator)
    layer = by.convert(nn.Linear(1, 1, bias=False), method)
    x = torch.full((3, 1), 2.0)
    layer(x)
    torch.manual_seed(5)
    layer(x).sum().backward()
    found = layer.posterior.weight_log_std.grad
    wide = by.convert(nn.Linear(1, 1, bias=False), by.MeanField(init_log_std=(0.0, 0.0), estimator=estimator))
    wide.weight.data.zero_()
    wide(x)
    torch.manual_seed(5)
    expected = torch.tensor(log_std).exp() * wide(x).sum()  # exp(0) ε x, summed
    assert torch.allclose(found, expected.reshape(1, 1), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", [*METHODS, by.IBNN(2), by.EMP(2), by.LowRankEnsemble(2), by.Ensemble(2)], ids=str)
def test_the_kl_of_a_model_in_half_precision_is_that_in_single(dtype: torch.dtype, method: Any) -> None:
    model = by.convert(nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.Linear(300, 10)), method)
    expected = by.kl(copy.deepcopy(model).to(dtype).to(torch.float32))
    model = model.to(dtype)
    found = by.kl(model)
    assert model[2].weight.dtype == dtype and found.isfinite()
    assert torch.allclose(found.float(), expected, rtol=1e-3)
    assert all(p.dtype == torch.float32 for layer in (model[2],) for p in layer.posterior.parameters())


# What can't be copied.


@pytest.mark.parametrize("kind", ["lock", "file", "generator", "nested"])
def test_attributes_that_cannot_be_copied_are_shared(kind: str) -> None:
    class Holder:
        def __init__(self) -> None:
            self.lock, self.values = threading.Lock(), [1.0]

    net = nn.Sequential(nn.Linear(4, 3))
    held = {
        "lock": threading.RLock(),
        "file": io.TextIOWrapper(io.BytesIO()),
        "generator": (i for i in range(3)),
        "nested": Holder(),
    }[kind]
    net.held = {"inside": [held]}
    model, x = by.convert(net, by.Rank1(2)), torch.randn(6, 4)
    model(x)
    by.check(model, x)
    assert agrees(model.eval(), x)
    drawn = by.draw(model).held["inside"][0]
    assert drawn.lock is held.lock and drawn.values is not held.values if kind == "nested" else drawn is held


class ShiftFirst(ReadsItself):
    """The same, with an input without rows before the one with rows."""

    def forward(self, shift: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + shift).sum(-1, keepdim=True)


@pytest.mark.parametrize("method", [by.DropConnect(0.3), by.MeanField(estimator="shared"), by.ECMP(3)], ids=str)
def test_one_draw_for_all_is_compared_whatever_the_first_input_is(method: Any) -> None:
    """The first input has as many numbers as a batch of several rows, of which the output would be a sum."""
    model = by.convert(ShiftFirst(), {nn.Linear: method}).train()
    model.reads = True
    with pytest.raises(RowError):
        model(torch.randn(4), torch.randn(1, 4))
