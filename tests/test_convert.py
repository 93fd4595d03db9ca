"""Which layers become Bayesian, what stays as it was, and what is refused with which words."""

from __future__ import annotations

import copy
import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import MLP, Residual, Tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import bayesify as by
from bayesify.errors import BayesifyError, ConversionError, RowError
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Method


class Net(nn.Module):
    """Two parts, a norm, a dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6))
        self.norm, self.drop, self.head = nn.LayerNorm(6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.body(x))))


class TiedNet(nn.Module):
    """The output matrix is the table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.table(ids))))


def methods_of(model: nn.Module) -> dict[str, str]:
    return {name: type(layer.method).__name__ for name, layer in bayesian_layers(model).items()}


def fingerprint(model: nn.Module) -> Any:
    """All that a conversion might change."""
    modules = [
        (name, type(m), m.training, sorted(m.__dict__), len(m._forward_pre_hooks), len(m._forward_hooks))
        for name, m in model.named_modules()
    ]
    state = {name: None if nn.parameter.is_lazy(t) else t.tolist() for name, t in model.state_dict().items()}
    return modules, repr(state), [id(p) for p in model.parameters()]


@contextmanager
def refused(model: nn.Module, *parts: str, error: type[BayesifyError] = ConversionError) -> Iterator[None]:
    """The error says all the parts, and the model is as it was."""
    before = fingerprint(model)
    with pytest.raises(error) as caught:
        yield
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    assert fingerprint(model) == before


# Selection.


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (by.Rank1(2), "stem conv shortcut head"),
        (by.IBNN(2), "stem conv shortcut head"),
        (by.LowRankEnsemble(2), "stem conv shortcut head"),
        (by.BatchEnsemble(2), "stem conv shortcut head"),
        (by.MCDropout(0.1), "conv shortcut head"),
        (by.DropConnect(0.1), "stem conv shortcut head"),
        (by.EMP(2), "norm1 norm2 head"),
        (by.ECMP(2), "norm1 norm2 head"),
        (by.EMP(2, patches=("input",)), "stem"),
        (by.ECMP(2, patches=("output",)), "head"),
        (by.EMP(2, patches=("norm",)), "norm1 norm2"),
        (by.ECMP(2, patches=("norm", "output", "input")), "stem norm1 norm2 head"),
        (by.MeanField(), "stem norm1 conv norm2 shortcut head"),
        (by.Ensemble(2), "stem norm1 conv norm2 shortcut head"),
    ],
    ids=str,
)
def test_a_method_alone_converts_its_papers_layers(method: Method, names: str) -> None:
    assert list(bayesian_layers(by.convert(Residual(), method))) == names.split()


def test_only_the_ensemble_converts_embeddings_by_default() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))

    assert list(bayesian_layers(by.convert(make(), by.Ensemble(2)))) == ["0", "1"]
    assert list(bayesian_layers(by.convert(make(), by.MeanField()))) == ["1"]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("head", ["head"]),
        ("body.*", ["body.0", "body.2"]),
        ("*.2", ["body.2"]),
        ("b?dy.[01]", ["body.0"]),
        ("body", ["body.0", "body.2"]),
        (nn.LayerNorm, ["norm"]),
        (nn.Linear, ["body.0", "body.2", "head"]),
        (lambda name, layer: getattr(layer, "out_features", 0) == 6, ["body.0", "body.2"]),
        (lambda name, layer: name.startswith("h"), ["head"]),
    ],
    ids=["name", "star", "suffix", "brackets", "parent", "norm type", "linear type", "module", "name predicate"],
)
def test_layers_are_chosen_by_name_parent_type_and_predicate(selector: Any, names: list[str]) -> None:
    assert list(bayesian_layers(by.convert(Net(), {selector: by.MeanField()}))) == names


def test_a_type_means_exactly_that_type() -> None:
    class Special(nn.Linear):
        pass

    model = by.convert(nn.Sequential(nn.Linear(3, 3), Special(3, 3)), {nn.Linear: by.Rank1(2)})
    assert list(bayesian_layers(model)) == ["0"]
    assert by.summary(model).rows[1].note == "not selected"


def test_the_first_match_wins_and_none_leaves_out() -> None:
    chosen = {"body.0": None, "body": by.IBNN(2), nn.LayerNorm: by.ECMP(3), "*": by.Rank1(2)}
    model = by.convert(Net(), chosen)
    assert methods_of(model) == {"body.2": "IBNN", "norm": "ECMP", "head": "Rank1"}
    assert by.summary(model).rows[0].note == "left out by 'body.0'"


def test_the_root_module_itself_is_converted() -> None:
    layer = nn.Linear(4, 3)
    model = by.convert(layer, by.Rank1(2))
    assert model is layer and list(bayesian_layers(model)) == [""]
    assert model(torch.randn(5, 4)).shape == (5, 3)
    assert [row.name for row in by.summary(model).rows] == ["(model)"]


def test_any_nesting_is_reached() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.ModuleDict({"a": nn.Sequential(nn.Linear(3, 3)), "b": nn.ModuleList([nn.Linear(3, 3)])})
            self.parts = nn.ModuleList([nn.Linear(3, 3), inner])

        def forward(self, x: Tensor) -> Tensor:
            inner = self.parts[1]
            return inner["b"][0](inner["a"](self.parts[0](x)))

    model = by.convert(Nested(), by.Rank1(2))
    assert list(bayesian_layers(model)) == ["parts.0", "parts.1.a.0", "parts.1.b.0"]
    assert by.check(model, torch.randn(4, 3)) == {"parts.0": 1, "parts.1.a.0": 1, "parts.1.b.0": 1}


# What stays.


def test_a_shared_module_is_converted_once_and_is_one_function() -> None:
    layer = nn.Linear(3, 3)
    model = by.convert(nn.Sequential(layer, nn.Tanh(), layer), by.MeanField(init_log_std=(-1, -1))).eval()
    assert list(bayesian_layers(model)) == ["0"] and model[2] is model[0]
    assert by.summary(model).base == 12
    x = torch.randn(5, 3)
    drawn = by.draw(model, 1)
    assert drawn[0] is drawn[2]
    expected = drawn[0].weight @ torch.tanh(drawn[0].weight @ x[0] + drawn[0].bias) + drawn[0].bias
    assert torch.allclose(drawn(x)[0], expected, atol=1e-6)


def test_tied_parameters_stay_tied_under_factors() -> None:
    model = by.convert(TiedNet(), {"*": by.Rank1(2)})
    assert list(bayesian_layers(model)) == ["table", "mix", "out"]
    assert model.out.weight is model.table.weight
    assert by.summary(model).base == sum(p.numel() for p in TiedNet().parameters()) == 9 * 4 + 4 * 4 + 4
    model(torch.randint(9, (6, 5))).sum().backward()
    assert model.table.weight.grad is model.out.weight.grad is not None


def test_tied_parameters_are_skipped_by_default_with_the_reason() -> None:
    model = by.convert(TiedNet(), by.MeanField())
    assert list(bayesian_layers(model)) == ["mix"]
    (note,) = (row.note for row in by.summary(model).rows if row.name == "out")
    assert "tied to 'table'" in note and "Rank1" in note


@pytest.mark.parametrize("name", ["out", "table"])
def test_tied_parameters_are_refused_when_named(name: str) -> None:
    model, other = TiedNet(), "table" if name == "out" else "out"
    with refused(model, f"'{name}'", "MeanField()", f"tied to '{other}'", "a method of factors (Rank1"):
        by.convert(model, {name: by.MeanField()})


class Cubed(nn.Module):
    """Three weights of 1 in a part, a part of a part and the root: the output is the product of their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Sequential(nn.Linear(1, 1, bias=False)))
        self.last = nn.Linear(1, 1, bias=False)
        for p in self.parameters():
            nn.init.ones_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x))


def test_a_part_and_then_the_whole_share_one_scope_and_component() -> None:
    model = Cubed()
    by.convert(model.part[1], by.BatchEnsemble(3, mean_std=0))
    by.convert(model.part, by.BatchEnsemble(3, mean_std=0))
    by.convert(model, by.BatchEnsemble(3, mean_std=0))
    layers = bayesian_layers(model)
    assert list(layers) == ["part.0", "part.1.0", "last"]
    assert len({id(layer.scope) for layer in layers.values()}) == 1
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == len(model._forward_pre_hooks) == 1
    with torch.no_grad():
        for layer in layers.values():
            layer.posterior.out_loc.copy_(torch.tensor([[2.0], [3.0], [5.0]]))
    for rows in (1, 3, 7):
        assert set(model.train()(torch.ones(rows, 1)).flatten().tolist()) <= {8.0, 27.0, 125.0}
    assert {model.eval()(torch.ones(1, 1)).item() for _ in range(60)} == {8.0, 27.0, 125.0}


def test_pretrained_bits_and_the_users_own_hooks_stay() -> None:
    model, calls = Net(), []
    model.body[0].register_forward_hook(lambda *_: calls.append(1))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    model.head.weight.requires_grad_(False)
    by.convert(model, by.MeanField())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items())
    assert not model.head.weight.requires_grad and isinstance(model, Net)
    model(torch.randn(2, 4))
    assert calls == [1]


def test_print_shows_the_method() -> None:
    text = str(by.convert(Net(), {"head": by.Rank1(2, prior_std=0.3)}))
    assert "BayesianLinear(\n    in_features=6, out_features=3, bias=True, Rank1(2, prior_std=0.3)" in text
    assert "(norm): LayerNorm" in text


def test_summary_is_a_table_with_the_numbers_counted_by_hand() -> None:
    text = str(by.summary(by.convert(Net(), {"norm": by.EMP(5), "*": by.Rank1(2)})))
    assert text.splitlines() == [
        "layer   type       method    base  added  overhead",
        "--------------------------------------------------",
        "body.0  Linear     Rank1(2)    30     40   133.33%",  # 2 · 2 · (4 + 6)
        "body.2  Linear     Rank1(2)    42     48   114.29%",  # 2 · 2 · (6 + 6)
        "norm    LayerNorm  EMP(5)      12     48   400.00%",  # 4 · (6 + 6)
        "head    Linear     Rank1(2)    21     36   171.43%",  # 2 · 2 · (6 + 3)
        "--------------------------------------------------",
        "total                         105    172   163.81%",
    ]


def test_summary_says_what_was_skipped_and_why() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear, self.bag, self.linear = nn.Bilinear(2, 2, 2), nn.EmbeddingBag(2, 2), nn.Linear(2, 2)
            self.free, self.norm = nn.Parameter(torch.zeros(3)), nn.LayerNorm(2)

    notes = {row.name: row.note for row in by.summary(by.convert(Odd(), by.Rank1(2))).rows}
    assert "two inputs" in notes["bilinear"] and "use Embedding and a sum" in notes["bag"]
    assert notes["norm"] == "Rank1 leaves norm layers shared by default"
    assert "free: parameters of a module that contains" in notes["(model)"] and notes["linear"] == ""


# Back to plain.


def test_revert_gives_the_mean_and_leaves_no_trace() -> None:
    model, x = Net().eval(), torch.randn(5, 4)
    before, expected = fingerprint(model), model(x)
    by.revert(by.convert(model, by.MeanField(), keep_dropout=True))
    assert fingerprint(model) == before
    assert torch.equal(model(x), expected)  # the mean of a mean-field posterior is the base tensor


def test_revert_averages_the_components() -> None:
    model = by.convert(nn.Linear(2, 1, bias=False), by.BatchEnsemble(2))
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 10.0]]))
        model.posterior.in_loc.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model.posterior.out_loc.copy_(torch.tensor([[1.0], [2.0]]))
    assert torch.equal(by.revert(model).weight, torch.tensor([[3.5, 50.0]]))  # (1·1 + 3·2)/2, (20 + 80)/2


def test_revert_of_tied_layers_is_the_function_of_the_mean() -> None:
    model = by.convert(TiedNet(), {"*": by.Rank1(2, mean_std=0.5)})
    ids = torch.randint(9, (4, 5))
    expected = by.draw(model, None)(ids)
    assert torch.allclose(by.revert(model)(ids), expected, atol=1e-6)


def test_revert_of_a_plain_network_is_refused() -> None:
    model = Net()
    with refused(model, "no Bayesian layer to revert"):
        by.revert(model)


# Dropout that the network already has.


def dropping(keep: bool, kind: Callable[[float], nn.Module] = nn.Dropout) -> nn.Module:
    """An identity before a dropout, so that what is zero was dropped."""
    conv = nn.Conv2d(8, 8, 1, bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.eye(8)[..., None, None])
    method = by.BatchEnsemble(1, mean_std=0)
    return by.convert(nn.Sequential(conv, kind(0.5)), method, keep_dropout=keep).eval()


def test_without_keep_dropout_it_is_dead_in_eval() -> None:
    x = torch.rand(3, 8, 4, 4) + 1
    assert torch.equal(dropping(False)(x), x)


def test_keep_dropout_is_alive_in_eval_with_one_mask_per_draw() -> None:
    model, x = dropping(True), torch.ones(6, 8, 4, 4)
    first, second = model(x), model(x)
    assert set(first.unique().tolist()) == {0.0, 2.0}  # kept values are divided by 1 - p
    assert torch.equal(first, first[:1].expand_as(first))
    assert not torch.equal(first, second)


def test_keep_dropout_of_channels_drops_whole_channels() -> None:
    y = dropping(True, nn.Dropout2d)(torch.ones(2, 8, 4, 4))
    assert torch.equal(y, y[:1, :, :1, :1].expand_as(y)) and set(y.unique().tolist()) == {0.0, 2.0}


def test_keep_dropout_masks_every_element_apart_in_training() -> None:
    y = dropping(True).train()(torch.ones(2, 8, 4, 4))
    assert not torch.equal(y[0], y[1])


def test_a_drawn_network_has_its_mask_frozen() -> None:
    model, x = dropping(True), torch.ones(2, 8, 4, 4)
    drawn = by.draw(model, 3)
    assert torch.equal(drawn(x), drawn(x)) and torch.equal(drawn(x), by.draw(model, 3)(x))
    assert not torch.equal(drawn(x), by.draw(model, 4)(x))


def test_kept_dropout_of_a_time_major_batch_has_one_mask_for_all_rows() -> None:
    class Steps(nn.Sequential):
        pass

    model = by.convert(Steps(nn.Linear(3, 16), nn.Dropout(0.5)), by.Rank1(2), batch_dim=1, keep_dropout=True).eval()
    dropped = model(torch.randn(5, 4, 3)) == 0
    assert dropped.any() and torch.equal(dropped, dropped[:, :1].expand_as(dropped))


def test_a_dropout_that_leaves_nothing_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0))
    with refused(model, "'1'", "p=1.0", "expected p < 1"):
        by.convert(model, by.Rank1(2), keep_dropout=True)


# Bad input.


def test_an_unknown_pattern_lists_the_nearest_names() -> None:
    model = Net()
    with refused(model, "pattern 'haed' matches no layer", "nearest names are 'head'"):
        by.convert(model, {"haed": by.Rank1(2)})


def test_one_unknown_pattern_among_good_ones_changes_nothing() -> None:
    model = Net()
    with refused(model, "pattern 'body.7'", "'body.2'"):
        by.convert(model, {"head": by.Rank1(2), "body.7": by.Rank1(2)})


@pytest.mark.parametrize(
    ("methods", "parts"),
    [
        ({nn.Dropout: by.MCDropout(0.1)}, ("Dropout has nothing but its mask to draw", "keep_dropout=True")),
        ({nn.ReLU: by.Rank1(2)}, ("ReLU is not a supported layer type",)),
        ({nn.Conv2d: by.Rank1(2)}, ("no layer is of type Conv2d", "LayerNorm, Linear")),
        ({lambda name, layer: False: by.Rank1(2)}, ("predicate", "chose no layer")),
        ({"norm": by.Rank1(2)}, ("'norm': Rank1(2) can't be applied", "no input and output factors", "use MeanField")),
        ({nn.LayerNorm: by.IBNN(2)}, ("IBNN(2) can't be applied", "LayerNorm", "use MeanField, EMP or ECMP")),
        ({"nor*": by.MCDropout(0.1)}, ("MCDropout(0.1) can't be applied", "put MCDropout on the Linear or Conv")),
        ({}, ("expected a method such as Rank1(4)", "got {}")),
        (by.Rank1, ("expected a method such as Rank1(4)", "Rank1'>")),
        ({"head": by.Rank1}, ("pattern 'head'", "expected a method such as Rank1(4) or None")),
        ({"head": 4}, ("pattern 'head'", "got 4")),
    ],
    ids=[
        *("a dropout", "an unsupported type", "an absent type", "a predicate", "factors on a norm", "nodes of a norm"),
        *("dropping inputs of a norm", "an empty dict", "a class", "a class in a dict", "a number"),
    ],
)
def test_methods_that_do_not_fit_are_refused(methods: Any, parts: tuple[str, ...]) -> None:
    model = Net()
    with refused(model, *parts):
        by.convert(model, methods)


def test_a_model_with_nothing_to_convert_is_refused() -> None:
    model = nn.Sequential(nn.ReLU())
    with refused(model, "Rank1(2) found no layer to convert", "linear, conv"):
        by.convert(model, by.Rank1(2))


@pytest.mark.parametrize("batch_dim", [-1, 1.0, "0"])
def test_a_wrong_batch_dim_is_refused(batch_dim: Any) -> None:
    model = Net()
    with refused(model, f"batch_dim={batch_dim!r}", "expected 0 (batch first)"):
        by.convert(model, by.Rank1(2), batch_dim=batch_dim)


@pytest.mark.parametrize(
    "method", [by.Rank1, by.IBNN, by.EMP, by.ECMP, by.LowRankEnsemble, by.BatchEnsemble, by.Ensemble]
)
def test_fewer_than_one_component_is_refused(method: Callable[..., Method]) -> None:
    for k in (0, -1, 2.0, "4", True):
        expected = f"{method.__name__}(components={k!r}): expected an integer >= 1"  # type: ignore[attr-defined]
        with pytest.raises(BayesifyError, match=f"^{re.escape(expected)}$"):
            method(k)


@pytest.mark.parametrize("method", [by.MCDropout, by.DropConnect])
def test_a_rate_outside_zero_to_one_is_refused(method: Callable[..., Method]) -> None:
    for p in (-0.1, 1, 1.5, float("nan"), "0.1"):
        with pytest.raises(BayesifyError, match=re.escape(f"(p={p!r}): expected a number >= 0 and < 1")):
            method(p)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by.Rank1(2, factors="none"), "Rank1(factors='none'): expected one of 'both', 'input', 'output'"),
        (lambda: by.Rank1(2, posterior="gauss"), "Rank1(posterior='gauss'): expected one of 'normal'"),
        (lambda: by.Rank1(2, prior="gauss"), "Rank1(prior='gauss'): expected one of"),
        (lambda: by.Rank1(2, bias="own"), "Rank1(bias='own'): expected one of 'shared', 'component'"),
        (lambda: by.Rank1(2, divergence="mean"), "Rank1(divergence='mean'): expected one of"),
        (lambda: by.Rank1(2, prior_std=0), "Rank1(prior_std=0): expected a number > 0"),
        (lambda: by.Rank1(2, signs=1.5), "Rank1(signs=1.5): expected a number >= 0"),
        (lambda: by.Rank1(2, dropout_rate=0), "Rank1(dropout_rate=0): expected a number > 0 and < 1"),
        (lambda: by.Rank1(2, posterior="cauchy", divergence="moment"), "needs a normal posterior and prior"),
        (lambda: by.IBNN(2, divergence="mean"), "IBNN(divergence='mean'): expected one of"),
        (lambda: by.EMP(2, patches=("conv",)), "EMP(patches=('conv',)): expected some of 'norm', 'output', 'input'"),
        (lambda: by.ECMP(2, patches=()), "ECMP(patches=()): expected some of"),
        (lambda: by.EMP(2, init_copies="zero"), "EMP(init_copies='zero'): expected one of 'jitter', 'random'"),
        (lambda: by.ECMP(2, reach="token"), "ECMP(reach='token'): expected one of 'batch', 'row'"),
        (lambda: by.MeanField(estimator="vmap"), "MeanField(estimator='vmap'): expected one of 'exemplar'"),
        (lambda: by.MeanField(init_log_std=(-5, -6)), "MeanField(init_log_std=(-5, -6)): expected (low, high)"),
        (lambda: by.LowRankEnsemble(2, rank=0), "LowRankEnsemble(rank=0): expected an integer >= 1"),
        (lambda: by.BatchEnsemble(2, bias="own"), "BatchEnsemble(bias='own'): expected one of"),
        (lambda: by.Ensemble(2, init_copies="zero"), "Ensemble(init_copies='zero'): expected one of"),
        (lambda: by.DropConnect(0.1, reach="token"), "DropConnect(reach='token'): expected one of 'batch', 'row'"),
    ],
)
def test_wrong_options_name_the_value_and_what_was_expected(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(BayesifyError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("method", [by.Rank1(2), {"*": by.MeanField()}], ids=["default", "pattern"])
def test_weights_that_are_not_numbers_are_refused(method: Any, value: float) -> None:
    model = Net()
    with torch.no_grad():
        model.body[2].weight[0, :2] = value
    with refused(model, "body.2.weight has 2 NaN or infinite values of 36", "load valid weights"):
        by.convert(model, method)


def test_integer_weights_are_refused() -> None:
    model = Net()
    model.head.weight = nn.Parameter(torch.ones(3, 6, dtype=torch.int8), requires_grad=False)
    with refused(model, "head.weight has dtype torch.int8; expected floating point"):
        by.convert(model, by.Rank1(2))


@pytest.mark.parametrize(
    "methods", [by.IBNN(2), {"0": by.IBNN(2)}, {nn.Linear: by.IBNN(2)}], ids=["default", "name", "type"]
)
def test_a_layer_that_is_bayesian_already_is_refused(methods: Any) -> None:
    model = by.convert(MLP(), by.Rank1(2))
    with refused(model, "IBNN(2)", "0: already Bayesian (Rank1(2)); use by.revert(model) first"):
        by.convert(model, methods)


def test_converting_the_rest_leaves_what_is_bayesian_already() -> None:
    model = by.convert(by.convert(Net(), {"head": by.Rank1(2)}), by.MeanField())
    assert methods_of(model) == {"body.0": "MeanField", "body.2": "MeanField", "norm": "MeanField", "head": "Rank1"}


def test_lazy_modules_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with refused(model, "its shape is not known yet: call the model once"):
        by.convert(model, {"0": by.Rank1(2)})
    model(torch.randn(2, 5))
    assert list(bayesian_layers(by.convert(model, {"0": by.Rank1(2)}))) == ["0"]


@pytest.mark.parametrize("old", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_old_style_weight_norms_are_refused_when_named_and_skipped_by_default(old: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates the old weight_norm
        model = nn.Sequential(old(nn.Linear(3, 3)), nn.Linear(3, 3))
    with refused(model, "'0': Rank1(2) can't be applied", "old-style weight_norm or spectral_norm", "remove it first"):
        by.convert(model, {"0": by.Rank1(2)})
    rows = by.summary(by.convert(model, by.Rank1(2))).rows
    assert "old-style" in rows[0].note and rows[1].method == "Rank1(2)"


def test_parametrized_layers_are_refused_when_named_and_skipped_by_default() -> None:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 3))
    with refused(model, "'0'", "torch.nn.utils.parametrize", "remove the parametrization"):
        by.convert(model, {"0": by.Rank1(2)})
    model = by.convert(model, by.Rank1(2))
    assert list(bayesian_layers(model)) == ["1"]
    assert "parametrize" in by.summary(model).rows[0].note


def test_a_forward_bound_to_the_instance_is_refused() -> None:
    model = MLP()
    model[0].forward = types.MethodType(lambda self, x: x, model[0])  # type: ignore[method-assign]
    with refused(model, "'0'", "forward is set on the instance"):
        by.convert(model, {"0": by.Rank1(2)})


def test_a_compiled_model_is_refused() -> None:
    model = torch.compile(MLP(), backend="eager")
    with refused(model, "OptimizedModule wraps the network", "convert the network first"):
        by.convert(model, by.Rank1(2))


def test_a_distributed_model_is_refused(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(MLP())
        with refused(model, "DistributedDataParallel wraps the network", "convert the network first"):
            by.convert(model, by.Rank1(2))
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"expected a torch\.nn\.Module, got dict"):
        by.convert({}, by.Rank1(2))  # type: ignore[type-var]


def test_a_batch_whose_rows_cannot_be_followed_is_an_error_in_training() -> None:
    class Cut(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self[4](self[2](self[0](x))[:4])

    model = by.convert(Cut(), by.Rank1(2))
    with refused(model, "layer '4' got 4 rows while the model got 6", "batch_dim=", "{'4': None", error=RowError):
        model(torch.randn(6, 6))
    assert model.eval()(torch.randn(6, 6)).shape == (4, 3)  # one draw for all rows needs no following
    left_out = by.convert(Cut(), {"4": None, "*": by.Rank1(2)})
    assert left_out(torch.randn(6, 6)).shape == (4, 3)


def test_a_call_that_fails_leaves_no_trace() -> None:
    class Failing(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](self[0](x)) + torch.zeros(len(x), 99)

    model = by.convert(Failing(), by.Rank1(2))
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(torch.randn(6, 6))
    assert torch.equal(copy.deepcopy(model)[0].weight, model[0].weight)
    with pytest.raises(BayesifyError, match="outside its model"):
        model[0](torch.randn(6, 6))


def test_a_layer_called_outside_its_model_says_so() -> None:
    model = by.convert(Net(), by.Rank1(2))
    with refused(model, "layer 'head' was called outside its model", "by.draw(model)", error=BayesifyError):
        model.head(torch.randn(2, 6))
    assert by.draw(model, 0).head(torch.randn(2, 6)).shape == (2, 3)


# Rows and statistics.


class TimeMajor(nn.Module):
    """Reads (T, B, D) and folds time and batch into rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        return self.head(h.mean(0))


class TransposedFold(nn.Module):
    """Reads (B, T, D) and folds it time first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        folded = x.transpose(0, 1).flatten(0, 1)
        return self.layer(folded).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


def test_check_catches_a_time_major_model_that_trains_silently() -> None:
    model, x = by.convert(TimeMajor(), by.Rank1(2)).eval(), torch.randn(4, 4, 3)
    assert model(x).shape == (4, 2)  # as many steps as rows: nothing looks wrong
    why = "Its rows [0] should belong to row 0 of the batch, but changed with the other rows"
    with refused(model, "layer 'head' gets 4 rows for a batch of 4", why, "give batch_dim", error=RowError):
        by.check(model, x)


def test_check_accepts_the_time_major_model_with_its_batch_dim() -> None:
    model = by.convert(TimeMajor(), by.Rank1(2), batch_dim=1)
    assert by.check(model, torch.randn(4, 4, 3)) == {"embed": 4, "head": 1}
    assert by.check(model, torch.randn(5, 3, 3)) == {"embed": 5, "head": 1}


def test_a_time_major_row_keeps_its_component_with_batch_dim() -> None:
    model = TimeMajor()
    for layer in (model.embed, model.head):
        nn.init.zeros_(layer.bias)
    by.convert(model, by.BatchEnsemble(2, mean_std=0), batch_dim=1)
    with torch.no_grad():
        model.embed.posterior.out_loc[1] = 0  # component 1 sees nothing, whatever the time step
    y = model(torch.randn(5, 6, 3))
    silent = (y.abs() < 1e-30).all(1)  # a factor of 0 is the smallest positive number
    assert silent.tolist() in ([True, False] * 3, [False, True] * 3)


def test_check_catches_rows_that_are_folded_in_another_order() -> None:
    model, x = by.convert(TransposedFold(), by.Rank1(2)).eval(), torch.randn(4, 3, 3)
    assert model(x).shape == (4, 3, 2)
    with refused(model, "layer 'layer' gets 12 rows for a batch of 4", error=RowError):
        by.check(model, x)


def test_check_catches_rows_that_see_each_other() -> None:
    class Mixing(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    model = by.convert(Mixing(), by.Rank1(2))
    with refused(model, "layer '0'", "Rows are mixed", error=RowError):
        by.check(model, torch.randn(4, 6))


def test_check_counts_the_tokens_of_a_row() -> None:
    class Folded(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(0, 1).unsqueeze(1)).unflatten(0, x.shape[:2]).mean(1)

    assert set(by.check(by.convert(Folded(), by.Rank1(2)), torch.randn(3, 7, 5)).values()) == {7}


def test_check_needs_two_rows_and_a_bayesian_model() -> None:
    with pytest.raises(BayesifyError, match="at least 2 rows to tell them apart, got 1"):
        by.check(by.convert(MLP(), by.Rank1(2)), torch.randn(1, 6))
    with pytest.raises(BayesifyError, match=r"no Bayesian layer to check: use by\.convert"):
        by.check(MLP(), torch.randn(4, 6))


def test_recalibrate_gives_the_average_of_the_batches_own_statistics() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3), nn.ReLU(), nn.Linear(4, 2)).eval()
    by.convert(model, by.DropConnect(0.0))  # a posterior that draws the base weights always
    model[1].running_mean.fill_(7.0)
    loader = [torch.randn(n, 3) for n in (8, 8, 5)]
    assert by.recalibrate(model, loader) is model
    hidden = [torch.nn.functional.linear(x, model[0].weight, model[0].bias) for x in loader]
    assert torch.allclose(model[1].running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0), atol=1e-6)
    assert torch.allclose(model[1].running_var, torch.stack([h.var(0) for h in hidden]).mean(0), atol=1e-6)
    assert model[1].momentum == 0.3 and not any(m.training for m in model.modules())


def test_recalibrate_reads_the_inputs_of_pairs_and_keeps_each_modules_mode() -> None:
    model = by.convert(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), by.DropConnect(0.0)).train()
    model[1].eval()
    x = torch.randn(16, 3) * 4
    by.recalibrate(model, [(x, torch.zeros(16))])
    assert torch.allclose(model[0].running_mean, x.mean(0), atol=1e-6)
    assert torch.allclose(model[0].running_var, x.var(0), rtol=1e-5)
    assert model.training and model[0].training and not model[1].training


def test_recalibrate_gives_each_member_of_an_ensemble_its_own_statistics() -> None:
    model = by.convert(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), by.Ensemble(2, init_copies="random")).eval()
    x = torch.randn(6000, 2)
    by.recalibrate(model, [x])
    for member in by.members(model):
        hidden = member[0](x)
        assert torch.allclose(member[1].running_mean, hidden.mean(0), atol=0.15)
        assert torch.allclose(member[1].running_var, hidden.var(0), rtol=0.15)
    assert not torch.allclose(model[1].running_var, model[1].posterior.running_var[0], rtol=0.15)


def test_recalibrate_without_a_batch_is_refused_and_changes_nothing() -> None:
    model = by.convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), by.Rank1(2))
    model(torch.randn(8, 3))
    with refused(model, "recalibrate got no batch", error=BayesifyError):
        by.recalibrate(model, [])


def test_recalibrate_that_fails_leaves_the_statistics_as_they_were() -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.randn(8, 3)
        raise OSError("the disk is gone")

    model = by.convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3)), by.Rank1(2)).eval()
    before = fingerprint(model)
    with pytest.raises(OSError, match="the disk is gone"):
        by.recalibrate(model, broken())
    assert fingerprint(model) == before and model[1].momentum == 0.3


class GatedReader(nn.Module):
    """Reads the weight of `inner` without calling it, behind a gate that begins at zero, as residual branches do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate, self.head = nn.Linear(4, 4), nn.Parameter(torch.zeros(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gate * nn.functional.linear(x, self.inner.weight))


def test_a_weight_that_is_read_behind_a_gate_of_zero_is_found() -> None:
    x = torch.randn(6, 4)
    model = by.convert(GatedReader(), by.Rank1(2), example=x)
    assert set(bayesian_layers(model)) == {"head"}
    with pytest.raises(by.BayesifyError, match="layer 'inner': not called"):
        by.check(by.convert(GatedReader(), by.Rank1(2)), x)


def test_to_look_for_weights_that_are_read_leaves_the_inputs_that_check_compares() -> None:
    """A layer that is not called at all once made `check` compare the inputs of two networks."""

    class Unused(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x))

    model = by.convert(Unused(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 3)), by.Rank1(2))
    assert by.check(model, torch.randn(6, 4)) == {"0": 1, "1": 1}
