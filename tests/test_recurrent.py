"""Recurrent layers: each row's draw, stepped through time, is the ordinary layer with that draw in its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import METHODS
from draws import as_linear_layers, called, in_call, watched_calls
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import bayesify as by
from bayesify.layers import BayesianLayer, bayesian_layers
from bayesify.methods.base import Method

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

Make = Callable[[], nn.Module]
SEQUENCES: dict[str, Make] = {
    "lstm": lambda: nn.LSTM(5, 4, batch_first=True),
    "lstm-stacked-both-ways": lambda: nn.LSTM(5, 4, 2, bidirectional=True),
    "lstm-projected": lambda: nn.LSTM(5, 4, 2, proj_size=3, bidirectional=True, batch_first=True),
    "lstm-without-bias": lambda: nn.LSTM(5, 4, bias=False),
    "gru-stacked-both-ways": lambda: nn.GRU(5, 4, 2, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(5, 4),
    "rnn-relu": lambda: nn.RNN(5, 4, 2, nonlinearity="relu", batch_first=True),
}
CELLS: dict[str, Make] = {
    "lstm-cell": lambda: nn.LSTMCell(5, 4),
    "gru-cell": lambda: nn.GRUCell(5, 4),
    "rnn-cell": lambda: nn.RNNCell(5, 4, bias=False),
    "rnn-cell-relu": lambda: nn.RNNCell(5, 4, nonlinearity="relu"),
}
RECURRENT = {name: method for name, method in METHODS.items() if name != "MeanField-local"}
KINDS = ("Rank1-cauchy", "MeanField", "MeanField-flipout", "LowRankEnsemble", "Ensemble", "EMP-row-learned")
"""Methods that between them use every part of a perturbation."""
each_method = pytest.mark.parametrize("method", RECURRENT.values(), ids=RECURRENT)
each_sequence = pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES)
each_layer = pytest.mark.parametrize("make", [*SEQUENCES.values(), *CELLS.values()], ids=[*SEQUENCES, *CELLS])


def bayesian(make: Make, method: Method, dtype: torch.dtype = torch.float32) -> BayesianLayer:
    torch.manual_seed(0)
    layer = make().to(dtype)
    model = by.convert(layer, {type(layer): method}, batch_dim=0 if getattr(layer, "batch_first", True) else 1)
    return model.to(dtype)  # type: ignore[return-value]


def in_training(make: Make, layer: BayesianLayer, *args: object, batch: int) -> tuple[object, list[nn.Module]]:
    """What the layer says with a draw for each row of the batch, and ordinary layers with each row's draw."""
    with torch.no_grad():
        output, call = called(layer, *args, batch=batch)
        return output, [ordinary(make, layer, call.tensors(layer, row)) for row in range(batch)]


def ordinary(make: Make, layer: BayesianLayer, tensors: dict[str, Tensor]) -> nn.Module:
    plain = make().to(next(layer.parameters()).dtype)
    plain.load_state_dict(tensors)
    return plain


def covering(layers: dict[str, Make], others: tuple[str, ...] = KINDS) -> pytest.MarkDecorator:
    """The first layer with every method, the others with some."""
    first = next(iter(layers))
    pairs = {(name, m): (make, RECURRENT[m]) for name, make in layers.items() for m in RECURRENT}
    pairs = {key: pair for key, pair in pairs.items() if key[0] == first or key[1] in others}
    return pytest.mark.parametrize(("make", "method"), pairs.values(), ids=map("-".join, pairs))


def parts(output: object) -> list[Tensor]:
    """The tensors of a layer's output, its rows where they are in that tensor."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for part in output for tensor in parts(part)]  # type: ignore[attr-defined]


def close(found: object, expected: object, dtype: torch.dtype) -> bool:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    pairs = list(zip(parts(found), parts(expected), strict=True))
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def states(layer: nn.Module, rows: int, dtype: torch.dtype) -> object:
    depth = layer.num_layers * (2 if layer.bidirectional else 1)
    h = torch.randn(depth, rows, layer.proj_size or layer.hidden_size, dtype=dtype)
    return (h, torch.randn(depth, rows, layer.hidden_size, dtype=dtype)) if isinstance(layer, nn.LSTM) else h


def state_of(state: object, rows: slice) -> object:
    return tuple(part[:, rows] for part in state) if isinstance(state, tuple) else state[:, rows]  # type: ignore[index]


# A draw per row is the same draw folded in.


@covering(SEQUENCES)
def test_a_draw_per_row_equals_the_draw_folded_in(make: Make, method: Method) -> None:
    for batch, repeat, given, dtype in (
        (7, 1, False, torch.float64),
        (4, 1, True, torch.float32),
        (1, 1, True, torch.float64),
        (3, 2, False, torch.float64),
    ):
        layer = bayesian(make, method, dtype)
        rows = torch.randn(batch * repeat, 6, 5, dtype=dtype)
        first = layer.batch_first
        hx = states(layer, batch * repeat, dtype) if given else None
        (y, last), plain = in_training(make, layer, rows if first else rows.transpose(0, 1), hx, batch=batch)
        for row, network in enumerate(plain):
            own = slice(row * repeat, (row + 1) * repeat)
            x = rows[own] if first else rows[own].transpose(0, 1)
            expected, end = network(x, None if hx is None else state_of(hx, own))
            assert close(y[own] if first else y[:, own], expected, dtype)
            assert close(state_of(last, own), end, dtype)


@pytest.mark.parametrize("method", [by.Rank1(2), by.MeanField(), by.Ensemble(2)], ids=str)
@pytest.mark.parametrize("make", [SEQUENCES[name] for name in ("lstm-projected", "gru-stacked-both-ways", "rnn-relu")])
def test_gradients_of_a_draw_per_row_are_those_of_the_draw_folded_in(make: Make, method: Method) -> None:
    layer, x = bayesian(make, method, torch.float64), torch.randn(3, 4, 5).double().requires_grad_()
    (y, _), call = called(layer, x, batch=3)
    plain, tensors = make().double(), [call.tensors(layer, row) for row in range(3)]
    expected = torch.cat([functional_call(plain, each, (x[row : row + 1],))[0] for row, each in enumerate(tensors)])
    into, by_each = torch.randn_like(y), (x, *layer.parameters())
    found = torch.autograd.grad(y, by_each, into, retain_graph=True)
    assert all(map(torch.allclose, found, torch.autograd.grad(expected, by_each, into)))


@covering(CELLS)
def test_a_cell_uses_one_draw_per_row_at_every_step(make: Make, method: Method) -> None:
    dtype = torch.float64
    layer, x = bayesian(make, method, dtype), torch.randn(3, 7, 5, dtype=dtype)

    def stepped(cell: Callable[..., object], steps: Tensor) -> object:
        state = None
        for step in steps:
            state = cell(step, state)
        return state

    with torch.no_grad(), in_call(layer, torch.arange(7)) as call:
        found = stepped(layer.forward, x)
    for row in range(7):
        plain = ordinary(make, layer, call.tensors(layer, row))
        own = tuple(part[row : row + 1] for part in parts(found))
        assert close(own, tuple(parts(stepped(plain, x[:, row : row + 1]))), dtype)


@pytest.mark.parametrize("method", [METHODS["Rank1"], METHODS["MeanField"], METHODS["Ensemble"]], ids=str)
@each_sequence
@pytest.mark.parametrize("in_order", [True, False], ids=["sorted", "unsorted"])
def test_packed_sequences_equal_each_one_alone(make: Make, method: Method, in_order: bool) -> None:
    dtype = torch.float64
    layer = bayesian(make, method, dtype)
    lengths = torch.tensor([6, 4, 4, 2, 1] if in_order else [4, 1, 6, 2, 4])
    x, hx = torch.randn(5, 6, 5, dtype=dtype), states(layer, 5, dtype)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order)
    (y, last), plain = in_training(make, layer, packed, hx, batch=5)
    assert isinstance(y, PackedSequence) and torch.equal(y.batch_sizes, packed.batch_sizes)
    assert y.sorted_indices is packed.sorted_indices and y.unsorted_indices is packed.unsorted_indices
    padded, found = pad_packed_sequence(y, batch_first=True)
    assert torch.equal(found, lengths)
    for row, (network, length) in enumerate(zip(plain, lengths.tolist(), strict=True)):
        alone = x[row : row + 1, :length] if layer.batch_first else x[row, :length].unsqueeze(1)
        expected, end = network(alone, state_of(hx, slice(row, row + 1)))
        assert close(padded[row, :length], expected.reshape(length, -1), dtype)
        assert close(state_of(last, slice(row, row + 1)), end, dtype)


@each_layer
@pytest.mark.parametrize("method", [by.Rank1(3), by.MeanField(), by.Ensemble(3)], ids=str)
def test_inputs_without_a_batch_and_single_rows(make: Make, method: Method) -> None:
    """A sequence without a batch has the first row's draw; one sequence for all rows has each row's."""
    layer = bayesian(make, method)
    cell = isinstance(layer, nn.RNNCellBase)
    alone = torch.randn(5) if cell else torch.randn(6, 5)
    output, plain = in_training(make, layer, alone, batch=4)
    assert close(output, plain[0](alone), torch.float32)
    single = alone.unsqueeze(0 if cell or layer.batch_first else 1)
    output, plain = in_training(make, layer, single, batch=4)
    for row, network in enumerate(plain):
        for found, expected in zip(parts(output), parts(network(single)), strict=True):
            dim = next(d for d in range(found.dim()) if found.shape[d] == 4 and expected.shape[d] == 1)
            assert torch.allclose(found.narrow(dim, row, 1), expected, atol=1e-5)


def test_wrong_inputs_are_refused_as_by_the_ordinary_layer() -> None:
    layer = bayesian(SEQUENCES["lstm"], by.Rank1(2))
    with pytest.raises(RuntimeError, match="input must have 3 dimensions"):
        layer(torch.randn(2, 3, 4, 5))
    with pytest.raises(RuntimeError, match="input_size"):
        layer(torch.randn(2, 3, 4))
    with pytest.raises(RuntimeError, match="Expected hidden"):
        layer(torch.randn(2, 3, 5), (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)))


@pytest.mark.parametrize("make", [SEQUENCES["lstm"], SEQUENCES["gru-stacked-both-ways"]])
def test_an_empty_batch_is_as_the_ordinary_layers(make: Make) -> None:
    layer = bayesian(make, by.Rank1(2))
    for mode in (True, False):
        assert layer.train(mode)(torch.zeros(0, 3, 5))[0].shape == make()(torch.zeros(0, 3, 5))[0].shape


def test_a_layer_first_in_time_gives_memory_as_the_ordinary_one() -> None:
    """Much code calls `output.view(-1, hidden)`."""
    layer = bayesian(lambda: nn.LSTM(5, 4), by.Rank1(2))
    assert layer(torch.randn(6, 3, 5))[0].is_contiguous()


# One draw for the batch is the ordinary layer.


@covering({**SEQUENCES, **CELLS}, ("Rank1-cauchy", "MeanField"))
def test_in_evaluation_one_draw_runs_as_the_ordinary_layer(make: Make, method: Method) -> None:
    layer = bayesian(make, method).eval()
    x = torch.randn(7, 5) if isinstance(layer, nn.RNNCellBase) else torch.randn(7, 7, 5)
    with torch.no_grad(), watched_calls(layer) as call:
        output = layer(x)
        assert close(output, ordinary(make, layer, call.tensors(layer, 0))(x), torch.float32)
        assert any(not close(layer(x), output, torch.float32) for _ in range(12))  # and it is a draw


def test_the_shared_draw_keeps_the_fused_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    lstm = torch._VF.lstm
    monkeypatch.setattr(torch._VF, "lstm", lambda *args: calls.append(1) or lstm(*args), raising=False)
    x = torch.randn(4, 6, 5)
    for layer, fused in (
        (bayesian(SEQUENCES["lstm"], by.Rank1(4)).eval(), 1),
        (bayesian(SEQUENCES["lstm"], by.MeanField(estimator="shared")), 1),
        (bayesian(SEQUENCES["lstm"], by.Rank1(4)), 0),  # a draw per row is stepped
    ):
        layer(x)  # compared with plain networks, once
        calls.clear()
        layer(x)
        assert len(calls) == fused


def test_dropout_between_layers_is_the_ordinary_layers() -> None:
    """In training it drops between layers, on both ways; in evaluation it does nothing."""
    make = lambda: nn.LSTM(5, 64, 2, dropout=0.5, batch_first=True)  # noqa: E731
    x = torch.randn(3, 4, 5)
    for method in (by.Rank1(2, dropout_rate=1e-9, mean_std=0.0), by.EMP(1, patches=("input",))):
        layer = bayesian(make, method)
        first, second = (layer(x)[0] for _ in range(2))
        assert (first - second).abs().max() > 1e-3
        assert torch.allclose(layer.eval()(x)[0], by.draw(layer, None)(x)[0], atol=1e-5)
    layer = bayesian(make, by.BatchEnsemble(2, mean_std=0.0))  # all factors are 1
    ordinary = by.draw(layer, None).train()
    with torch.no_grad():
        stepped, fused = (torch.stack([network(x)[0] for _ in range(300)]) for network in (layer, ordinary))
    assert torch.allclose(stepped.mean(0), fused.mean(0), atol=6 * float(fused.std(0).max()) / 300**0.5 * 2**0.5)
    assert torch.allclose(stepped.std(0).mean(), fused.std(0).mean(), rtol=0.05)


def test_keep_dropout_says_that_it_cannot_keep_that_dropout() -> None:
    net = nn.Sequential(nn.LSTM(5, 4, 2, dropout=0.2))
    with pytest.raises(by.ConversionError, match=r"dropout=0.2 between its recurrent layers, which keep_dropout"):
        by.convert(net, by.Rank1(2), keep_dropout=True)


# What a draw is.


@each_sequence
def test_a_mask_is_drawn_once_for_a_sequence(make: Make) -> None:
    """Gal and Ghahramani (2016b): the same mask at every step, for the input and for the state."""
    layer = bayesian(make, by.MCDropout(0.5))
    _, plain = in_training(make, layer, torch.randn(4, 4, 5), batch=4)
    for network in plain:
        for name, weight in network.named_parameters():
            if name.startswith("weight"):
                dropped = (weight == 0).all(0)
                assert torch.allclose(weight[:, ~dropped], 2 * getattr(layer, name)[:, ~dropped])


def test_every_gate_has_output_factors_of_its_own() -> None:
    layer = bayesian(lambda: nn.LSTM(5, 4), by.Rank1(3))
    assert layer.posterior.out_loc_ih_l0.shape == layer.posterior.out_loc_hh_l0.shape == (3, 16)
    assert layer.posterior.in_loc_ih_l0.shape == (3, 5) and layer.posterior.in_loc_hh_l0.shape == (3, 4)


def test_emp_chooses_for_each_weight() -> None:
    layer = bayesian(lambda: nn.GRU(5, 4), by.EMP(3))
    stacks = {
        name: torch.stack([getattr(layer, name), *getattr(layer.posterior, name)]) for name in layer._flat_weights_names
    }
    chosen = set()
    for index in range(40):
        drawn = by.draw(layer, 0, index=index)
        found = {n: next(k for k in range(3) if torch.equal(getattr(drawn, n), s[k])) for n, s in stacks.items()}
        assert found["weight_ih_l0"] == found["bias_ih_l0"] and found["weight_hh_l0"] == found["bias_hh_l0"]
        chosen.add((found["weight_ih_l0"], found["weight_hh_l0"]))
    assert len(chosen) == 9


@each_layer
def test_copies_start_as_the_layer_itself_would(make: Make) -> None:
    layer = bayesian(make, by.Ensemble(5, init_copies="random"))
    bound = layer.hidden_size**-0.5
    copies = torch.cat([p.detach().flatten() for p in layer.posterior.parameters()])
    assert copies.abs().max() <= bound and float(copies.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert sum(p.numel() for p in layer.posterior.parameters()) == 4 * sum(p.numel() for p in make().parameters())


def test_local_noise_is_refused_with_its_reason() -> None:
    """Noise drawn anew at each step would be that of other weights at each step."""
    net = nn.ModuleDict({"lstm": nn.LSTM(5, 4), "cell": nn.GRUCell(5, 4), "head": nn.Linear(4, 3)})
    method = by.MeanField(estimator="local")
    rows = {row.name: row for row in by.summary(by.convert(copy.deepcopy(net), method)).rows}
    assert "LSTM uses one draw of its weights at every step" in rows["lstm"].note and "local" in rows["cell"].note
    assert rows["lstm"].method == rows["cell"].method == "-" and rows["head"].added == 15
    with pytest.raises(by.ConversionError, match="use 'exemplar', 'flipout' or 'shared' there"):
        by.convert(net, {"lstm": method})


@pytest.mark.parametrize("estimator", ["exemplar", "flipout"])
def test_rows_differ_in_a_draw_and_have_the_posteriors_moments(estimator: str) -> None:
    """Equal rows get different weights, and the recurrent ones are those of its posterior."""

    def make() -> nn.Module:
        return nn.RNN(2, 3)

    layer = bayesian(make, by.MeanField(estimator=estimator, init_log_std=(-1.0, -1.0)))
    _, plain = in_training(make, layer, torch.randn(5, 600, 2), batch=600)
    drawn = torch.stack([network.weight_hh_l0 for network in plain])
    if estimator == "flipout":  # the sizes of the noise are shared, the signs are not
        assert torch.allclose(drawn.mean(0), layer.weight_hh_l0, atol=0.2)
        assert (drawn - layer.weight_hh_l0).abs().std(0).max() < 1e-5
        return
    assert torch.allclose(drawn.mean(0), layer.weight_hh_l0, atol=0.08)
    assert torch.allclose(drawn.std(0), torch.full((3, 3), torch.tensor(-1.0).exp()), rtol=0.15)


# The divergence.


def test_the_divergence_is_that_of_all_weights() -> None:
    """MeanField and Rank1 against torch.distributions, over every tensor of the layer."""
    layer = bayesian(lambda: nn.LSTM(5, 4, 2, proj_size=3, bidirectional=True), by.MeanField(prior_std=0.3))
    prior, total = Normal(0.0, 0.3), torch.zeros(())
    for name in layer._flat_weights_names:
        kind, _, which = name.partition("_")
        std = getattr(layer.posterior, f"{kind}_log_std_{which}").exp()
        total = total + kl_divergence(Normal(getattr(layer, name), std), prior).sum()
    assert torch.allclose(by.kl(layer), total)
    layer = bayesian(lambda: nn.GRU(5, 4), by.Rank1(3, prior_std=0.2))
    total = torch.zeros(())
    for side in ("in", "out"):
        for which in ("ih_l0", "hh_l0"):
            loc, rho = (getattr(layer.posterior, f"{side}_{part}_{which}") for part in ("loc", "rho"))
            scale = nn.functional.softplus(rho) + 1e-7
            total = total + kl_divergence(Normal(loc, scale), Normal(1.0, 0.2)).sum() / 3
    assert torch.allclose(by.kl(layer), total, rtol=1e-4)


@covering({**SEQUENCES, **CELLS}, ("Rank1-cauchy", "MeanField"))
def test_the_divergence_is_the_sum_of_linear_layers(make: Make, method: Method) -> None:
    """Each weight is to its method what a Linear layer with the same tensors is."""
    layer = bayesian(make, method.sized(1))
    model = as_linear_layers(layer, method.sized(1))
    torch.manual_seed(1)
    found = by.kl(layer)
    torch.manual_seed(1)
    assert torch.allclose(found, by.kl(model), rtol=1e-5)


# The network around it.


class Reader(nn.Module):
    """Embeds tokens, reads them with an LSTM and classifies by its last state."""

    def __init__(self, batch_first: bool = True, **options: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 5, batch_first=batch_first, **options)
        self.head = nn.Linear(5 * (1 + self.rnn.bidirectional), 3)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, self.rnn.batch_first, enforce_sorted=False)
        _, (h, _) = self.rnn(x)
        return self.head(torch.cat(h[-1 - self.rnn.bidirectional :].unbind(), -1))


TABLE_4: dict[str, object] = {
    "Bayesian embeddings": {nn.Embedding: by.MeanField(prior_std=1.0, init_log_std=(-2.0, -1.0))},
    "fully Bayesian": {"*": by.MeanField()},
    "BatchEnsemble": {nn.Embedding: None, "*": by.BatchEnsemble(4)},
    "Rank-1 Normal": {
        nn.Embedding: by.MeanField(prior_std=1.0, init_log_std=(-2.0, -1.0)),
        "*": by.Rank1(4, signs=0.5),
    },
    "Rank-1 Cauchy": {
        nn.Embedding: by.MeanField(prior_std=1.0, init_log_std=(-2.0, -1.0)),
        "*": by.Rank1(4, posterior="cauchy", prior_mean=0.5, prior_std=1e-4, dropout_rate=5e-7, signs=0.5),
    },
    "deep ensemble": by.Ensemble(4),
}
"""The rows of the Rank-1 paper's table 4, with the priors of its table 7."""


@pytest.mark.parametrize("methods", TABLE_4.values(), ids=TABLE_4)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_networks_of_table_4_train_and_predict(methods: object, packed: bool) -> None:
    torch.manual_seed(0)
    model = by.convert(Reader(num_layers=2, bidirectional=True), methods)
    batch = {"ids": torch.randint(11, (8, 7))} | ({"lengths": torch.tensor([7, 3, 5, 1, 2, 7, 4, 4])} if packed else {})
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loss = nn.functional.cross_entropy(model(**batch), torch.arange(8) % 3) + by.kl(model) / 1000
    loss.backward()
    assert torch.isfinite(loss) and [n for n, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    p = by.predict(model, batch, samples=25)
    assert p.probs.shape == (8, 3) and torch.allclose(p.probs.sum(1), torch.ones(8)) and (p.epistemic > 0).all()
    halves = by.predict(model, batch, samples=25, batch_size=3)
    assert torch.allclose(halves.log_probs, p.log_probs, atol=1e-5)
    assert set(by.check(model, batch).values()) == {1}


def test_fully_bayesian_leaves_no_tensor_without_a_distribution() -> None:
    model = by.convert(Reader(num_layers=2, bidirectional=True), {"*": by.MeanField()})
    plain = dict(Reader(num_layers=2, bidirectional=True).named_parameters())
    first, second = (dict(by.draw(model, seed).named_parameters()) for seed in range(2))
    assert first.keys() == plain.keys() and not any((first[n] == second[n]).any() for n in plain)
    assert sum(p.numel() for p in model.parameters()) == 2 * sum(p.numel() for p in plain.values())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_check_follows_rows_with_the_batch_in_either_dimension(kind: type[nn.RNNBase], batch_first: bool) -> None:
    model = by.convert(kind(5, 4, batch_first=batch_first), by.Rank1(4), batch_dim=0 if batch_first else 1)
    x = torch.randn(6, 7, 5)
    assert by.check(model, x) == {"": 1}
    forgotten = by.convert(kind(5, 4, batch_first=batch_first), by.Rank1(4), batch_dim=1 if batch_first else 0)
    with pytest.raises(by.RowError):
        by.check(forgotten, torch.randn(6, 6, 5))


def test_packed_sequences_may_be_the_models_input() -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3))

        def forward(self, x: PackedSequence) -> Tensor:
            return self[1](self[0](x)[1][0][-1])

    model, lengths, x = by.convert(Net(), by.Rank1(4)), torch.tensor([2, 6, 3, 6]), torch.randn(4, 6, 5)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    assert model(packed).shape == (4, 3) and by.check(model, packed) == {"0": 1, "1": 1}
    expected = torch.cat(
        [by.predict(model, pack_padded_sequence(x[i : i + 1], lengths[i : i + 1], True), 6).log_probs for i in range(4)]
    )
    assert torch.allclose(by.predict(model, packed, 6).log_probs, expected, atol=1e-5)
    assert torch.allclose(by.predict(model, packed, 6, batch_size=3).log_probs, expected, atol=1e-5)
    assert torch.allclose(by.predict(model, [packed, packed], 6).log_probs, expected.repeat(2, 1), atol=1e-5)


def test_cells_in_a_loop_keep_their_draw_through_the_sequence() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return self.head(state[0])

    torch.manual_seed(0)
    model, x = by.convert(Loop(), by.Rank1(4, dropout_rate=0.1)), torch.randn(6, 5, 5)
    as_layer = by.convert(nn.ModuleDict({"cell": nn.LSTM(5, 4, batch_first=True)}), by.Rank1(4))
    assert as_layer["cell"].posterior.in_loc_ih_l0.shape == model.cell.posterior.in_loc_ih.shape
    assert by.check(model, x) == {"cell": 1, "head": 1}
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    drawn = by.draw(model, 3)
    lstm = nn.LSTM(5, 4, batch_first=True)
    lstm.load_state_dict({f"{name}_l0": t for name, t in drawn.cell.state_dict().items()})
    assert torch.allclose(drawn(x), drawn.head(lstm(x)[1][0][-1]), atol=1e-6)


def test_the_output_of_a_deterministic_recurrent_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = by.convert(Reader(), {"head": by.Rank1(4)})
    ids, calls = torch.randint(11, (8, 7)), []
    lstm = torch._VF.lstm
    by.predict(model, ids, 10)  # finds out that it can
    monkeypatch.setattr(torch._VF, "lstm", lambda *args: calls.append(1) or lstm(*args), raising=False)
    p = by.predict(model, ids, 10)
    assert len(calls) == 1
    by_hand = torch.stack([by.draw(model, 0, index=i)(ids).softmax(-1) for i in range(10)]).mean(0)
    assert torch.allclose(p.probs, by_hand, atol=1e-5)


@each_method
def test_save_load_members_and_revert(method: Method, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = by.convert(Reader(), {nn.Embedding: None, "*": method}), torch.randint(11, (8, 7))
    by.save(model, tmp_path / "model.safetensors")
    other = by.load(Reader(), tmp_path / "model.safetensors")
    expected = by.predict(model, ids, 5).log_probs
    assert torch.equal(by.predict(other, ids, 5).log_probs, expected)
    members = by.members(model)
    assert len(members) == method.components and all(type(m.rnn) is nn.LSTM for m in members)
    assert members[0](ids).shape == (8, 3)
    drawn = by.draw(model, 2)
    again = copy.deepcopy(drawn)  # its list of flat weights goes with it
    assert torch.equal(again(ids), drawn(ids))
    assert torch.allclose(by.revert(model, 2).eval()(ids), drawn(ids), atol=1e-6)
    assert type(model.rnn) is nn.LSTM and model.rnn._flat_weights[0] is model.rnn.weight_ih_l0


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # of the exporters
def test_export(suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[1][0][-1])

    model, x = by.convert(Net(), by.Rank1(2)), torch.randn(6, 3, 5)
    by.export(model, tmp_path / f"net{suffix}", x[:2], samples=4)
    if suffix == ".pt2":
        log_probs = torch.export.load(tmp_path / "net.pt2").module()(x)[0]
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
        log_probs = torch.tensor(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    assert torch.allclose(log_probs, by.predict(model, x, 4).log_probs, atol=1e-5)


COMPILED: dict[str, Make] = {"gru": lambda: nn.GRU(5, 4), "rnn": SEQUENCES["rnn"], "lstm-cell": CELLS["lstm-cell"]}
"""Each kind of step; the contract's network has an LSTM in both directions."""


@torch._dynamo.config.patch(allow_rnn=True)
@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_compiles_without_a_break(make: Make) -> None:
    layer = bayesian(make, by.Rank1(3, mean_std=0.5))
    x = torch.randn(4, 5) if isinstance(layer, nn.RNNCellBase) else torch.randn(4, 4, 5)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for mode in (True, False):
        layer.train(mode)
        layer.scope.start = torch.tensor([2])
        torch.manual_seed(5)
        expected = layer(x)
        torch.manual_seed(5)
        assert close(compiled(x), expected, torch.float32)
        assert not close(compiled(x), expected, torch.float32)


def test_half_precision_and_autocast() -> None:
    for make in SEQUENCES.values():
        torch.manual_seed(0)
        batch_dim = 0 if make().batch_first else 1
        method = by.Rank1(2, dropout_rate=0.1)
        layer = by.convert(make().to(torch.bfloat16), {type(make()): method}, batch_dim=batch_dim)
        x = torch.randn(4, 4, 5, dtype=torch.bfloat16)
        assert {t.dtype for mode in (True, False) for t in parts(layer.train(mode)(x))} == {torch.bfloat16}


# Counts.


@pytest.mark.parametrize(
    ("make", "method", "added"),
    [  # one layer: ih (16, 5), hh (16, 4), two biases of 16
        (lambda: nn.LSTM(5, 4), by.Rank1(3), 2 * 3 * (5 + 16 + 4 + 16)),
        (lambda: nn.LSTM(5, 4), by.IBNN(3, bias_noise=True), 2 * 3 * (5 + 1 + 4 + 1)),
        (lambda: nn.LSTM(5, 4), by.MeanField(), 16 * 5 + 16 * 4 + 32),
        (lambda: nn.LSTM(5, 4), by.EMP(3), 2 * (16 * 5 + 16 * 4 + 32)),
        (lambda: nn.LSTM(5, 4), by.LowRankEnsemble(6, rank=2), 6 * 2 * (16 + 5 + 16 + 4)),
        (lambda: nn.LSTM(5, 4), by.MCDropout(0.1), 0),
        (lambda: nn.LSTM(5, 4), by.BatchEnsemble(4, bias="component"), 4 * (5 + 16 + 4 + 16) + 3 * 32),
        # the second layer reads both directions of the first: (12, 8); GRU has three gates
        (lambda: nn.GRU(5, 4, 2, bidirectional=True), by.IBNN(2), 2 * 2 * 2 * ((5 + 4) + (8 + 4))),
        (lambda: nn.GRU(5, 4, 2, bidirectional=True), by.BatchEnsemble(2), 2 * 2 * ((5 + 4 + 24) + (8 + 4 + 24))),
        # the state is projected to 3: ih (16, 5), hh (16, 3), hr (3, 4)
        (lambda: nn.LSTM(5, 4, proj_size=3), by.Rank1(2), 2 * 2 * ((5 + 16) + (3 + 16) + (4 + 3))),
        (lambda: nn.RNNCell(5, 4), by.Rank1(2), 2 * 2 * ((5 + 4) + (4 + 4))),
    ],
)
def test_parameter_counts_by_hand(make: Make, method: Method, added: int) -> None:
    layer = bayesian(make, method)
    found = by.summary(layer)
    assert found.added == added == sum(p.numel() for p in layer.posterior.parameters())
    assert found.base == sum(p.numel() for p in make().parameters())
    assert found.base + found.added == sum(p.numel() for p in layer.parameters())


# What is converted and what is refused.


def test_which_layers_a_method_takes_by_default() -> None:
    def chosen(method: Method) -> set[str]:
        return set(bayesian_layers(by.convert(Reader(), method)))

    for method in (by.Rank1(2), by.IBNN(2), by.MeanField(), by.BatchEnsemble(2), by.LowRankEnsemble(2)):
        assert chosen(method) == {"rnn", "head"}
    assert chosen(by.MCDropout(0.1)) == {"rnn", "head"}  # masks of states are not of the network's input
    assert chosen(by.Ensemble(2)) == {"embedding", "rnn", "head"}
    assert chosen(by.EMP(2)) == {"head"} and chosen(by.EMP(2, patches=("input",))) == {"rnn"}
    notes = {row.name: row.note for row in by.summary(by.convert(Reader(), by.EMP(2))).rows}
    assert notes["rnn"] == "EMP leaves recurrent layers shared by default"


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_that_are_computed_or_shared_are_refused() -> None:
    normed = nn.utils.weight_norm(nn.LSTM(5, 4), "weight_hh_l0")
    with pytest.raises(by.ConversionError, match=r"weight_norm .* or is pruned, .* remove it first"):
        by.convert(nn.Sequential(normed), by.Rank1(2))
    tied = nn.LSTM(4, 4)
    tied.weight_hh_l0 = tied.weight_ih_l0
    with pytest.raises(by.ConversionError, match="two of its weights are one tensor"):
        by.convert(nn.Sequential(tied), by.Rank1(2))

    class Mine(nn.LSTM):
        def forward(self, input: Any, hx: Any = None) -> Any:
            return super().forward(input, hx)[0]

    with pytest.raises(by.ConversionError, match="a subclass of LSTM that computes something else"):
        by.convert(nn.Sequential(Mine(5, 4)), by.Rank1(2))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("make", [SEQUENCES["lstm"], CELLS["gru-cell"]], ids=["lstm", "gru-cell"])
def test_a_weight_that_is_computed_after_conversion_is_refused(make: Make) -> None:
    name = "weight_hh_l0" if isinstance(make(), nn.RNNBase) else "weight_hh"
    for change in (nn.utils.weight_norm, lambda layer, name: prune.l1_unstructured(layer, name, 0.5)):
        layer = bayesian(make, by.MeanField())
        change(layer, name)
        with pytest.raises(by.BayesifyError, match=f"its {name} is not a parameter but computed"):
            layer(torch.randn(4, 3, 5) if isinstance(layer, nn.RNNBase) else torch.randn(4, 5))
