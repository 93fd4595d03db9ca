"""Attention: each row's draw, applied to its tokens, is the ordinary layer with that draw in its weights."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import METHODS
from draws import Call, as_linear_layers, called, watched_calls
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import prune

import bayesify as by
from bayesify.layers import BayesianLayer, bayesian_layers
from bayesify.methods.base import Method

HEADS, QUERIES, KEYS = 2, 5, 6
CAUSAL = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)


@dataclass(frozen=True)
class Variant:
    """A layer and how it is called: self-attention unless the keys are others, with masks for so many rows."""

    layer: dict[str, object] = field(default_factory=dict)
    call: dict[str, object] = field(default_factory=dict)
    of_itself: bool = True
    masks: tuple[str, ...] = ()

    def make(self) -> nn.MultiheadAttention:
        return nn.MultiheadAttention(8, HEADS, **self.layer)

    @property
    def row_dim(self) -> int:
        return 0 if self.layer.get("batch_first") else 1

    def inputs(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as the layer takes them."""
        sizes = [(QUERIES, 8)] * 3
        if not self.of_itself:
            sizes = [(QUERIES, 8), (KEYS, self.layer.get("kdim", 8)), (KEYS, self.layer.get("vdim", 8))]
        q, k, v = (torch.randn(rows, *size, dtype=dtype).transpose(0, self.row_dim) for size in sizes)
        return (q, q, q) if self.of_itself else (q, k, v)

    def options(self, rows: int, dtype: torch.dtype) -> dict[str, object]:
        keys = QUERIES if self.of_itself else KEYS
        made: dict[str, Tensor] = {}
        if "padding" in self.masks:
            made["key_padding_mask"] = torch.arange(keys) >= 1 + torch.arange(rows).unsqueeze(1) % keys
        if "causal" in self.masks:
            made["attn_mask"] = CAUSAL
        if "added" in self.masks:
            made["attn_mask"] = torch.randn(QUERIES, keys, dtype=dtype)
        if "by head" in self.masks:
            made["attn_mask"] = torch.rand(rows * HEADS, QUERIES, keys) < 0.3
            made["attn_mask"][..., 0] = False  # something is left to attend to
        if "padding" in self.masks and "added" in self.masks:
            made["key_padding_mask"] = torch.zeros(rows, keys, dtype=dtype).masked_fill(made["key_padding_mask"], -1e4)
        return {**self.call, **made}


def of_row(options: dict[str, object], row: int) -> dict[str, object]:
    """The options of a call with that row alone."""
    own = dict(options)
    if isinstance(mask := own.get("key_padding_mask"), Tensor):
        own["key_padding_mask"] = mask[row : row + 1]
    if isinstance(mask := own.get("attn_mask"), Tensor) and mask.dim() == 3:
        own["attn_mask"] = mask[row * HEADS : (row + 1) * HEADS]
    return own


VARIANTS: dict[str, Variant] = {
    "batch-first": Variant({"batch_first": True}),
    "batch-second": Variant(call={"need_weights": False}),
    "without-bias": Variant({"bias": False, "batch_first": True}, {"need_weights": False}),
    "weights-by-head": Variant({"batch_first": True}, {"average_attn_weights": False}, masks=("padding",)),
    "padding": Variant({"batch_first": True}, {"need_weights": False}, masks=("padding",)),
    "causal": Variant({"batch_first": True}, {"need_weights": False, "is_causal": True}, masks=("causal",)),
    "causal-with-weights": Variant(call={"is_causal": True}, masks=("causal",)),
    "causal-padded": Variant({}, {"need_weights": False, "is_causal": True}, masks=("causal", "padding")),
    "added-mask": Variant({"batch_first": True}, {"need_weights": False}, False, ("added", "padding")),
    "mask-by-head": Variant({}, {"need_weights": False}, False, ("by head", "padding")),
    "other-sizes": Variant({"kdim": 3, "vdim": 7, "batch_first": True}, {}, False, ("padding",)),
    "other-sizes-without-bias": Variant({"kdim": 3, "vdim": 7, "bias": False}, {"need_weights": False}, False),
    "learned-token": Variant({"add_bias_kv": True}, {"need_weights": False}, True, ("causal", "padding")),
    "zero-token": Variant({"add_zero_attn": True, "batch_first": True}, {}, False, ("by head",)),
    "both-tokens": Variant(
        {"add_bias_kv": True, "add_zero_attn": True, "kdim": 3, "vdim": 7}, {"need_weights": False}, False, ("added",)
    ),
}
FOLDING = {name: method for name, method in METHODS.items() if name != "MeanField-local"}
"""Methods whose noise is in weights; local noise is on activations, so no weight holds it."""
KINDS = ("Rank1-cauchy", "MeanField", "MeanField-flipout", "LowRankEnsemble", "Ensemble", "EMP-row-learned")
"""Methods that between them use every part of a perturbation."""
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
HOLDING = ("batch-first", "without-bias", "other-sizes", "both-tokens")
"""The ways in which a layer holds its tensors."""
each_holding = pytest.mark.parametrize("variant", [VARIANTS[name] for name in HOLDING], ids=HOLDING)
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
either_way = pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "batch-second"])


def bayesian(variant: Variant, method: Method, dtype: torch.dtype = torch.float32) -> BayesianLayer:
    torch.manual_seed(0)
    layer = variant.make().to(dtype)
    nn.init.normal_(layer.out_proj.bias) if layer.out_proj.bias is not None else None
    nn.init.normal_(layer.in_proj_bias) if layer.in_proj_bias is not None else None
    model = by.convert(layer, {nn.MultiheadAttention: method}, batch_dim=variant.row_dim)
    return model.to(dtype)  # type: ignore[return-value]


def covering(methods: dict[str, Method], others: tuple[str, ...], variants: Iterable[str] = VARIANTS) -> Any:
    """The first variant with every method, the others with some."""
    first = next(iter(VARIANTS))
    pairs = {(name, m): (VARIANTS[name], methods[m]) for name in variants for m in methods}
    pairs = {key: pair for key, pair in pairs.items() if key[0] == first or key[1] in others}
    return pytest.mark.parametrize(("variant", "method"), pairs.values(), ids=map("-".join, pairs))


def in_training(layer: BayesianLayer, *args: object, batch: int, **options: object) -> tuple[Any, list[nn.Module]]:
    """What the layer says with a draw for each row of the batch, and ordinary layers with each row's draw."""
    with torch.no_grad():
        output, call = called(layer, *args, batch=batch, **options)
        return output, [call.network(layer, row) for row in range(batch)]


def close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
    if found is None or expected is None:
        return found is expected
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


# A draw per row is the same draw folded in.


@covering(FOLDING, KINDS)
def test_a_draw_per_row_equals_the_draw_folded_in(variant: Variant, method: Method) -> None:
    for batch, repeat, dtype in ((7, 1, torch.float64), (1, 1, torch.float64), (3, 2, torch.float32)):
        layer, rows, dim = bayesian(variant, method, dtype), batch * repeat, variant.row_dim
        inputs, options = variant.inputs(rows, dtype), variant.options(rows, dtype)
        (y, weights), plain = in_training(layer.train(), *inputs, batch=batch, **options)
        for row in range(rows):
            q, k, v = (x.narrow(dim, row, 1) for x in inputs)
            expected, heads = plain[row // repeat](q, k, v, **of_row(options, row))
            assert close(y.narrow(dim, row, 1), expected, dtype)
            assert close(None if weights is None else weights[row : row + 1], heads, dtype)


@pytest.mark.parametrize("method", [by.Rank1(2), by.MeanField(), by.Ensemble(2)], ids=str)
@each_holding
def test_gradients_of_a_draw_per_row_are_those_of_the_draw_folded_in(variant: Variant, method: Method) -> None:
    layer, plain, dim = bayesian(variant, method, torch.float64), variant.make().double(), variant.row_dim
    inputs, options = variant.inputs(3, torch.float64), variant.options(3, torch.float64)
    shared = {name: p for name, p in layer.named_parameters() if name.startswith("bias_")}
    (y, _), call = called(layer, *inputs, batch=3, **options)
    each = []
    for row in range(3):
        q, k, v = (x.narrow(dim, row, 1) for x in inputs)
        each.append(functional_call(plain, call.tensors(layer, row) | shared, (q, k, v), of_row(options, row))[0])
    into, by_each = torch.randn_like(y), list(layer.parameters())
    found = torch.autograd.grad(y, by_each, into, retain_graph=True)
    expected = torch.autograd.grad(torch.cat(each, dim), by_each, into)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(found, expected, strict=True))


@each_variant
@pytest.mark.parametrize("method", [by.Rank1(3), by.MeanField(), by.Ensemble(3)], ids=str)
def test_inputs_without_a_batch_and_single_rows(variant: Variant, method: Method) -> None:
    """Tokens without a batch have the first row's draw; one row for all has each row's."""
    layer, inputs, options = (
        bayesian(variant, method),
        variant.inputs(1, torch.float32),
        variant.options(1, torch.float32),
    )
    (y, weights), plain = in_training(layer, *inputs, batch=4, **options)
    for row, network in enumerate(plain):
        expected, heads = network(*inputs, **options)
        assert close(y.narrow(variant.row_dim, row, 1), expected)
        assert close(None if weights is None else weights[row : row + 1], heads)
    alone = [x.squeeze(variant.row_dim) for x in inputs]
    if "key_padding_mask" in options:
        options["key_padding_mask"] = options["key_padding_mask"].squeeze(0)
    (y, weights), plain = in_training(layer, *alone, batch=4, **options)
    expected, heads = plain[0](*alone, **options)
    assert close(y, expected) and close(weights, heads)


def test_wrong_inputs_are_refused_as_by_the_ordinary_layer() -> None:
    layer, x = bayesian(VARIANTS["batch-first"], by.Rank1(2)), torch.randn(2, 5, 8)
    with pytest.raises((RuntimeError, AssertionError), match="query should be unbatched 2D or batched 3D"):
        layer(x[None], x[None], x[None])
    with pytest.raises((RuntimeError, AssertionError), match="key_padding_mask"):
        layer(x, x, x, key_padding_mask=torch.zeros(5, dtype=torch.bool))
    with pytest.raises(by.RowError, match="got 3 rows while the model got 2"):
        in_training(layer, *[torch.randn(3, 5, 8)] * 3, batch=2)


def test_the_output_has_the_memory_of_the_ordinary_layers() -> None:
    """Much code calls `output.view(-1, features)`."""
    x = torch.randn(5, 3, 8)
    assert bayesian(VARIANTS["batch-second"], by.Rank1(2))(x, x, x)[0].is_contiguous()


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_of_attention_is_the_ordinary_layers(need_weights: bool) -> None:
    """In training it drops attention weights, in evaluation nothing."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
    x = torch.randn(2, 5, 8)
    model = by.convert(copy.deepcopy(layer), by.BatchEnsemble(2, mean_std=0.0))  # all factors are 1
    with torch.no_grad():
        ours, plain = (
            torch.stack([m(x, x, x, need_weights=need_weights)[0] for _ in range(400)]) for m in (model, layer)
        )
        assert torch.allclose(ours.mean(0), plain.mean(0), atol=6 * float(plain.std(0).max()) / 400**0.5 * 2**0.5)
        assert torch.allclose(ours.std(0).mean(), plain.std(0).mean(), rtol=0.05)
        found, expected = (m.eval()(x, x, x, need_weights=need_weights)[0] for m in (model, layer))
    assert torch.allclose(found, expected, atol=1e-5)


# One draw for the batch is the ordinary layer.


@covering(METHODS, ("Rank1-cauchy", "MeanField"))
def test_in_evaluation_one_draw_runs_as_the_ordinary_layer(variant: Variant, method: Method) -> None:
    layer = bayesian(variant, method).eval()
    inputs, options = variant.inputs(7, torch.float32), variant.options(7, torch.float32)
    with torch.no_grad(), watched_calls(layer) as call:
        output = layer(*inputs, **options)[0]
        assert close(output, call.network(layer, 0)(*inputs, **options)[0])
        assert any(not close(layer(*inputs, **options)[0], output) for _ in range(12))  # and it is a draw


def test_the_shared_draw_keeps_the_native_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    native = torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: calls.append(1) or native(*args))
    layer, x = bayesian(VARIANTS["batch-first"], by.Rank1(4)).eval(), torch.randn(4, 6, 8)
    with torch.no_grad():
        first, second = (layer(x, x, x, need_weights=False)[0] for _ in range(2))
    assert len(calls) == 2 and not torch.equal(first, second)


# Transformers, whose fast path reads weights without calling layers.

CONVERTED: dict[str, object] = {
    "all": {"*": by.MeanField(init_log_std=(-3.0, -3.0))},
    "attention": {"*self_attn": by.Rank1(2, dropout_rate=0.3)},
    "linear1": {"*linear1": by.Rank1(2, dropout_rate=0.3)},
    "linear2": {"*linear2": by.MCDropout(0.3)},
    "norm1": {"*norm1": by.MeanField(init_log_std=(-3.0, -3.0))},
    "norm2": {"*norm2": by.ECMP(5, jitter=0.5)},
}


def encoder(batch_first: bool = True, layers: int = 2, **options: object) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first, **options)
    made = nn.TransformerEncoder(layer, layers, enable_nested_tensor=batch_first and not options.get("norm_first"))
    for i, p in enumerate(made.parameters()):  # its layers start as copies of one
        nn.init.normal_(p, float(i % 7 == 0), 0.3)
    return made


class Padded(nn.Module):
    """An encoder that is called with padding."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.encoder = encoder(**options)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


def on_the_slow_path(model: Padded) -> Padded:
    """The plain network on the way that calls all its layers."""
    model.encoder.use_nested_tensor = False
    for layer in model.encoder.layers:
        layer.activation_relu_or_gelu = 0
    return model.eval()


def drawn_tensors(model: nn.Module, call: Call, row: int = 0) -> dict[str, Tensor]:
    """The tensors of the plain network under a row's draw."""
    each = [(name, call.tensors(layer, row)) for name, layer in bayesian_layers(model).items()]
    return {f"{name}.{tensor}": value for name, tensors in each for tensor, value in tensors.items()}


ENCODERS = [(name, first, first == bool(i % 2)) for i, name in enumerate(CONVERTED) for first in (False, True)]
"""Each way to convert an encoder with its norms in either place; half of them with padding."""


@pytest.mark.parametrize(("converted", "norm_first", "padded"), [*ENCODERS, ("all", False, False)])
def test_no_layer_of_an_encoder_is_passed_by_in_evaluation(converted: str, norm_first: bool, padded: bool) -> None:
    """Every converted layer is a new draw in each call, and the encoder is the plain one with those draws."""
    torch.manual_seed(0)
    plain, x = Padded(norm_first=norm_first), torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]]) if padded else None
    model = by.convert(copy.deepcopy(plain), CONVERTED[converted]).eval()
    drawn: list[dict[str, Tensor]] = []
    outputs: list[Tensor] = []
    with torch.no_grad(), watched_calls(model) as call:
        for _ in range(5):
            outputs.append(model(x, padding))
            drawn.append(drawn_tensors(model, call))
            plain.load_state_dict({**plain.state_dict(), **drawn[-1]})
            assert torch.allclose(outputs[-1], on_the_slow_path(plain)(x, padding), atol=1e-5)
    assert all(len(torch.stack([d[n] for d in drawn]).unique(dim=0)) > 1 for n in drawn[0] if "weight" in n)
    assert len(torch.stack(outputs).unique(dim=0)) == 5


def test_with_its_fast_path_an_encoder_would_pass_them_by() -> None:
    """The fault is real: with the switch back, no converted layer is called, which the first call finds."""
    model = by.convert(nn.Sequential(encoder(layers=1)), {"*": by.MeanField(init_log_std=(-2.0, -2.0))}).eval()
    model[0].layers[0].activation_relu_or_gelu = 1
    with torch.no_grad(), pytest.raises(by.RowError, match="the plain network with that draw"):
        model(torch.randn(2, 5, 8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_and_no_padding_say_the_same_of_real_tokens() -> None:
    torch.manual_seed(0)
    model = by.convert(Padded(), {"*": by.BatchEnsemble(1)}).eval()
    x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [3], [4]])
    with torch.no_grad():
        y = model(x, padding)
        assert torch.allclose(y[1, :3], model(x[1:2, :3])[0], atol=1e-5)
        plain = by.revert(copy.deepcopy(model)).eval()(x, padding)  # on torch's fast path, with nested tensors
    assert torch.allclose(y[~padding], plain[~padding], atol=1e-5) and (plain[padding] == 0).all()


class Wrapped(nn.Module):
    """A transformer of torch's, called as its own signature says, and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(8, 3)

    def forward(self, src: Tensor, tgt: Tensor | None = None) -> Tensor:
        return self.head(self.inner(src) if tgt is None else self.inner(src, tgt))


TRANSFORMERS: dict[str, tuple[Callable[[bool], nn.Module], int]] = {
    "encoder-layer": (lambda first: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=first), 1),
    "encoder": (encoder, 1),
    "encoder-norm-first": (lambda first: encoder(first, norm_first=True, activation="gelu", bias=False), 1),
    "decoder-layer": (lambda first: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=first), 2),
    "transformer": (lambda first: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=first), 2),
}
each_transformer = pytest.mark.parametrize(("make", "inputs"), TRANSFORMERS.values(), ids=TRANSFORMERS)


def transformer(make: Callable[[bool], nn.Module], batch_first: bool) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")  # of nn.Transformer with the batch second
        return Wrapped(make(batch_first))


def tokens(inputs: int, batch_first: bool, rows: int = 4) -> list[Tensor]:
    """Sequences of 7, and of 5 for the second."""
    x = [torch.randn(rows, length, 8) for length in (7, 5)[:inputs]]
    return x if batch_first else [t.transpose(0, 1) for t in x]


def named(x: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("src", "tgt"), x, strict=False))


@either_way
@each_transformer
@pytest.mark.parametrize("method", [by.Rank1(4, dropout_rate=0.2), by.MeanField(), by.Ensemble(3)], ids=str)
def test_rows_of_transformers_equal_folded_networks(
    make: Callable[[bool], nn.Module], inputs: int, batch_first: bool, method: Method
) -> None:
    """In training row i is the plain network with row i's draw in all its layers."""
    dim = 0 if batch_first else 1
    plain = transformer(make, batch_first).double()
    model = by.convert(copy.deepcopy(plain), {"*": method} if method.roles[-1] == "norm" else method, batch_dim=dim)
    model, x = model.double(), [t.double() for t in tokens(inputs, batch_first)]
    with torch.no_grad(), watched_calls(model) as call:
        y = model(*x)
        for row in range(4):
            plain.load_state_dict({**plain.state_dict(), **drawn_tensors(model, call, row)})
            expected = plain(*[t.narrow(dim, row, 1) for t in x])
            assert torch.allclose(y.narrow(dim, row, 1), expected, rtol=1e-10, atol=1e-10)


@either_way
@each_transformer
def test_check_follows_rows_through_every_layer(
    make: Callable[[bool], nn.Module], inputs: int, batch_first: bool
) -> None:
    model = by.convert(transformer(make, batch_first), {"*": by.MeanField()}, batch_dim=0 if batch_first else 1)

    found = by.check(model, named(tokens(inputs, batch_first)))
    assert set(found) == set(bayesian_layers(model)) and set(found.values()) == {1}
    forgotten = by.convert(transformer(make, batch_first), by.Rank1(4), batch_dim=1 if batch_first else 0)
    with pytest.raises(by.RowError):
        by.check(forgotten, named([torch.randn(6, 6, 8) for _ in range(inputs)]))


def test_check_sees_memory_whose_rows_are_not_the_querys() -> None:
    class Mixed(nn.Module):
        def __init__(self, fault: bool) -> None:
            super().__init__()
            self.attention, self.fault = nn.MultiheadAttention(8, 2, batch_first=True), fault

        def forward(self, x: Tensor) -> Tensor:
            memory = x.flip(0) if self.fault else x.flip(1)
            return self.attention(query=x, key=memory, value=memory)[0]

    assert by.check(by.convert(Mixed(False), by.Rank1(4)), torch.randn(5, 4, 8)) == {"attention": 1}
    with pytest.raises(by.RowError, match="Rows are mixed"):
        by.check(by.convert(Mixed(True), by.Rank1(4)), torch.randn(5, 4, 8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_take_one_draw_and_are_refused_draws_by_row() -> None:
    model = by.convert(nn.Sequential(encoder(layers=1).layers[0]), by.Rank1(2, dropout_rate=0.3))
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    with torch.no_grad():
        nested = torch.nested.nested_tensor(rows)
        with pytest.raises(by.BayesifyError, match=r"nested tensor.*use a padded one"):
            model(nested)
        model.eval()
        model[0].self_attn.scope.start = torch.tensor([1])
        torch.manual_seed(0)
        found = model(nested).unbind()
        for row, y in zip(rows, found, strict=True):
            torch.manual_seed(0)
            assert torch.allclose(model(row.unsqueeze(0))[0], y, atol=1e-5)

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.nested.nested_tensor(list(x))
            return self.attention(x, x, x, need_weights=False)[0]

    with pytest.raises(by.BayesifyError, match="layer 'attention' got a nested tensor"):
        by.convert(Inside(), by.Rank1(2))(torch.randn(2, 5, 8))


# What a draw is.


def test_every_projection_has_factors_of_its_own() -> None:
    layer = bayesian(VARIANTS["other-sizes"], by.Rank1(3))
    shapes = {name: tuple(p.shape) for name, p in layer.posterior.named_parameters() if "loc" in name}
    inputs = {"q": 8, "k": 3, "v": 7, "out": 8}
    assert shapes == {
        f"{side}_loc_{which}": (3, size if side == "in" else 8)
        for which, size in inputs.items()
        for side in ("in", "out")
    }


def test_emp_chooses_for_each_projection() -> None:
    layer = bayesian(VARIANTS["batch-first"], by.EMP(3))
    stacks = {s: torch.stack([site.base["weight"], *site.posterior["weight"]]) for s, site in layer.sites().items()}
    chosen = set()
    for index in range(40):
        drawn = by.draw(layer, 0, index=index)
        q, k, v = drawn.in_proj_weight.chunk(3)
        found = {"_q": q, "_k": k, "_v": v, "_out": drawn.out_proj.weight}
        chosen.add(tuple(next(i for i in range(3) if torch.equal(found[s], stacks[s][i])) for s in found))
    assert len(chosen) > 25  # of 81


@each_holding
def test_copies_start_as_the_layer_itself_would(variant: Variant) -> None:
    torch.manual_seed(0)
    layer = by.convert(variant.make(), {nn.MultiheadAttention: by.Ensemble(20, init_copies="random")})
    packed = variant.make()._qkv_same_embed_dim
    for suffix, site in layer.sites().items():
        bound = site.in_size**-0.5 if suffix == "_out" else (6 / (site.in_size + (24 if packed else 8))) ** 0.5
        copies = site.posterior["weight"].detach()
        assert copies.abs().max() <= bound and float(copies.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
        assert site.bias is None or (site.posterior["bias"] == 0).all()


def test_learned_tokens_stay_shared() -> None:
    layer = bayesian(VARIANTS["learned-token"], by.MeanField())
    drawn = by.draw(layer, 0)
    assert torch.equal(drawn.bias_k, layer.bias_k) and torch.equal(drawn.bias_v, layer.bias_v)
    groups = {g["name"]: {id(p) for p in g["params"]} for g in by.parameter_groups(layer, lr=0.1)}
    assert groups["base"] == {id(layer.bias_k), id(layer.bias_v)}
    covered = (layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias)
    assert groups["covered"] == set(map(id, covered))


# The divergence.


def test_the_divergence_is_that_of_all_tensors() -> None:
    """MeanField against torch.distributions, over every tensor of the layer."""
    for name in HOLDING:
        layer, total = bayesian(VARIANTS[name], by.MeanField(prior_std=0.3)), torch.zeros(())
        stds = {suffix: site.posterior for suffix, site in layer.sites().items()}
        for name, p in layer.named_parameters():
            if "posterior" in name or name.startswith("bias_"):
                continue
            kind = "weight" if "weight" in name else "bias"
            which = ["_q", "_k", "_v"] if name.startswith("in_proj") else [f"_{name.partition('_')[0]}"]
            std = torch.cat([stds[suffix][f"{kind}_log_std"] for suffix in which]).exp()
            total = total + kl_divergence(Normal(p, std), Normal(0.0, 0.3)).sum()
        assert torch.allclose(by.kl(layer), total)


@covering(METHODS, ("Rank1-cauchy", "MeanField", "Ensemble"), HOLDING)
def test_the_divergence_is_the_sum_of_linear_layers(variant: Variant, method: Method) -> None:
    """Each projection is to its method what a Linear layer with the same tensors is."""
    layer = bayesian(variant, method)
    model = as_linear_layers(layer, method)
    torch.manual_seed(1)
    found = by.kl(layer)
    torch.manual_seed(1)
    assert torch.allclose(found, by.kl(model), rtol=1e-5)


@covering(METHODS, ("Rank1-cauchy", "MeanField", "Ensemble"), HOLDING)
def test_the_gradient_edit_equals_autograd_on_packed_weights(variant: Variant, method: Method) -> None:
    layer = bayesian(variant, method, torch.float64)
    (by.kl(layer, shared_std=2.0) * 0.7 / 50).backward()
    expected = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    with torch.no_grad():  # as some loops call it
        by.add_kl_grad_(layer, n=50, beta=0.7, shared_std=2.0)
        by.add_kl_grad_(layer, n=50, beta=0.7, shared_std=2.0)  # once on nothing, once on top of a gradient
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    for name, grad in expected.items():
        assert torch.allclose(found.get(name, torch.zeros_like(grad)), 2 * grad, rtol=1e-6, atol=1e-9), name


def test_a_frozen_weight_gets_no_gradient_edit() -> None:
    layer = bayesian(VARIANTS["batch-first"], by.MeanField())
    layer.in_proj_weight.requires_grad_(False)
    by.add_kl_grad_(layer, n=10)
    assert layer.in_proj_weight.grad is None and layer.in_proj_bias.grad is not None


@covering(METHODS, ("Rank1-cauchy", "MeanField", "Ensemble"), HOLDING)
def test_every_parameter_gets_a_gradient(variant: Variant, method: Method) -> None:
    layer = bayesian(variant, method)
    options = variant.options(6, torch.float32)
    (layer(*variant.inputs(6, torch.float32), **options)[0].square().sum() + by.kl(layer) / 100).backward()
    assert [name for name, p in layer.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in layer.parameters())


# The network around it.


class Classifier(nn.Module):
    """Tokens through an encoder; their mean through a head."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embedding, self.encoder, self.head = nn.Embedding(11, 8), encoder(**options), nn.Linear(8, 3)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=padding).mean(1))


@every_method
def test_save_load_members_and_revert(method: Method, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = by.convert(Classifier(), {nn.Embedding: None, "*": method}), torch.randint(11, (8, 7))
    by.save(model, tmp_path / "model.safetensors")
    other = by.load(Classifier(), tmp_path / "model.safetensors")
    expected = by.predict(model, ids, 5).log_probs
    assert torch.equal(by.predict(other, ids, 5).log_probs, expected)
    assert set(bayesian_layers(other)) == set(bayesian_layers(model))
    members = by.members(model)
    assert len(members) == method.components and members[0](ids).shape == (8, 3)
    drawn = by.draw(model, 2)
    assert type(drawn.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert torch.allclose(by.revert(model, 2).eval()(ids), drawn(ids), atol=1e-5)
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert model.encoder.use_nested_tensor and model.encoder.layers[1].activation_relu_or_gelu == 1
    assert list(model.state_dict()) == list(Classifier().state_dict())


@each_holding
def test_members_are_the_components(variant: Variant) -> None:
    layer = bayesian(variant, by.Ensemble(3))
    inputs, options = variant.inputs(2, torch.float32), variant.options(2, torch.float32)
    for k, member in enumerate(by.members(layer)):
        for suffix, site in layer.sites().items():
            own = type(layer).sites_of(member)[suffix].base
            assert all(torch.equal(own[n], torch.stack([t, *site.posterior[n]])[k]) for n, t in site.base.items())
        assert member(*inputs, **options)[0].shape == inputs[0].shape


def test_fully_bayesian_leaves_no_tensor_without_a_distribution() -> None:
    model = by.convert(Classifier(), {"*": by.MeanField()})
    plain = dict(Classifier().named_parameters())
    first, second = (dict(by.draw(model, seed).named_parameters()) for seed in range(2))
    assert first.keys() == plain.keys() and not any((first[n] == second[n]).any() for n in plain)
    assert sum(p.numel() for p in model.parameters()) == 2 * sum(p.numel() for p in plain.values())


@every_method
def test_trains_and_predicts_with_padding(method: Method) -> None:
    torch.manual_seed(0)
    model = by.convert(Classifier(), method)
    batch = {"ids": torch.randint(11, (8, 7)), "padding": torch.arange(7) >= torch.arange(1, 9).clamp_max(7)[:, None]}
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loss = F.cross_entropy(model(**batch), torch.arange(8) % 3) + by.kl(model) / 1000
    loss.backward()
    assert torch.isfinite(loss) and [n for n, p in model.named_parameters() if p.grad is None] == []
    optimizer.step()
    p = by.predict(model, batch, samples=10)
    assert torch.allclose(p.probs.sum(1), torch.ones(8)) and (p.epistemic > 0).any()
    assert torch.allclose(by.predict(model, batch, samples=10, batch_size=3).log_probs, p.log_probs, atol=1e-5)
    assert set(by.check(model, batch).values()) == {1}


def test_an_encoder_that_no_draw_touches_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, calls = by.convert(Classifier(), {"head": by.Rank1(4)}), torch.randint(11, (8, 7)), []
    by.predict(model, ids, 10)  # finds out that it can
    forward = nn.TransformerEncoderLayer.forward
    monkeypatch.setattr(
        nn.TransformerEncoderLayer, "forward", lambda *args, **kw: calls.append(1) or forward(*args, **kw)
    )
    p = by.predict(model, ids, 10)
    assert len(calls) == 2  # its two layers
    by_hand = torch.stack([by.draw(model, 0, index=i)(ids).softmax(-1) for i in range(10)]).mean(0)
    assert torch.allclose(p.probs, by_hand, atol=1e-5)


@pytest.mark.parametrize("name", ["causal-padded", "other-sizes", "both-tokens"])
def test_compiles_without_a_break(name: str) -> None:
    variant = VARIANTS[name]
    layer = bayesian(variant, by.Rank1(3, mean_std=0.5))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    inputs, options = variant.inputs(4, torch.float32), variant.options(4, torch.float32)
    for mode in (True, False):
        layer.train(mode)
        layer.scope.start = torch.tensor([2])
        torch.manual_seed(5)
        expected = layer(*inputs, **options)[0]
        torch.manual_seed(5)
        assert close(compiled(*inputs, **options)[0], expected)
        assert not close(compiled(*inputs, **options)[0], expected)


def test_a_decoder_compiles_without_a_break() -> None:
    """With the batch second; the contract's network has an encoder with the batch first."""
    make, inputs = TRANSFORMERS["decoder-layer"]
    model = by.convert(transformer(make, False), {"*": by.MeanField()}, batch_dim=1)
    compiled, x = torch.compile(model, fullgraph=True, backend="eager"), tokens(inputs, False)
    for mode in (True, False):
        model.train(mode)
        with torch.no_grad():
            assert not torch.equal(compiled(*x), compiled(*x))


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # of the exporters
def test_export(suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = by.convert(Classifier(layers=1), by.Rank1(2)), torch.randint(11, (6, 5))
    by.export(model, tmp_path / f"net{suffix}", ids[:2], samples=3)
    if suffix == ".pt2":
        log_probs = torch.export.load(tmp_path / "net.pt2").module()(ids)[0]
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
        log_probs = torch.tensor(session.run(None, {session.get_inputs()[0].name: ids.numpy()})[0])
    assert torch.allclose(log_probs, by.predict(model, ids, 3).log_probs, atol=1e-5)


@each_variant
def test_half_precision_and_autocast(variant: Variant) -> None:
    torch.manual_seed(0)
    method = {nn.MultiheadAttention: by.Rank1(2, dropout_rate=0.1)}
    layer = by.convert(variant.make().to(torch.bfloat16), method, batch_dim=variant.row_dim)
    inputs, options = variant.inputs(4, torch.bfloat16), variant.options(4, torch.bfloat16)
    assert {layer.train(mode)(*inputs, **options)[0].dtype for mode in (True, False)} == {torch.bfloat16}
    layer, inputs, options = (
        bayesian(variant, by.Rank1(2)),
        variant.inputs(4, torch.float32),
        variant.options(4, torch.float32),
    )
    for mode in (True, False):
        layer.train(mode)
        torch.manual_seed(0)
        expected = layer(*inputs, **options)[0]
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(*inputs, **options)[0]
        assert found.dtype == torch.bfloat16 and torch.allclose(found.float(), expected, atol=0.1, rtol=0.1)


# Counts.


@pytest.mark.parametrize(
    ("options", "method", "added"),
    [  # four projections (8, 8) with biases of 8
        ({}, by.Rank1(3), 2 * 3 * 4 * (8 + 8)),
        ({}, by.IBNN(3, bias_noise=True), 2 * 3 * 4 * (8 + 1)),
        ({}, by.MeanField(), 4 * (64 + 8)),
        ({"bias": False}, by.MeanField(), 4 * 64),
        ({"add_bias_kv": True}, by.EMP(3), 2 * 4 * (64 + 8)),
        ({}, by.LowRankEnsemble(6, rank=2), 6 * 2 * 4 * (8 + 8)),
        ({}, by.MCDropout(0.1), 0),
        ({}, by.BatchEnsemble(4, bias="component"), 4 * 4 * (8 + 8) + 3 * 4 * 8),
        ({"kdim": 3, "vdim": 7}, by.Rank1(2), 2 * 2 * ((8 + 8) + (3 + 8) + (7 + 8) + (8 + 8))),
        ({"kdim": 3, "vdim": 7}, by.Ensemble(3), 2 * (64 + 24 + 56 + 64 + 32)),
    ],
)
def test_parameter_counts_by_hand(options: dict[str, object], method: Method, added: int) -> None:
    plain = nn.MultiheadAttention(8, 2, **options)
    base = sum(p.numel() for p in plain.parameters())
    layer = by.convert(plain, {nn.MultiheadAttention: method})
    found = by.summary(layer)
    assert found.added == added == sum(p.numel() for p in layer.posterior.parameters())
    assert found.base == base and found.base + found.added == sum(p.numel() for p in layer.parameters())
    assert [row.name for row in found.rows] == ["(model)"]  # its projection is part of it


# What is converted and what is refused.


def test_which_layers_a_method_takes_by_default() -> None:
    def chosen(method: Method) -> set[str]:
        return {
            name.removeprefix("encoder.layers.") for name in bayesian_layers(by.convert(Classifier(layers=1), method))
        }

    maps = {"0.self_attn", "0.linear1", "0.linear2", "head"}
    for method in (by.Rank1(2), by.IBNN(2), by.BatchEnsemble(2), by.LowRankEnsemble(2), by.MCDropout(0.1)):
        assert chosen(method) == maps
    assert chosen(by.MeanField()) == maps | {"0.norm1", "0.norm2"}
    assert chosen(by.Ensemble(2)) == maps | {"0.norm1", "0.norm2", "embedding"}
    assert chosen(by.EMP(2)) == {"0.norm1", "0.norm2", "head"}
    table = by.summary(by.convert(Classifier(layers=1), by.EMP(2)))
    notes = {row.name.removeprefix("encoder.layers."): row.note for row in table.rows}
    assert notes["0.self_attn"] == "EMP leaves attention layers shared by default"
    assert notes["0.self_attn.out_proj"] == "its parent MultiheadAttention draws its weight: convert the parent"
    assert table.base == sum(p.numel() for p in Classifier(layers=1).parameters())


def test_a_projection_goes_with_its_attention() -> None:
    """Its weight is read without its being called, so converted alone it would be deterministic."""
    for pattern in ("*.out_proj", "encoder.layers.0.self_attn.out_proj", NonDynamicallyQuantizableLinear):
        with pytest.raises(by.ConversionError, match="draws its weight: convert the parent"):
            by.convert(Classifier(), {pattern: by.Rank1(2)})
    swapped = Classifier(layers=1)
    swapped.encoder.layers[0].self_attn.out_proj = nn.Linear(8, 8)
    with pytest.raises(by.ConversionError, match="draws its weight: convert the parent"):
        by.convert(swapped, {nn.Linear: by.Rank1(2)})
    model = by.convert(swapped, {nn.MultiheadAttention: by.Rank1(2)})
    assert model.encoder.layers[0].self_attn.posterior.in_loc_out.shape == (2, 8)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_that_are_computed_or_shared_are_refused() -> None:
    normed = nn.MultiheadAttention(8, 2)
    nn.utils.weight_norm(normed.out_proj)
    with pytest.raises(by.ConversionError, match="its weight is not a parameter"):
        by.convert(nn.Sequential(normed), by.Rank1(2))
    wrapped = nn.MultiheadAttention(8, 2)
    wrapped.out_proj = nn.utils.parametrizations.weight_norm(wrapped.out_proj)
    with pytest.raises(by.ConversionError, match="its out_proj is a Parametrized"):
        by.convert(nn.Sequential(wrapped), by.Rank1(2))
    tied = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    tied[1].weight = tied[0].out_proj.weight
    with pytest.raises(by.ConversionError, match="tied to '1'"):
        by.convert(tied, {"0": by.MeanField()})
    with pytest.raises(by.ConversionError, match=r"out_proj.weight has 1 NaN or infinite values"):
        bad = nn.MultiheadAttention(8, 2)
        bad.out_proj.weight.data[0, 0] = float("nan")
        by.convert(nn.Sequential(bad), by.Rank1(2))

    class Mine(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    with pytest.raises(by.ConversionError, match="a subclass of MultiheadAttention"):
        by.convert(nn.Sequential(Mine(8, 2)), by.Rank1(2))
    rows = by.summary(by.convert(nn.Sequential(Mine(8, 2), nn.Linear(8, 2)), by.Rank1(2))).rows
    assert [(row.name, row.method) for row in rows] == [("0", "-"), ("0.out_proj", "-"), ("1", "Rank1(2)")]


def test_keep_dropout_says_that_it_cannot_keep_that_dropout() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1))
    with pytest.raises(by.ConversionError, match=r"dropout=0.1 on its attention weights, which keep_dropout"):
        by.convert(model, by.Rank1(2), keep_dropout=True)
    model[0].self_attn.dropout = 0.0
    assert "0.dropout1" in bayesian_layers(by.convert(model, by.Rank1(2), keep_dropout=True))


@pytest.mark.parametrize("name", ["in_proj_weight", "q_proj_weight", "out_proj"])
def test_a_weight_that_is_computed_after_conversion_is_refused(name: str) -> None:
    variant = VARIANTS["other-sizes" if name == "q_proj_weight" else "batch-first"]
    layer = bayesian(variant, by.MeanField())
    module, tensor = (layer.out_proj, "weight") if name == "out_proj" else (layer, name)
    prune.l1_unstructured(module, tensor, 0.5)
    with pytest.raises(by.BayesifyError, match=f"its {tensor} is not a parameter but computed"):
        layer(*variant.inputs(3, torch.float32))


def test_a_call_leaves_no_tensor_to_the_garbage_collector() -> None:
    """References in a circle would keep the projections' weights of every step until a collection."""
    model = by.convert(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), by.Rank1(4))

    def tensors_after_a_call() -> int:
        model(torch.randn(6, 5, 8)).sum().backward()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        tensors_after_a_call()  # the first makes the gradients
        assert tensors_after_a_call() == tensors_after_a_call()
    finally:
        gc.enable()
