"""Each layer type: a draw applied per row equals the same draw folded into the weights of the ordinary layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FAMILIES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

import bayesify as by
from bayesify.family import Draws, Family, Perturbation, Site
from bayesify.layers import LAYERS, BayesianConv2d, BayesianLayer, Kernel, scaling
from bayesify.layers.patches import convolved_by_patches
from bayesify.layers.refolded import RefoldedConvolution
from bayesify.layers.scaled_linear import ScaledLinear
from bayesify.layers.scaling import ScaledConvolution, scale_channels

LAYER_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "linear-tokens": (lambda: nn.Linear(6, 4, bias=False), (3, 2, 6)),
    "conv1d-reflect": (lambda: nn.Conv1d(6, 4, 3, padding=2, padding_mode="reflect", groups=2), (6, 7)),
    "conv2d-same": (lambda: nn.Conv2d(9, 6, (3, 1), padding="same", dilation=(2, 1), groups=3), (9, 5, 6)),
    "conv2d-circular": (
        lambda: nn.Conv2d(9, 6, (3, 2), stride=2, padding=(2, 1), padding_mode="circular"),
        (9, 5, 6),
    ),
    "conv2d-pointwise": (lambda: nn.Conv2d(10, 8, 1), (10, 4, 4)),
    "conv2d-depthwise": (lambda: nn.Conv2d(8, 16, 3, groups=8), (8, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(8, 4, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1)), (8, 3, 4, 4)),
    "transpose1d": (lambda: nn.ConvTranspose1d(6, 4, 3, stride=2, output_padding=1, groups=2), (6, 5)),
    "transpose2d": (lambda: nn.ConvTranspose2d(8, 6, (2, 3), stride=(2, 1), padding=1, dilation=2), (8, 5, 5)),
    "transpose3d": (lambda: nn.ConvTranspose3d(4, 4, 2, groups=4, bias=False), (4, 3, 3, 3)),
    "batchnorm1d": (lambda: _with_statistics(nn.BatchNorm1d(5)), (5,)),
    "batchnorm2d": (lambda: _with_statistics(nn.BatchNorm2d(5)), (5, 3, 3)),
    "batchnorm3d": (lambda: _with_statistics(nn.BatchNorm3d(5)), (5, 2, 3, 3)),
    "syncbatchnorm": (lambda: _with_statistics(nn.SyncBatchNorm(5)), (5, 3, 3)),
    "layernorm": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "groupnorm": (lambda: nn.GroupNorm(2, 6), (6, 3, 3)),
    "instancenorm1d": (lambda: nn.InstanceNorm1d(5, affine=True), (5, 4)),
    "instancenorm2d": (lambda: nn.InstanceNorm2d(5, affine=True, track_running_stats=True), (5, 4, 3)),
    "instancenorm3d": (lambda: nn.InstanceNorm3d(5, affine=True), (5, 2, 4, 3)),
    "embedding": (lambda: nn.Embedding(11, 4, padding_idx=2), (6,)),
}


def _with_statistics(norm: nn.Module) -> nn.Module:
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def _input(layer: nn.Module, shape: tuple[int, ...], rows: int, dtype: torch.dtype) -> Tensor:
    if isinstance(layer, nn.Embedding):
        return torch.randint(layer.num_embeddings, (rows, *shape))
    return torch.randn(rows, *shape, dtype=dtype)


def _applicable() -> list[tuple[str, str]]:
    found = []
    for layer_name, (make, _) in LAYER_CASES.items():
        layer = make()
        site = LAYERS[type(layer)].site_of(layer)
        found += [(layer_name, name) for name, family in FAMILIES.items() if family.refusal(site) is None]
    return found


def _rows_and_folded(layer: BayesianLayer, x: Tensor, batch: int) -> tuple[Tensor, list[Tensor]]:
    """The layer's training output with a draw per row, and that of ordinary layers with each row's draw folded in."""
    scope = layer.scope
    scope.position = torch.arange(batch) + 3
    try:
        with torch.no_grad():
            y = layer.forward(x)  # not called, for its own hooks would open another scope
            p = scope.drawn[layer.site_name]
            draws = [int(p.choice[i]) if p.choice is not None else i % p.size for i in range(batch)]
            repeat = x.shape[0] // batch
            parts = x.split(repeat)
            folded = [layer.run(part, **layer.folded(p, d)) for part, d in zip(parts, draws, strict=True)]
    finally:
        scope.position, scope.drawn = None, {}
    return y, folded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("layer_name", "family_name"), _applicable())
def test_a_draw_per_row_equals_the_draw_folded_in(layer_name: str, family_name: str, dtype: torch.dtype) -> None:
    if family_name == "MeanField-local":
        pytest.skip("local noise is on activations, so no weight holds it")
    make, shape = LAYER_CASES[layer_name]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for batch, repeat in ((7, 1), (4, 1), (1, 1), (3, 2)):
        model = by.convert(make().to(dtype), {type(make()): FAMILIES[family_name]}).to(dtype)
        layer: BayesianLayer = model  # the model is the layer itself
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            layer.eval()  # rows are their own
        if layer_name == "embedding" and _draws_where_needed(layer, batch):
            continue
        y, folded = _rows_and_folded(layer, _input(layer, shape, batch * repeat, dtype), batch)
        size = max(1.0, float(y.abs().max()))
        assert torch.allclose(y, torch.cat(folded), rtol=tolerance, atol=tolerance * size)


def _draws_where_needed(layer: BayesianLayer, batch: int) -> bool:
    return batch > 1 and not isinstance(layer.drawn(Draws(torch.arange(batch))).weight, Tensor | None)


@pytest.mark.parametrize("family", [by.MeanField(init_log_std=(-1.0, -1.0)), by.ECMP(3, reach="row")], ids=str)
def test_embedding_draws_per_row_and_token(family: Family) -> None:
    """Equal tokens of a row share their draw, equal tokens of two rows do not, the padding entry has none."""
    layer = by.convert(nn.Embedding(6, 8, padding_idx=0), {nn.Embedding: family})
    ids = torch.tensor([[1, 2, 1, 0], [1, 1, 5, 0]])
    y = layer(ids)
    assert torch.equal(y[0, 0], y[0, 2]) and torch.equal(y[1, 0], y[1, 1])
    assert not torch.equal(y[0, 0], y[1, 0]) and not torch.equal(y[0, 0], y[0, 1])
    assert torch.equal(y[:, 3], layer.weight[:1].expand(2, 8))
    assert torch.equal(by.draw(layer, 0).weight[0], layer.weight[0])
    many = layer(torch.full((4000, 1), 4))[:, 0]
    if isinstance(family, by.MeanField):
        assert torch.allclose(many.mean(0), layer.weight[4], atol=0.05)
        assert torch.allclose(many.std(0), torch.full((8,), torch.tensor(-1.0).exp()), rtol=0.1)
    else:
        copies = torch.cat([layer.weight.unsqueeze(0), layer.posterior.weight])[:, 4]
        assert torch.allclose(many.mean(0), copies.mean(0), atol=0.1)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
def test_linear_takes_unbatched_and_deep_inputs(shape: tuple[int, ...]) -> None:
    for family in (by.Rank1(4), by.MeanField(), by.LowRankEnsemble(3), by.EMP(2, patches=("output",), reach="row")):
        model = by.convert(nn.Linear(6, 5), family)
        assert model(torch.randn(shape)).shape == (*shape[:-1], 5)
        assert model.eval()(torch.randn(shape)).shape == (*shape[:-1], 5)


@pytest.mark.parametrize("family", [by.Rank1(4), by.MeanField(), by.MeanField(estimator="flipout"), by.Ensemble(3)])
def test_convolution_takes_unbatched_inputs(family: Family) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ConvTranspose2d(4, 2, 2))
    model = by.convert(net, family)
    assert model(torch.randn(3, 6, 6)).shape == (2, 5, 5)
    assert model(torch.randn(2, 3, 6, 6)).shape == (2, 2, 5, 5)


def test_transposed_convolution_takes_an_output_size() -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 2, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=[10, 10])

    plain, x = Up(), torch.randn(4, 3, 4, 4)
    expected = plain(x)
    model = by.convert(copy.deepcopy(plain), by.Rank1(2, mean_std=0.0, dropout_rate=1e-12))
    for mode in (True, False):
        assert torch.allclose(model.train(mode)(x), expected, atol=1e-4)


class Folding(nn.Module):
    """Tokens are folded into the batch for one layer, and a table of positions has one row for all."""

    def __init__(self, time_major: bool = False) -> None:
        super().__init__()
        self.positions, self.inner, self.head = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.time_major = time_major

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(5).unsqueeze(1 if self.time_major else 0)
        x = x + self.positions(ids)
        folded = self.inner(x.reshape(-1, 6)).reshape(x.shape)
        return self.head(folded)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("family", [by.Rank1(2), by.MeanField(), by.LowRankEnsemble(2), by.Ensemble(2)], ids=str)
def test_rows_are_followed_through_folded_batches(family: Family, time_major: bool) -> None:
    """A row's output does not depend on the other rows, with all draws held fixed."""
    torch.manual_seed(0)
    model = by.convert(Folding(time_major), {"*": family}, batch_dim=1 if time_major else 0)
    batch_dim = 1 if time_major else 0
    x = torch.randn(5, 4, 6) if time_major else torch.randn(4, 5, 6)
    assert by.check(model, x) == {"positions": 0, "inner": 5, "head": 1}
    other = x.clone()
    other.select(batch_dim, 2).add_(1)
    outputs = []
    for batch in (x, other):
        torch.manual_seed(7)
        outputs.append(model(batch))
    same = (outputs[0] == outputs[1]).movedim(batch_dim, 0).flatten(1).all(1)
    assert same.tolist() == [True, True, False, True]


def test_time_major_folding_is_found_by_check() -> None:
    class Transposing(Folding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(0, 1))

    model = by.convert(Transposing(time_major=True), {"inner": by.Rank1(2)})
    with pytest.raises(by.RowError, match=r"layer 'inner' has 20 rows for 4 .* leave it out, or give batch_dim"):
        by.check(model, torch.randn(4, 5, 6))


def test_members_keep_their_own_batch_statistics() -> None:
    """Each member normalises its own rows and moves its own running statistics, as separate networks would."""
    for rows in (8, 7):
        model = by.convert(nn.Sequential(nn.BatchNorm2d(3)), by.Ensemble(2, jitter=0.1))
        norm = model[0]
        twins = [nn.BatchNorm2d(3), nn.BatchNorm2d(3)]
        for k, twin in enumerate(twins):
            weight = norm.weight if k == 0 else norm.posterior.weight[0]
            bias = norm.bias if k == 0 else norm.posterior.bias[0]
            twin.load_state_dict({**twin.state_dict(), "weight": weight.detach(), "bias": bias.detach()})
        for _ in range(3):
            x = torch.randn(rows, 3, 4, 4) * 3 + 1
            model[0].scope.start = torch.tensor([0])
            y = model(x)
            expected = torch.empty_like(x)
            for k, twin in enumerate(twins):
                expected[k::2] = twin(x[k::2])
            assert torch.allclose(y, expected, atol=1e-5)
        assert torch.allclose(norm.running_mean, twins[0].running_mean, atol=1e-6)
        assert torch.allclose(norm.posterior.running_var[0], twins[1].running_var, atol=1e-6)
        x = torch.randn(5, 3, 4, 4)
        for member, twin in zip(by.members(model), twins, strict=True):
            assert torch.allclose(member(x), twin.eval()(x), atol=1e-5)


def test_shared_statistics_are_those_of_the_plain_network() -> None:
    for family in (by.EMP(3), by.MeanField(), by.ECMP(3, reach="row")):
        plain = nn.BatchNorm1d(4)
        model = by.convert(copy.deepcopy(plain), family)
        for _ in range(3):
            x = torch.randn(6, 4)
            plain(x)
            model(x)
        assert torch.equal(model.running_mean, plain.running_mean)
        assert torch.equal(model.running_var, plain.running_var)
        assert model.num_batches_tracked == 3


def test_a_layer_called_twice_is_one_function() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.layer(x), self.layer(x)], 1)

    for family in FAMILIES.values():
        if getattr(family, "estimator", None) == "local":
            continue
        model = by.convert(Twice(), {"layer": family})
        for mode in (True, False):
            y = model.train(mode)(torch.randn(5, 4))
            assert torch.equal(y[:, 0], y[:, 1])


def test_scaled_channels_have_the_gradients_of_a_product() -> None:
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    expected = torch.autograd.grad(((x * 1) * scale[:, :, None, None] * weight).sum(), (x, scale))
    found = torch.autograd.grad((scale_channels(x * 1, scale) * weight).sum(), (x, scale))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b)


CONVOLUTIONS = {
    "strided": ([2, 2], [1, 0], [1, 1], False, [0, 0], 1),
    "grouped": ([1, 1], [2, 2], [2, 2], False, [0, 0], 2),
    "transposed": ([2, 2], [1, 1], [1, 1], True, [1, 1], 1),
}


@pytest.mark.parametrize("factors", ["in", "out", "both"])
@pytest.mark.parametrize("how", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_scaled_convolution_has_the_gradients_of_its_parts(how: tuple, factors: str) -> None:
    """First and second derivatives against finite differences; the values against the plain products."""
    kinds = {"dtype": torch.float64, "requires_grad": True}
    x, bias = torch.randn(3, 4, 5, 5, **kinds), torch.randn(4, **kinds)
    weight = torch.randn(4, 4 // how[-1], 3, 3, **kinds)
    s = torch.randn(3, 4, **kinds) if factors != "out" else None
    r = torch.randn(3, 4, **kinds) if factors != "in" else None
    if r is not None:
        r.data[1, 2] = 0  # which loses what it multiplies

    def scaled(x: Tensor, weight: Tensor, bias: Tensor, s: Tensor | None, r: Tensor | None) -> Tensor:
        return ScaledConvolution.apply(x, weight, bias, s, r, how)

    h = x if s is None else x * s[:, :, None, None]
    y = torch.ops.aten.convolution(h, weight, bias, *how)
    y = y if r is None else y * r[:, :, None, None]
    found = scaled(x, weight, bias, s, r)
    assert torch.allclose(found, y)
    g = torch.randn_like(y)
    wanted = [t for t in (x, weight, bias, s, r) if t is not None]
    for a, b in zip(torch.autograd.grad(found, wanted, g), torch.autograd.grad(y, wanted, g), strict=True):
        assert torch.allclose(a, b)
    assert torch.autograd.gradcheck(scaled, (x, weight, bias, s, r))
    assert torch.autograd.gradgradcheck(scaled, (x, weight, bias, s, r))


@pytest.mark.parametrize("factors", ["in", "out", "both"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("smallest", [0.5, 0.0])
def test_a_scaled_linear_map_has_the_gradients_of_its_parts(factors: str, has_bias: bool, smallest: float) -> None:
    """First and second derivatives against finite differences, with factors that lose what they multiply too."""
    kinds = {"dtype": torch.float64, "requires_grad": True}
    x, weight = torch.randn(2, 3, 4, 5, **kinds), torch.randn(6, 5, **kinds)
    bias = torch.randn(6, **kinds) if has_bias else None
    s = torch.randn(3, 1, 5, **kinds) if factors != "out" else None
    r = (torch.rand(3, 1, 6, dtype=torch.float64) + 0.5).requires_grad_() if factors != "in" else None
    if r is not None:
        r.data[1, 0, 2] = smallest

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, s: Tensor | None, r: Tensor | None) -> Tensor:
        y = F.linear(x if s is None else x * s, weight)
        y = y if r is None else y * r
        return y if bias is None else y + bias

    given = (x, weight, bias, s, r)
    wanted = [t for t in given if t is not None]
    found, y = ScaledLinear.apply(*given), plain(*given)
    assert torch.allclose(found, y)
    g = torch.randn_like(y)
    expected = torch.autograd.grad(y, wanted, g)
    for a, b in zip(torch.autograd.grad(found, wanted, g), expected, strict=True):
        assert torch.allclose(a, b)
    changed = ScaledLinear.apply(*given).mul_(2)  # in place, as an activation may be
    for a, b in zip(torch.autograd.grad(changed, wanted, g / 2), expected, strict=True):
        assert torch.allclose(a, b)
    assert torch.autograd.gradcheck(ScaledLinear.apply, given, nondet_tol=1e-12)  # a second backward has no output
    assert torch.autograd.gradgradcheck(ScaledLinear.apply, given)


@pytest.mark.parametrize("family", [by.BatchEnsemble(4), by.Rank1(4), by.IBNN(4)], ids=str)
def test_a_scaled_linear_layer_keeps_no_more_than_a_plain_one(family: by.Family) -> None:
    """Activations that backward holds on to, beside weights and factors: those of the plain network."""

    def kept(model: nn.Module, x: Tensor) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(x)
        assert y.requires_grad
        return sum(storages.values())

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU())
    x = torch.randn(16, 64, 32)
    before = kept(plain, x)
    model = by.convert(plain, family)
    factors = 4 * 16 * (2 * 32 + 2 * 48) * 4  # for each row: a draw, its noise, its scale, and room for another
    assert kept(model, x) <= before + factors + 4 * sum(p.numel() for p in model.parameters())


def test_the_gradient_of_a_factor_does_not_drown_in_the_bias() -> None:
    """A large bias and a small factor: what the factor multiplied is not recovered from their sum."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 8, 64, 32), torch.randn(16, 32) / 6
    bias, r = torch.full((16,), 10.0), (1e-4 * torch.rand(8, 1, 16)).requires_grad_()
    g = torch.randn(1, 8, 64, 16)
    (found,) = torch.autograd.grad(ScaledLinear.apply(x, weight, bias, None, r), r, g)
    exact = (g.double() * F.linear(x.double(), weight.double())).sum((0, 2)).unsqueeze(1)
    assert (found - exact).abs().max() < 1e-4 * exact.abs().max()


def test_the_gradient_of_a_factor_does_not_drown_in_a_huge_bias() -> None:
    torch.manual_seed(0)
    x, weight, g = torch.randn(1, 8, 64, 32), torch.randn(16, 32) / 6, torch.randn(1, 8, 64, 16)
    bias, r = torch.full((16,), 1e4), torch.ones(8, 1, 16, requires_grad=True)
    (found,) = torch.autograd.grad(ScaledLinear.apply(x, weight, bias, None, r), r, g)
    exact = (g.double() * F.linear(x.double(), weight.double())).sum((0, 2)).unsqueeze(1)
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch, at its first tangent
@pytest.mark.parametrize("family", [by.Rank1(4), by.MeanField(estimator="flipout")], ids=str)
def test_a_linear_layer_with_a_draw_for_each_row_takes_part_in_all_of_autograd(family: by.Family) -> None:
    """Inference mode, batched gradients, forward mode, and tensors without numbers."""
    model, x = by.convert(nn.Linear(6, 5), family), torch.randn(64, 6, requires_grad=True)
    with torch.inference_mode():
        assert model(x).shape == (64, 5)
        by.elbo(model.eval(), x, torch.zeros(64).long(), n=10)
    y = model.train()(x)
    many = torch.randn(3, *y.shape)
    (batched,) = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in many]
    assert torch.allclose(batched, torch.stack(each), atol=1e-5)
    with forward_ad.dual_level():
        torch.manual_seed(1)
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.detach()))).tangent
    torch.manual_seed(1)
    bias = model.bias if isinstance(family, by.Rank1) else 0  # a linear map is its own derivative
    if isinstance(family, by.Rank1):
        assert torch.allclose(tangent, model(x) - bias, atol=1e-5)
    assert tangent.shape == (64, 5)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        copy.deepcopy(model)(fake.from_tensor(x.detach())).sum().backward()
    assert by.convert(nn.Linear(8, 0), by.Rank1(2))(torch.randn(16, 8)).shape == (16, 0)


FIRST_LAYERS = {
    "1d": ((64,), (5,), ([2], [3], [2], False, [0], 1)),
    "2d": ((17, 23), (3, 2), ([2, 3], [1, 2], [2, 1], False, [0, 0], 1)),
    "3d": ((7, 8, 9), (2, 1, 3), ([1, 2, 1], [1, 0, 2], [1, 1, 2], False, [0, 0, 0], 1)),
}


@pytest.mark.parametrize("factors", ["in", "out", "both"])
@pytest.mark.parametrize(("image", "kernel", "how"), FIRST_LAYERS.values(), ids=FIRST_LAYERS)
def test_a_scaled_convolution_of_data_has_the_gradients_of_its_parts(
    image: tuple, kernel: tuple, how: tuple, factors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input needs no gradient, so those of the others take a shorter way: two rows at a time, then one."""
    kinds = {"dtype": torch.float64, "requires_grad": True}
    x, weight = torch.randn(5, 2, *image, dtype=torch.float64), torch.randn(4, 2, *kernel, **kinds)
    bias, s, r = torch.randn(4, **kinds), torch.randn(5, 2, **kinds), torch.randn(5, 4, **kinds)
    s, r = None if factors == "out" else s, None if factors == "in" else r
    shape = [-1, *[1] * len(image)]
    h = x if s is None else x * s.reshape(5, *shape)
    y = torch.ops.aten.convolution(h, weight, bias, *how)
    monkeypatch.setattr("bayesify.layers.patches.AT_ONCE", 2 * 2 * math.prod(kernel) * math.prod(y.shape[2:]))
    y = y if r is None else y * r.reshape(5, *shape)
    g = torch.randn_like(y)
    wanted = [t for t in (weight, bias, s, r) if t is not None]
    found = torch.autograd.grad(ScaledConvolution.apply(x, weight, bias, s, r, how), wanted, g)
    for a, b in zip(found, torch.autograd.grad(y, wanted, g), strict=True):
        assert torch.allclose(a, b)


def test_a_factor_of_zero_keeps_its_gradient() -> None:
    x, weight = torch.randn(2, 3, 4), torch.randn(3, 3, 1)
    scale = torch.zeros(2, 3, requires_grad=True)
    how = ([1], [0], [1], False, [0], 1)
    y = ScaledConvolution.apply(x, weight, None, None, scale, how)
    y.sum().backward()
    assert torch.allclose(y, torch.zeros_like(y))
    assert torch.allclose(scale.grad, F.conv1d(x, weight).sum(2), rtol=1e-4)


def test_scratch_memory_made_in_inference_mode_serves_training() -> None:
    model = by.convert(nn.Sequential(nn.Conv2d(2, 9, 3), nn.ReLU()), by.Rank1(4))
    with torch.inference_mode():
        model(torch.randn(64, 2, 20, 20))
    model(torch.randn(64, 2, 20, 20)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_scaled_convolution_keeps_no_more_than_a_plain_one() -> None:
    """Bytes that backward holds on to: those of the plain layer and of the factors, not another activation."""

    def kept(model: nn.Module, x: Tensor) -> int:
        storages: dict[int, int] = {}
        pack = lambda t: storages.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(x).sum().backward()
        return sum(storages.values())

    def network() -> nn.Sequential:
        pairs = [(nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3)]
        return nn.Sequential(*(layer for pair in pairs for layer in pair))

    x = torch.randn(16, 16, 24, 24)
    assert kept(by.convert(network(), by.Rank1(4)), x) < 1.1 * kept(network(), x)


def test_inplace_operations_after_a_convolution_are_safe() -> None:
    """The in-place product is what later operations see and what backward uses."""
    torch.manual_seed(0)
    model = by.convert(nn.Sequential(nn.Conv2d(2, 9, 3), nn.ReLU(inplace=True), nn.Conv2d(9, 2, 3)), by.Rank1(4))
    x = torch.randn(6, 2, 8, 8)
    grads = []
    for compiled in (False, True):  # compiled code uses the plain product
        network = torch.compile(model, backend="eager") if compiled else model
        torch.manual_seed(5)
        model.zero_grad()
        F.mse_loss(network(x), torch.zeros(6, 2, 4, 4)).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads, strict=True))


def test_autocast_keeps_factors_from_promoting() -> None:
    model = by.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)), by.Rank1(4))
    x = torch.randn(6, 3, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == model.eval()(x).dtype == torch.bfloat16


def test_noise_below_the_resolution_is_said() -> None:
    with pytest.warns(UserWarning, match="below the resolution of torch.bfloat16"):
        by.convert(nn.Linear(3, 2).bfloat16(), by.Rank1(4, posterior="cauchy"))


@pytest.mark.parametrize(
    "family", [by.Rank1(2), by.IBNN(2), by.MeanField(estimator="shared"), by.BatchEnsemble(2)], ids=str
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(8, 16, 3, padding=1, stride=2),
        lambda: nn.Conv1d(16, 8, 3, groups=2, bias=False),
        lambda: nn.ConvTranspose2d(8, 8, 3, output_padding=1, stride=2),
    ],
    ids=["conv2d", "groups", "transpose"],
)
def test_gradients_by_a_few_rows_at_a_time_are_those_of_all(
    make: Callable[[], nn.Module], family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    plain = make()
    shape = (7, 9) if isinstance(plain, nn.Conv2d | nn.ConvTranspose2d) else (11,)
    model, x = by.convert(plain, family).train().double(), torch.randn(10, plain.in_channels, *shape).double()
    grads: list[list[Tensor]] = []
    for size in (scaling.CHUNK, 1 << 12):
        monkeypatch.setattr(scaling, "CHUNK", size)
        torch.manual_seed(3)
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        model(inputs).sin().sum().backward()
        grads.append([inputs.grad, *(p.grad.clone() for p in model.parameters())])
    assert all(torch.allclose(a, b) for a, b in zip(*grads, strict=True))


SOME_ROWS = by.MeanField(rows_at_once=3, init_log_std=(-1.0, -1.0))


@pytest.mark.parametrize(
    "layer_name", ["linear", "linear-tokens", "conv2d-circular", "conv2d-depthwise", "transpose2d"]
)
def test_some_rows_at_a_time_are_what_their_weights_say_with_the_same_gradients(layer_name: str) -> None:
    make, shape = LAYER_CASES[layer_name]
    layer: BayesianLayer = by.convert(make().double(), {type(make()): SOME_ROWS})
    for batch, repeat in ((7, 1), (4, 2)):
        x = _input(layer, shape, batch * repeat, torch.float64).requires_grad_()
        layer.scope.position = torch.arange(batch)
        try:
            found, again = layer.forward(x), layer.forward(x)
            p = layer.scope.drawn[layer.site_name]
        finally:
            layer.scope.position, layer.scope.drawn = None, {}
        folded = [layer.folded(p, row) for row in range(batch)]
        expected = torch.cat([layer.run(part, **w) for part, w in zip(x.split(repeat), folded, strict=True)])
        assert torch.equal(found, again) and torch.allclose(found, expected, atol=1e-10)
        of = (x, *layer.parameters())
        for one, other in zip(
            torch.autograd.grad(found.square().sum(), of, retain_graph=True),
            torch.autograd.grad(expected.square().sum(), of),
            strict=True,
        ):
            assert torch.allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("time_major", [False, True])
def test_some_rows_at_a_time_follow_folded_batches(time_major: bool) -> None:
    test_rows_are_followed_through_folded_batches(SOME_ROWS, time_major)


def test_some_rows_at_a_time_keep_no_weights_for_the_gradient() -> None:
    """The weights of 64 rows would be 64 times the layer's; what is kept is the input."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    x = torch.randn(64, 50)
    for family, most in ((by.MeanField(rows_at_once=8), 2 * 64 * 50), (by.MeanField(), 1 << 40)):
        model = by.convert(nn.Linear(50, 40, bias=False), {nn.Linear: family})
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(x)
        assert max(kept) <= most
    assert max(kept) >= 64 * 50 * 40  # the hook sees what is kept where all are held


def test_some_rows_at_a_time_are_drawn_as_all_at_once() -> None:
    model, x = by.convert(nn.Linear(4, 3), SOME_ROWS), torch.randn(1, 4).expand(3000, 4)
    other = copy.deepcopy(model)
    other.family = by.MeanField(init_log_std=(-1.0, -1.0))
    one, all_at_once = model(x), other(x)
    assert len(one.unique(dim=0)) == 3000
    assert torch.allclose(one.mean(0), all_at_once.mean(0), atol=0.1)
    assert torch.allclose(one.std(0), all_at_once.std(0), rtol=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows_at_once": 0}, r"MeanField\(rows_at_once=0\): expected a whole number >= 1"),
        ({"rows_at_once": 2.5}, r"MeanField\(rows_at_once=2.5\): expected a whole number"),
        ({"rows_at_once": 4, "estimator": "flipout"}, "only 'exemplar' draws weights for each row"),
    ],
)
def test_wrong_rows_at_once_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(by.BayesifyError, match=words):
        by.MeanField(**options)  # type: ignore[arg-type]


def test_some_rows_at_a_time_mind_a_step_before_the_gradient() -> None:
    model = by.convert(nn.Linear(4, 3), SOME_ROWS)
    loss = model(torch.randn(6, 4)).sum()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(by.BayesifyError, match="changed between forward and backward"):
        loss.backward()


class Dropping(nn.Linear):
    """Random, with a gradient that shows what it dropped."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.dropout(input, 0.5, self.training), self.weight, self.bias)


def test_a_random_layer_is_not_called_again_for_the_gradient() -> None:
    layer = Dropping(6, 6, bias=False)
    nn.init.eye_(layer.weight)
    model = by.convert(layer, {Dropping: by.MeanField(rows_at_once=2, init_log_std=(-20.0, -20.0))})
    x = torch.ones(8, 6, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y.abs() > 0.1, x.grad.abs() > 0.1)


@pytest.mark.parametrize("family", [by.MeanField(init_log_std=(-1.0, -1.0)), SOME_ROWS], ids=str)
def test_an_embedding_has_the_gradient_of_its_own_noise(family: Family) -> None:
    """Of Σ y the gradient of log σ at an entry is the sum of y - μ over the rows that use it."""
    layer = by.convert(nn.Embedding(5, 3), {nn.Embedding: family})
    ids = torch.tensor([[0, 1], [2, 1], [3, 3], [1, 4], [0, 2]])
    y = layer(ids)
    y.sum().backward()
    noise = (y - layer.weight[ids]).detach()
    expected = torch.zeros(5, 3).index_add(0, ids.flatten(), noise.flatten(0, 1))
    assert torch.allclose(layer.posterior.weight_log_std.grad, expected, atol=1e-5)


WIDE_CONVOLUTIONS = {
    "plain": {"padding": 1},
    "strided": {"stride": (2, 1), "bias": False},
    "dilated": {"dilation": (1, 2), "padding": (0, 2)},
}


@pytest.mark.parametrize("rows", [5, 10])
@pytest.mark.parametrize("options", WIDE_CONVOLUTIONS.values(), ids=WIDE_CONVOLUTIONS)
def test_factors_of_patches_say_what_a_weight_for_each_draw_says(
    options: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = nn.Conv2d(24, 64, (3, 2), **options)
    model, x = by.convert(conv, by.LowRankEnsemble(4)).double(), torch.randn(rows, 24, 4, 5).double()
    x.requires_grad_()
    model.scope.start = torch.tensor([1])
    called = []
    monkeypatch.setattr(
        "bayesify.layers.conv.convolved_by_patches",
        lambda *args: called.append(1) or convolved_by_patches(*args),
    )
    monkeypatch.setattr("bayesify.layers.patches.AT_ONCE", 3 * 24 * 6 * 12)
    y = model(x)
    assert called
    other = copy.deepcopy(model)
    monkeypatch.setattr(BayesianConv2d, "term", Kernel.term)
    folded = other(x)
    assert len(called) == 1 and torch.allclose(y, folded, atol=1e-10)
    into = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *model.parameters()], into)
    expected = torch.autograd.grad(folded, [x, *other.parameters()], into)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found, expected, strict=True))


def test_factors_of_patches_keep_no_weight_for_each_draw() -> None:
    model, x = by.convert(nn.Conv2d(64, 64, 3, padding=1), by.LowRankEnsemble(20)), torch.randn(20, 64, 2, 2)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        model(x)
    assert max(kept) <= model.weight.numel()


@pytest.mark.parametrize("rows", [3, 8, 11])
@pytest.mark.parametrize("options", WIDE_CONVOLUTIONS.values(), ids=WIDE_CONVOLUTIONS)
def test_weights_made_again_for_the_gradient_say_what_kept_ones_say(
    options: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = by.convert(nn.Conv2d(4, 6, (3, 2), **options), by.LowRankEnsemble(4)).double()
    x = torch.randn(rows, 4, 9, 9).double().requires_grad_()
    model.scope.start = torch.tensor([1])
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        y = model(x)
    assert max(kept) == x.numel() and sorted(kept)[-2] <= model.weight.numel()
    other = copy.deepcopy(model)
    monkeypatch.setattr(BayesianConv2d, "term", Kernel.term)
    folded = other(x)
    assert torch.allclose(y, folded, atol=1e-10)
    into = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *model.parameters()], into)
    expected = torch.autograd.grad(folded, [x, *other.parameters()], into)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found, expected, strict=True))


def test_outputs_of_weights_made_again_may_be_changed_in_place() -> None:
    net = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True))
    model, x = by.convert(net, by.LowRankEnsemble(4)), torch.randn(8, 4, 9, 9)
    model[0].scope.start = torch.tensor([1])
    model(x).square().sum().backward()
    found = model[0].weight.grad.clone()
    model.zero_grad()
    model[1].inplace = False
    model(x).square().sum().backward()
    assert torch.allclose(found, model[0].weight.grad, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients_of_weights_made_again() -> None:
    model, x = by.convert(nn.Conv2d(4, 6, 3), by.LowRankEnsemble(4)), torch.randn(8, 4, 9, 9)
    y = model(x).mean((0, 2, 3))
    (each,) = torch.autograd.grad(y, model.weight, torch.eye(6), is_grads_batched=True, retain_graph=True)
    (first,) = torch.autograd.grad(y[3], model.weight)
    assert torch.allclose(each[3], first, atol=1e-6)


class _ShiftedPatches(by.LowRankEnsemble):
    """With a bias for each draw, or one output factor for all."""

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        p = super().draw(site, draws)
        assert isinstance(p.out_scale, Tensor)
        return (
            replace(p, bias=site.base["bias"].expand(p.size, -1) + 1)
            if self.std
            else replace(p, out_scale=p.out_scale[:1])
        )


@pytest.mark.parametrize("std", [0.2, 0.0], ids=["bias", "one factor"])
@pytest.mark.parametrize("size", [9, 2], ids=["weights", "patches"])
def test_factors_of_patches_beside_other_parts_of_a_perturbation(std: float, size: int) -> None:
    model = by.convert(nn.Conv2d(24, 32, 3, padding=1), _ShiftedPatches(4, std=std))
    x = torch.randn(8, 24, size, size)
    model.scope.start = torch.tensor([0])
    weights = model.weight * (model.posterior.left @ model.posterior.right).reshape(4, *model.weight.shape)
    bias = model.bias + 1 if std else model.bias
    expected = torch.stack([F.conv2d(row, weights[i % 4], bias, padding=1) for i, row in enumerate(x)])
    assert torch.allclose(model(x), expected, atol=1e-5)


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


@pytest.mark.parametrize("family", [by.LowRankEnsemble(4), by.BatchEnsemble(4)], ids=str)
@pytest.mark.parametrize("conv", [False, True])
def test_gradients_that_can_be_derived_again_of_a_layer_called_twice(conv: bool, family: Family) -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1) if conv else nn.Linear(4, 4)
    model = by.convert(_Twice(layer), family).double()
    x = torch.randn(8, 4, 9, 9).double() if conv else torch.randn(8, 64, 4).double()
    model.layer.scope.start = torch.tensor([1])
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_second_derivatives_of_weights_made_again() -> None:
    sizes = ((7, 2, 5, 5), (3, 2, 2, 2), (3,), (3, 3), (3, 8))
    tensors = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]

    def convolved(*tensors: Tensor) -> Tensor:
        return RefoldedConvolution.apply(*tensors, ((1, 1), (1, 0), (1, 1), False, (0, 0)))

    assert torch.autograd.gradcheck(convolved, tensors) and torch.autograd.gradgradcheck(convolved, tensors)
