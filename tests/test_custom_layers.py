"""Layers that nobody here wrote: subclasses with a forward of their own, and modules of no known type."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from cases import METHODS
from draws import called
from foreign import (
    BatchNormAct,
    CastLinear,
    Conv1D,
    FusedRmsNorm,
    GroupNormAct,
    LayerNorm2d,
    LayerNormAct,
    LayerScale,
    LlamaNorm,
    Named,
    SameConv,
    ScaledEmbedding,
    ScaledStdConv,
    StdConv,
)
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.layers import bayesian_layers, bayesian_type
from bayesify.methods.base import Method

IMAGES = (4, 7, 7)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "StdConv": (lambda: StdConv(4, 6, 3, padding=1, stride=2), IMAGES, "conv"),
    "StdConv-groups": (lambda: StdConv(4, 6, 3, groups=2, bias=False), IMAGES, "conv"),
    "ScaledStdConv": (lambda: ScaledStdConv(4, 6, 3), IMAGES, "conv"),
    "SameConv": (lambda: SameConv(4, 6, 3, stride=2), IMAGES, "conv"),
    "SameConv-depthwise": (lambda: SameConv(4, 4, 3, groups=4, bias=False), IMAGES, "conv"),
    "BatchNormAct": (lambda: BatchNormAct(4), IMAGES, "norm"),
    "GroupNormAct": (lambda: GroupNormAct(2, 4), IMAGES, "norm"),
    "LayerNormAct": (lambda: LayerNormAct(5), (3, 5), "norm"),
    "LayerNorm2d": (lambda: LayerNorm2d(4), IMAGES, "norm"),
    "FusedRmsNorm": (lambda: FusedRmsNorm(5), (3, 5), "norm"),
    "LlamaNorm": (lambda: LlamaNorm(5), (3, 5), "norm"),
    "Conv1D": (lambda: Conv1D(6, 5), (3, 5), "linear"),
    "Conv1D-square": (lambda: Conv1D(5, 5), (3, 5), "linear"),
    "CastLinear": (lambda: CastLinear(5, 6), (3, 5), "linear"),
    "LayerScale": (lambda: LayerScale(5), (3, 5), "custom"),
    "ScaledEmbedding": (lambda: ScaledEmbedding(9, 5, padding_idx=0), (3,), "embedding"),
    "Named": (lambda: Named("mine", 5, 6), (3, 5), "linear"),
}
every_layer = pytest.mark.parametrize("case", CASES)
BY_ACTIVATIONS = {"SameConv", "SameConv-depthwise", "Conv1D", "Conv1D-square", "CastLinear"}


def made(case: str, dtype: torch.dtype = torch.float32, rows: int = 6) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape, role = CASES[case]
    layer = make().to(dtype)
    x = torch.randint(9, (rows, *shape)) if role == "embedding" else torch.randn(rows, *shape, dtype=dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer, x


def applies(method: Method, case: str) -> bool:
    layer, _ = made(case)
    kind = bayesian_type(layer)
    assert not isinstance(kind, str)
    return method.refusal(kind.site_of(layer)) is None


@every_layer
def test_its_role_is_what_it_computes(case: str) -> None:
    layer, _ = made(case)
    kind = bayesian_type(layer)
    assert not isinstance(kind, str) and kind.role == CASES[case][2] and kind.plain is type(layer)
    traits = getattr(kind, "traits", None)
    assert (traits is not None and traits.scales) == (case in BY_ACTIVATIONS)
    assert traits is None or traits.vmaps or case == "BatchNormAct"


KINDS = ("Rank1-cauchy", "EMP-row-learned", "MeanField", "MeanField-flipout", "LowRankEnsemble", "Ensemble")
"""Methods that between them use every part of a perturbation."""
OF_EACH_ROLE = ("StdConv", "SameConv", "BatchNormAct", "Conv1D", "Named")
"""Layers that take every method, by their weights or by activations."""
FITTING = [
    (case, name)
    for case in CASES
    for name, method in METHODS.items()
    if (name in KINDS or case in OF_EACH_ROLE) and name != "MeanField-local" and applies(method, case)
]


def compare_with_folded_layers(case: str, method: Method, dtype: torch.dtype) -> None:
    """The layer's own forward, called for each row with that row's tensors, says what is right."""
    layer, x = made(case, dtype)
    own = copy.deepcopy(layer).eval()
    model = by.convert(nn.Sequential(layer), {"0": method}).to(dtype)
    bayesian = model.eval()[0]  # a norm in evaluation, so that one row can be computed alone
    tolerance = 1e-5 if dtype is torch.float32 else 1e-10
    with torch.no_grad():
        found, call = called(bayesian, x, batch=6)
        for row in range(6):
            expected = torch.func.functional_call(own, call.tensors(bayesian, row), (x[row : row + 1],))
            torch.testing.assert_close(found[row : row + 1], expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(("case", "method"), FITTING)
def test_draws_per_row_equal_the_folded_layer(case: str, method: str) -> None:
    compare_with_folded_layers(case, METHODS[method], torch.float64)


@every_layer
def test_draws_per_row_equal_the_folded_layer_in_single_precision(case: str) -> None:
    compare_with_folded_layers(case, by.MeanField(), torch.float32)


@pytest.mark.parametrize("case", ["CastLinear", "LayerNormAct", "ScaledEmbedding"])
def test_local_noise_is_that_of_a_weight_for_each_row(case: str) -> None:
    """Rows shared one draw once. Equal rows have outputs with the mean and spread of frozen draws."""
    layer, x = made(case, rows=1)
    model = by.convert(layer, {type(layer): by.MeanField(estimator="local", init_log_std=(-1.5, -1.5))})
    with torch.no_grad():
        found = model(x.expand(2000, *x.shape[1:]))
        expected = torch.cat([by.draw(model, seed)(x) for seed in range(500)])
    spread = expected.std(0)
    assert torch.allclose(found.mean(0), expected.mean(0), atol=6 * float(spread.max()) * (1 / 500 + 1 / 2000) ** 0.5)
    assert torch.allclose(found.std(0), spread, rtol=0.25, atol=1e-3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.randn(1, 6, 1, 1)), LayerScale(6)
        self.stem, self.norm, self.conv = SameConv(3, 6, 3, stride=2), BatchNormAct(6), ScaledStdConv(6, 6, 3)
        self.norm2, self.norm3, self.mlp, self.head = LayerNorm2d(6), LlamaNorm(6), Conv1D(8, 6), CastLinear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)) + self.token
        x = self.norm2(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(torch.tanh(self.mlp(self.norm3(self.scale(x).contiguous()))).mean(1))


def converted(method: Method) -> nn.Module:
    torch.manual_seed(0)
    return by.convert(Net(), {"*": method})


every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@every_method
def test_a_network_of_them_trains_predicts_saves_and_reverts(method: Method, tmp_path: Path) -> None:
    model, x = converted(method), torch.randn(5, 3, 9, 9)
    by.check(model, x)
    by.elbo(model, x, torch.arange(5) % 3, n=10).loss.backward()
    lacking = [n for n, p in model.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    assert not lacking
    found = by.predict(model, x, samples=4, seed=1).probs
    by.save(model, tmp_path / "model.safetensors")
    again = by.load(Net(), tmp_path / "model.safetensors")
    assert torch.equal(by.predict(again, x, samples=4, seed=1).probs, found)
    assert torch.equal(by.predict(pickle.loads(pickle.dumps(model)), x, samples=4, seed=1).probs, found)
    assert torch.equal(by.predict(copy.deepcopy(model), x, samples=4, seed=1).probs, found)
    drawn = by.draw(model, 3)(x)
    reverted = by.revert(model, 3).eval()
    assert type(reverted.conv) is ScaledStdConv and type(reverted.scale) is LayerScale
    torch.testing.assert_close(reverted(x), drawn)


@pytest.mark.parametrize("method", [by.Rank1(2), by.MeanField()], ids=str)
def test_a_network_of_them_compiles_without_a_break(method: Method) -> None:
    model, x = converted(method), torch.randn(4, 3, 9, 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(x).shape == (4, 3)
    model.eval()
    assert compiled(x).shape == (4, 3)


def test_every_parameter_is_accounted_for() -> None:
    model = by.convert(Net(), by.Rank1(2))
    notes = {row.name: row.note for row in by.summary(model).rows}
    assert list(bayesian_layers(model)) == ["stem", "conv", "mlp", "head"]
    assert notes["(model)"].startswith("token: parameters of a module that contains")
    assert notes["norm"] == notes["norm3"] == "Rank1 leaves norm layers shared by default"
    assert notes["scale"] == "Rank1 leaves custom layers shared by default"
    assert notes["conv"] == "gain stays shared"
    assert by.summary(model).base == sum(p.numel() for p in Net().parameters())


class Reader(nn.Module):
    """Reads the weight of one of its layers, and calls the other."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.read
        return self.called(nn.functional.linear(x, kept.weight, kept.bias).to(self.called.weight.dtype))


def test_with_an_example_a_layer_whose_weight_its_holder_reads_is_left_out() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), Reader()), torch.randn(3, 4)
    with pytest.raises(by.ConversionError, match="no chosen layer is called on the example"):
        by.convert(copy.deepcopy(net), {"1.read": by.Rank1(2)}, example=x)
    model = by.convert(net, by.Rank1(2), example=x)
    notes = {row.name: row.note for row in by.summary(model).rows}
    assert notes["1.read"] == "another module reads its weight without calling it, so no draw would reach that module"
    assert by.check(model, x) == {"0": 1, "1.called": 1}


def test_without_an_example_check_finds_a_weight_that_is_read_past_its_layer() -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(4, 4), Reader()), by.Rank1(2)), torch.randn(3, 4)
    with pytest.raises(by.BayesifyError, match=r"layer '1\.read': not called, although its weight is read"):
        by.check(model, x)


class TwoInputs(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + y)


class Batch(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.batch = 7


class Together(nn.Module):
    """Its rows meet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.weight


class InTraining(Together):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x * self.weight


class ActNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu())


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Optional(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Optional(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, scale=2.0)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (TwoInputs(3, 2), "TwoInputs.forward takes 2 inputs"),
        (Batch(), "Batch has an attribute 'batch', a name that a Bayesian layer needs"),
        (Together(), "accepted no input of a trial, or its rows depend"),
        (InTraining(), "in training a row's output depends on the other rows"),
        (ActNorm(3), "a batch norm that computes something else before or inside of it"),
        (Silent(), "its output does not depend on its weight"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_can_not_be_followed_is_refused_with_a_reason(layer: nn.Module, reason: str) -> None:
    with pytest.raises(by.ConversionError, match=reason):
        by.convert(nn.Sequential(layer, nn.Linear(3, 3)), {"0": by.MeanField()})
    model = by.convert(nn.Sequential(layer, nn.Linear(3, 3)), by.MeanField())
    assert reason in by.summary(model).rows[0].note


@pytest.mark.parametrize("method", [by.Rank1(2), by.LowRankEnsemble(2), by.MCDropout(0.1)], ids=str)
@pytest.mark.parametrize("layer", [LlamaNorm(3), LayerScale(3), LayerNorm2d(3)], ids=lambda layer: type(layer).__name__)
def test_factors_need_a_linear_map(layer: nn.Module, method: Method) -> None:
    with pytest.raises(by.ConversionError, match=f"{type(layer).__name__} has no input"):
        by.convert(nn.Sequential(copy.deepcopy(layer)), {"0": method})


def test_a_further_input_is_taken_where_one_draw_serves_the_batch() -> None:
    model, x = Calls(), torch.randn(4, 3)
    expected = model(x)
    model = by.convert(model, by.MeanField(estimator="shared", init_log_std=(-30.0, -30.0)))
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(by.BayesifyError, match="'layer' \\(Optional\\) was called with more than its input"):
        by.convert(Calls(), by.Rank1(2))(x)


def test_a_trial_leaves_the_layer_and_the_random_numbers_alone() -> None:
    layer = BatchNormAct(3)
    before, state = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    bayesian_type(layer)
    assert torch.equal(torch.get_rng_state(), state) and layer.training
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_layers_without_numbers_are_tried_too() -> None:
    with torch.device("meta"):
        model = Net()
    assert list(bayesian_layers(by.convert(model, by.Rank1(2)))) == ["stem", "conv", "mlp", "head"]


class Rectified(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).relu()


def test_an_activation_behind_the_map_is_drawn_with_factors_of_both_signs() -> None:
    """relu(z) ∘ r is relu(z ∘ r) for positive factors alone, which a trial with such factors can't tell apart."""
    model, x = by.convert(Rectified(4, 5, bias=False), by.BatchEnsemble(4, signs=0.5)), torch.randn(4, 4)
    model.scope.start = torch.tensor([0])
    each = [member(x[i]) for i, member in enumerate(by.members(model))]
    assert torch.allclose(model.train()(x), torch.stack(each), atol=1e-6)


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.mul_(0.5), self.weight)


class Dropped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.linear(x, self.weight), 0.5, self.training)


@pytest.mark.parametrize("kind", [Halved, Dropped])
def test_gradients_are_right_of_a_layer_that_is_random_or_changes_its_input_in_place(kind: type[nn.Linear]) -> None:
    """Such a layer must not be run again, nor its input be made again, for the gradient."""
    model, x = by.convert(kind(4, 5, bias=False), by.BatchEnsemble(4)), torch.randn(64, 4)
    model.scope.start = torch.tensor([0])
    torch.manual_seed(1)
    y = model.train()(x.clone())
    s, r = (model.posterior.get_parameter(name)[torch.arange(64) % 4] for name in ("in_loc", "out_loc"))
    torch.manual_seed(1)
    z = kind.forward(cast(nn.Linear, SimpleNamespace(weight=model.weight, training=True)), x * s)
    parameters = [*model.parameters()]
    wanted = torch.autograd.grad((z * r).square().sum(), parameters)
    found = torch.autograd.grad(y.mul_(1.0).square().sum(), parameters)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_a_subclass_that_only_describes_itself_is_the_supported_layer() -> None:
    class Named(nn.Linear):
        def extra_repr(self) -> str:
            return "mine"

    kind = bayesian_type(Named(3, 2))
    assert not isinstance(kind, str) and kind.traits is None and kind.runs_in_chunks
