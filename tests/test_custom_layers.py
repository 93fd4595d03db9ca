"""Layers that nobody here wrote: subclasses with a forward of their own, and modules of no known type."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import FAMILIES
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

import bayesify as by
from bayesify.family import Draws, Family
from bayesify.layers import bayesian_layers, bayesian_type
from bayesify.layers.rows import Rows

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


def applies(family: Family, case: str) -> bool:
    layer, _ = made(case)
    kind = bayesian_type(layer)
    assert not isinstance(kind, str)
    return family.refusal(kind.site_of(layer)) is None


@every_layer
def test_its_role_is_what_it_computes(case: str) -> None:
    layer, _ = made(case)
    kind = bayesian_type(layer)
    assert not isinstance(kind, str) and kind.role == CASES[case][2] and kind.plain is type(layer)
    traits = getattr(kind, "traits", None)
    assert (traits is not None and traits.scales) == (case in BY_ACTIVATIONS)
    assert traits is None or traits.vmaps or case == "BatchNormAct"


FITTING = [(case, family) for case in CASES for family, made_family in FAMILIES.items() if applies(made_family, case)]
FITTING.remove(("Named", "MeanField-local"))  # a supported layer's, whose noise is on its output
FITTING.remove(("Named", "MeanField-some-rows"))  # whose rows take turns before `perturbed`


@pytest.mark.parametrize(("case", "family"), FITTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_per_row_equal_the_folded_layer(case: str, family: str, dtype: torch.dtype) -> None:
    """The layer's own forward, called for each row with that row's tensors, says what is right."""
    method = FAMILIES[family]
    layer, x = made(case, dtype)
    own = copy.deepcopy(layer)
    model = by.convert(nn.Sequential(layer), {"0": method}).to(dtype).eval()
    site, rows = model[0], Rows(6)  # a norm in evaluation, so that one row can be computed alone
    with torch.no_grad():
        p = site.drawn(Draws(torch.arange(min(6, method.components) if method.grain == "component" else 6)))
        torch.manual_seed(1)
        found = site.perturbed(x, p, rows, site.site_of(site).base)
        torch.manual_seed(1)  # local noise is of weights here, drawn when they are folded
        tensors = [site.folded(p, draw) for draw in range(p.size)]
        for row in range(6):
            named = {site.tensor_name(n): t for n, t in tensors[p.draw_of(row)].items()}
            expected = torch.func.functional_call(own.eval(), named, (x[row : row + 1],))
            tolerance = 1e-5 if dtype is torch.float32 else 1e-10
            torch.testing.assert_close(found[row : row + 1], expected, rtol=tolerance, atol=10 * tolerance)


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


def converted(family: Family) -> nn.Module:
    torch.manual_seed(0)
    return by.convert(Net(), {"*": family})


every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@every_family
def test_a_network_of_them_trains_predicts_saves_and_reverts(family: Family, tmp_path: Path) -> None:
    model, x = converted(family), torch.randn(5, 3, 9, 9)
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


@pytest.mark.parametrize("family", [by.Rank1(2), by.MeanField(), by.ECMP(3)], ids=str)
def test_a_network_of_them_compiles_without_a_break(family: Family) -> None:
    model, x = converted(family), torch.randn(4, 3, 9, 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(x).shape == (4, 3)
    model.eval()
    assert compiled(x).shape == (4, 3)


def test_every_parameter_is_accounted_for() -> None:
    model = by.convert(Net(), by.Rank1(2))
    notes = {row.name: row.note for row in by.summary(model).rows}
    assert list(bayesian_layers(model)) == ["stem", "conv", "mlp", "head"]
    assert notes["(model)"].startswith("token: bare in a module that holds layers")
    assert notes["norm"] == notes["norm3"] == "Rank1 leaves norm layers shared by default"
    assert notes["scale"] == "Rank1 leaves custom layers shared by default"
    assert notes["conv"] == "gain stays shared"
    assert by.summary(model).base == sum(p.numel() for p in Net().parameters())


class Reader(nn.Module):
    """Reads the weights of its layers, one of them in a way that its methods do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.hidden, self.called = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.hidden
        return self.called(self.read(x).to(self.called.weight.dtype)) @ kept.weight + kept.bias

    def read(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.told.weight, self.told.bias)


def test_a_layer_whose_weight_its_holder_reads_is_left_out_with_a_reason() -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 4), Reader()), by.Rank1(2))
    notes = {row.name: row.note for row in by.summary(model).rows}
    assert notes["1.told"] == "its Reader reads its weight without calling it, so draws would pass it by"
    assert set(bayesian_layers(model)) == {"0", "1.hidden", "1.called"}
    with pytest.raises(by.ConversionError, match=r"1\.told: its Reader reads its weight without calling it"):
        by.convert(nn.Sequential(Reader(), Reader()), {"1.told": by.Rank1(2)})


def test_a_weight_that_is_read_past_its_layer_is_found() -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(4, 4), Reader()), by.Rank1(2)), torch.randn(3, 4)
    with pytest.raises(by.BayesifyError, match=r"layer '1\.hidden': not called, yet its weight changes the output"):
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
        (Together(), "took no input of a trial, or its rows are not independent"),
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


@pytest.mark.parametrize("family", [by.Rank1(2), by.LowRankEnsemble(2), by.MCDropout(0.1)], ids=str)
@pytest.mark.parametrize("layer", [LlamaNorm(3), LayerScale(3), LayerNorm2d(3)], ids=lambda layer: type(layer).__name__)
def test_factors_need_a_linear_map(layer: nn.Module, family: Family) -> None:
    with pytest.raises(by.ConversionError, match=f"{type(layer).__name__} has no input"):
        by.convert(nn.Sequential(copy.deepcopy(layer)), {"0": family})


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
