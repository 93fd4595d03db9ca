"""Each layer type: a draw applied per row equals the same draw folded into the weights of the ordinary layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import METHODS
from draws import Call, called
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bayesify as by
from bayesify.layers import LAYERS, BayesianLayer
from bayesify.layers.base import Operation
from bayesify.layers.rows import Rows
from bayesify.methods.base import Method, Perturbation

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


KINDS = ("Rank1-cauchy", "EMP-row-learned", "MeanField", "MeanField-flipout", "LowRankEnsemble", "Ensemble")
"""Methods that between them use every part of a perturbation."""
OF_EACH_ROLE = ("linear", "conv2d-circular", "batchnorm2d", "embedding")
"""Layers that take every method."""


def _fits(layer_name: str, method: Method) -> bool:
    """Whether a weight holds all of a draw; an embedding may draw no more of it than it looks up."""
    layer = LAYER_CASES[layer_name][0]()
    by_entry = layer_name == "embedding" and method.factorised and method.draws_per == "row"
    local = getattr(method, "estimator", None) == "local" and "norm" not in layer_name
    return not by_entry and not local and method.refusal(LAYERS[type(layer)].site_of(layer)) is None


FITTING = [
    (layer, name)
    for layer in LAYER_CASES
    for name, method in METHODS.items()
    if (name in KINDS or layer in OF_EACH_ROLE) and _fits(layer, method)
]


def _bayesian(layer_name: str, method: Method, dtype: torch.dtype) -> tuple[BayesianLayer, nn.Module]:
    """A layer that is the whole model, and the ordinary one; norms in evaluation, so that rows are their own."""
    plain = LAYER_CASES[layer_name][0]().to(dtype)
    layer: Any = by.convert(copy.deepcopy(plain), {type(plain): method}).to(dtype)
    is_norm = isinstance(plain, nn.modules.batchnorm._NormBase)
    return layer.train(not is_norm), plain.train(not is_norm)


def _folded(layer: BayesianLayer, plain: nn.Module, x: Tensor, call: Call) -> Tensor:
    """What ordinary layers say to the input's rows, each with its row's draw in its weights."""
    batch = len(call.position)
    parts = enumerate(x.split(len(x) // batch))
    return torch.cat([functional_call(plain, call.tensors(layer, row), (part,)) for row, part in parts])


@pytest.mark.parametrize(("layer_name", "method_name"), FITTING)
def test_a_draw_per_row_equals_the_draw_folded_in(layer_name: str, method_name: str) -> None:
    """Its outputs and its gradients by the input and by all parameters."""
    layer, plain = _bayesian(layer_name, METHODS[method_name], torch.float64)
    for batch, repeat in ((7, 1), (4, 1), (3, 2)):
        x = _input(layer, LAYER_CASES[layer_name][1], batch * repeat, torch.float64)
        x = x.requires_grad_() if x.is_floating_point() else x
        y, call = called(layer, x, batch=batch)
        expected = _folded(layer, plain, x, call)
        size = max(1.0, float(y.detach().abs().max()))
        assert torch.allclose(y, expected, rtol=1e-10, atol=1e-10 * size)
        into, by_each = torch.randn_like(y), [t for t in (x, *layer.parameters()) if t.requires_grad]
        found = torch.autograd.grad(y, by_each, into, retain_graph=True, allow_unused=True)
        wanted = torch.autograd.grad(expected, by_each, into, allow_unused=True)
        for one, other in zip(found, wanted, strict=True):
            zeros = torch.zeros(()) if one is None or other is None else None
            assert torch.allclose(*[zeros if g is None else g.double() for g in (one, other)], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layer_name", LAYER_CASES)
def test_a_draw_per_row_equals_the_draw_folded_in_at_single_precision(layer_name: str) -> None:
    name = "EMP-row-learned" if layer_name == "embedding" else "MeanField"
    layer, plain = _bayesian(layer_name, METHODS[name], torch.float32)
    x = _input(layer, LAYER_CASES[layer_name][1], 5, torch.float32)
    with torch.no_grad():
        y, call = called(layer, x, batch=5)
        assert y.dtype == torch.float32
        size = max(1.0, float(y.abs().max()))
        assert torch.allclose(y, _folded(layer, plain, x, call), rtol=1e-5, atol=1e-5 * size)


WITHOUT_BATCH = ("linear", "conv1d-reflect", "conv2d-same", "transpose3d", "layernorm", "instancenorm2d", "embedding")


@pytest.mark.parametrize(
    ("layer_name", "method"),
    [
        (name, method)
        for name in WITHOUT_BATCH
        for method in (by.Rank1(4), by.MeanField(), by.EMP(2, reach="row"), by.Ensemble(3))
        if _fits(name, method)
    ],
    ids=str,
)
def test_an_input_without_a_batch_has_the_first_rows_draw(layer_name: str, method: Method) -> None:
    layer, plain = _bayesian(layer_name, method, torch.float32)
    shape = {"layernorm": (3, 4), "embedding": ()}.get(layer_name, LAYER_CASES[layer_name][1])
    x = _input(layer, shape, 1, torch.float32)[0]
    with torch.no_grad():
        y, call = called(layer, x, batch=4)
        assert torch.allclose(y, functional_call(plain, call.tensors(layer, 0), (x,)), atol=1e-5)


PARTS = {"linear": (nn.Linear(5, 4), (5,)), "conv": (nn.Conv2d(4, 6, 3, groups=2), (4, 4, 5))}


@pytest.mark.parametrize("name", PARTS)
def test_every_combination_of_a_perturbations_parts_is_the_formula(name: str) -> None:
    """y = op(x ∘ s; W) ∘ r + b, each part of the layer's own, one for all draws, or one for each."""
    plain, shape = PARTS[name]
    plain = copy.deepcopy(plain).double()
    operation: Any = by.convert(copy.deepcopy(plain), by.MeanField())
    assert isinstance(operation, Operation)
    base, trail = dict(plain.named_parameters()), [1] * (len(shape) - 1)
    in_size, out_size = shape[0], plain.weight.shape[0]
    sizes = {"in_scale": (in_size,), "out_scale": (out_size,), "weight": plain.weight.shape, "bias": (out_size,)}
    for rows, leading in product((Rows(6), Rows(3, 2), Rows(3, 2, tiled=True)), product((None, 1, 2, 3), repeat=4)):
        draws = 2 if 2 in leading else rows.batch  # few draws, or one for each row
        if {2, 3} <= set(leading):
            continue
        each = zip(sizes.items(), leading, strict=True)
        parts = {name: torch.randn(1 if lead == 1 else draws, *size).double() for (name, size), lead in each if lead}
        x, p = torch.randn(6, *shape).double(), Perturbation(draws, **parts)
        with torch.no_grad():
            y = operation.by_row(x, base, p, rows)
            for row, owner in enumerate(rows.owner(x.device).tolist()):
                own = {name: part[0] for name in parts if (part := getattr(p.only(owner % draws), name)) is not None}
                s, r = (own.get(name, torch.ones(1)).reshape(-1, *trail) for name in ("in_scale", "out_scale"))
                weight, bias = (own.get(name, base[name]) for name in ("weight", "bias"))
                mapped = functional_call(plain, {"weight": weight, "bias": 0 * bias}, (x[row] * s,))
                assert torch.allclose(y[row], mapped * r + bias.reshape(-1, *trail))


@pytest.mark.parametrize("method", [by.MeanField(init_log_std=(-1.0, -1.0)), by.ECMP(3, reach="row")], ids=str)
def test_embedding_draws_per_row_and_token(method: Method) -> None:
    """Equal tokens of a row share their draw, equal tokens of two rows do not, the padding entry has none."""
    layer = by.convert(nn.Embedding(6, 8, padding_idx=0), {nn.Embedding: method})
    ids = torch.tensor([[1, 2, 1, 0], [1, 1, 5, 0]])
    y = layer(ids)
    assert torch.equal(y[0, 0], y[0, 2]) and torch.equal(y[1, 0], y[1, 1])
    assert not torch.equal(y[0, 0], y[1, 0]) and not torch.equal(y[0, 0], y[0, 1])
    assert torch.equal(y[:, 3], layer.weight[:1].expand(2, 8))
    assert torch.equal(by.draw(layer, 0).weight[0], layer.weight[0])
    many = layer(torch.full((4000, 1), 4))[:, 0]
    if isinstance(method, by.MeanField):
        assert torch.allclose(many.mean(0), layer.weight[4], atol=0.05)
        assert torch.allclose(many.std(0), torch.full((8,), torch.tensor(-1.0).exp()), rtol=0.1)
    else:
        copies = torch.cat([layer.weight.unsqueeze(0), layer.posterior.weight])[:, 4]
        assert torch.allclose(many.mean(0), copies.mean(0), atol=0.1)


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
@pytest.mark.parametrize("method", [by.Rank1(2), by.MeanField(), by.LowRankEnsemble(2), by.Ensemble(2)], ids=str)
def test_rows_are_followed_through_folded_batches(method: Method, time_major: bool) -> None:
    """A row's output does not depend on the other rows, with all draws held fixed."""
    torch.manual_seed(0)
    model = by.convert(Folding(time_major), {"*": method}, batch_dim=1 if time_major else 0)
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
    with pytest.raises(by.RowError, match=r"layer 'inner' gets 20 rows for a batch of 4.* or give batch_dim"):
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
    for method in (by.EMP(3), by.MeanField(), by.ECMP(3, reach="row")):
        plain = nn.BatchNorm1d(4)
        model = by.convert(copy.deepcopy(plain), method)
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

    for method in METHODS.values():
        if getattr(method, "estimator", None) == "local":
            continue
        model = by.convert(Twice(), {"layer": method})
        for mode in (True, False):
            y = model.train(mode)(torch.randn(5, 4))
            assert torch.equal(y[:, 0], y[:, 1])


# Gradients.

MAPS = {
    "linear": lambda: nn.Linear(4, 3),
    "strided": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=(1, 0)),
    "grouped": lambda: nn.Conv2d(4, 4, 2, groups=2, dilation=2, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(4, 3, 2, stride=2, output_padding=1),
}


@pytest.mark.parametrize("factors", ["in", "out", "both"])
@pytest.mark.parametrize("make", MAPS.values(), ids=MAPS)
def test_factors_have_the_gradients_of_finite_differences(make: Callable[[], nn.Module], factors: str) -> None:
    """First and second derivatives, with a factor that loses what it multiplies."""
    layer: Any = by.convert(make().double(), by.Rank1(2))
    base = {name: p.detach().requires_grad_() for name, p in layer.named_parameters() if "posterior" not in name}
    shape = (3, 2, 4) if isinstance(layer, nn.Linear) else (3, 4, 3, 3)
    sizes = {"in_scale": 4, "out_scale": 3 if layer.plain in (nn.Linear, nn.ConvTranspose2d) else 4}
    sizes = {name: size for name, size in sizes.items() if factors == "both" or name.startswith(factors)}
    scales = {name: torch.randn(3, size).double() for name, size in sizes.items()}
    scales["out_scale" if "out_scale" in scales else "in_scale"][1, 2] = 0
    tensors = {"x": torch.randn(shape).double(), **base, **scales}

    def applied(*values: Tensor) -> Tensor:
        given = dict(zip(tensors, values, strict=True))
        p = Perturbation(3, **{name: given[name] for name in scales})
        return layer.by_row(given["x"], {name: given[name] for name in base}, p, Rows(3))

    inputs = [t.detach().clone().requires_grad_() for t in tensors.values()]
    assert torch.autograd.gradcheck(applied, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(applied, inputs, fast_mode=True)


@pytest.mark.parametrize(("bias", "factor"), [(10.0, 1e-4), (1e4, 1.0)])
@pytest.mark.parametrize("conv", [False, True])
def test_the_gradient_of_a_factor_does_not_drown_in_the_bias(bias: float, factor: float, conv: bool) -> None:
    """A large bias, a small factor: what the factor multiplied can't be recovered from their sum."""
    plain, x = (nn.Conv1d(32, 16, 1), torch.randn(8, 32, 64)) if conv else (nn.Linear(32, 16), torch.randn(8, 64, 32))
    layer: Any = by.convert(plain, by.BatchEnsemble(8))
    with torch.no_grad():
        layer.bias.fill_(bias)
        layer.posterior.out_loc.uniform_(0.1 * factor, factor)
    layer.scope.start = torch.tensor([0])
    grads = []
    for dtype in (torch.float32, torch.float64):
        other = copy.deepcopy(layer).to(dtype)
        y = other(x.to(dtype))
        into = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        grads.append(torch.autograd.grad(y, other.posterior.out_loc, into)[0])
    assert (grads[0] - grads[1]).abs().max() < 1e-4 * grads[1].abs().max()


class Held(TorchDispatchMode):
    """The bytes that tensors made inside still hold, beside those of tensors that were there before."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.before = {StorageWeakRef(tensor.untyped_storage()) for tensor in before}
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        storages = [tensor.untyped_storage() for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
        self.storages |= {StorageWeakRef(storage): storage.nbytes() for storage in storages}
        return output

    def bytes(self) -> int:
        return sum(size for ref, size in self.storages.items() if ref not in self.before and not ref.expired())


def _held(model: nn.Module, x: Tensor) -> int:
    """The bytes that a call's output and its graph hold."""
    with Held(x, *model.state_dict().values()) as held:
        y = model(x)
    assert y.requires_grad
    return held.bytes()


@pytest.mark.parametrize("method", [by.BatchEnsemble(4), by.Rank1(4), by.IBNN(4)], ids=str)
def test_factors_hold_little_more_for_the_gradient_than_a_plain_network(method: Method) -> None:
    """Beside the plain network's activations a few factors for each row, and where a bias follows the factor one more.

    Without care it would be two more for each layer, 2 times as much here.
    """
    maps = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU())
    pairs = [(nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3)]
    convolutions = nn.Sequential(*(layer for pair in pairs for layer in pair))
    for net, x, most in ((maps, torch.randn(16, 256, 32), 1.55), (convolutions, torch.randn(16, 16, 24, 24), 1.15)):
        before = _held(net, x)
        assert _held(by.convert(net, method), x) < most * before


@pytest.mark.parametrize("method", [by.Rank1(4), by.LowRankEnsemble(4), by.MeanField()], ids=str)
def test_outputs_may_be_changed_in_place(method: Method) -> None:
    for layer, shape in ((nn.Conv2d(4, 6, 3), (4, 9, 9)), (nn.Linear(4, 6), (50, 4))):
        model, x = by.convert(nn.Sequential(layer, nn.ReLU(inplace=True)), method), torch.randn(8, *shape)
        model[0].scope.start = torch.tensor([1])
        grads = []
        for inplace in (True, False):
            model[1].inplace = inplace
            model.zero_grad()
            torch.manual_seed(5)
            model(x).square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("method", [by.Rank1(4), by.BatchEnsemble(4)], ids=str)
def test_outputs_may_be_changed_in_place_under_autocast(method: Method) -> None:
    """What the output factor multiplied is then made again in backward, where autocast has ended."""
    maps = [nn.Linear(4, 6, bias=False), nn.ReLU(inplace=True), nn.Linear(6, 6, bias=False), nn.ReLU(inplace=True)]
    kernels = [nn.Conv2d(4, 6, 3, bias=False), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 1, bias=False), nn.ReLU(True)]
    for layers, shape in ((maps, (4,)), (kernels, (4, 3, 3))):
        model, x = by.convert(nn.Sequential(*layers), method), torch.randn(8, *shape)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_weight_changed_before_backward_is_an_error_where_the_output_was_changed_too() -> None:
    model = by.convert(nn.Linear(4, 6, bias=False), by.Rank1(4))
    loss = model(torch.randn(8, 4)).relu_().sum()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("method", [by.Rank1(4), by.IBNN(4), by.MeanField(estimator="flipout")], ids=str)
def test_a_network_in_training_may_be_transformed_by_vmap_and_jvp(method: Method) -> None:
    model, x = by.convert(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), method), torch.randn(5, 8, 4)
    assert torch.vmap(model, randomness="different")(x).shape == (5, 8, 3)
    stacks = {name: torch.stack([p, p]) for name, p in model.named_parameters()}
    many = torch.vmap(partial(functional_call, model), (0, None), randomness="same")
    assert many(stacks, (x[0],)).shape == (2, 8, 3)
    assert torch.func.jvp(model, (x[0],), (x[1],))[1].shape == (8, 3)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch, at its first tangent
@pytest.mark.parametrize("method", [by.Rank1(4), by.MeanField(estimator="flipout")], ids=str)
def test_a_linear_layer_with_a_draw_for_each_row_takes_part_in_all_of_autograd(method: by.Method) -> None:
    """Inference mode, batched gradients, forward mode, and tensors without numbers."""
    model, x = by.convert(nn.Linear(6, 5), method), torch.randn(64, 6, requires_grad=True)
    with torch.inference_mode():
        assert model(x).shape == (64, 5)
        by.elbo(model.eval(), x, torch.zeros(64).long(), n=64)
    y = model.train()(x)
    many = torch.randn(3, *y.shape)
    (batched,) = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in many]
    assert torch.allclose(batched, torch.stack(each), atol=1e-5)
    with forward_ad.dual_level():
        torch.manual_seed(1)
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.detach()))).tangent
    torch.manual_seed(1)
    bias = model.bias if isinstance(method, by.Rank1) else 0  # a linear map is its own derivative
    if isinstance(method, by.Rank1):
        assert torch.allclose(tangent, model(x) - bias, atol=1e-5)
    assert tangent.shape == (64, 5)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        copy.deepcopy(model)(fake.from_tensor(x.detach())).sum().backward()
    assert by.convert(nn.Linear(8, 0), by.Rank1(2))(torch.randn(16, 8)).shape == (16, 0)


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("method", [by.LowRankEnsemble(4), by.BatchEnsemble(4)], ids=str)
@pytest.mark.parametrize("conv", [False, True])
def test_gradients_of_a_layer_called_twice_can_be_derived_again_and_batched(conv: bool, method: Method) -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1) if conv else nn.Linear(4, 4)
    model = by.convert(_Twice(layer), method).double()
    x = torch.randn(8, 4, 9, 9).double() if conv else torch.randn(8, 64, 4).double()
    model.layer.scope.start = torch.tensor([1])
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
    y = model(x).flatten(1)[:, :3].mean(0)
    (each,) = torch.autograd.grad(
        y, model.layer.weight, torch.eye(3).double(), is_grads_batched=True, retain_graph=True
    )
    assert torch.allclose(each[2], torch.autograd.grad(y[2], model.layer.weight)[0])


# Precision.


def test_autocast_keeps_factors_from_promoting() -> None:
    model = by.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)), by.Rank1(4))
    x = torch.randn(6, 3, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == model.eval()(x).dtype == torch.bfloat16


def test_noise_below_the_resolution_is_said() -> None:
    with pytest.warns(UserWarning, match="below the resolution of torch.bfloat16"):
        by.convert(nn.Linear(3, 2).bfloat16(), by.Rank1(4, posterior="cauchy"))


# A weight for each row, of which only some are held at a time.

SOME_ROWS = by.MeanField(estimator="exemplar", rows_at_once=3, init_log_std=(-1.0, -1.0))


@pytest.mark.parametrize("time_major", [False, True])
def test_some_rows_at_a_time_follow_folded_batches(time_major: bool) -> None:
    test_rows_are_followed_through_folded_batches(SOME_ROWS, time_major)


def test_some_rows_at_a_time_hold_no_weights_for_the_gradient() -> None:
    """The weights of 64 rows would be 64 times the layer's."""
    x, weights = torch.randn(64, 50), 4 * 64 * 50 * 40
    some, all_rows = by.MeanField(estimator="exemplar", rows_at_once=8), by.MeanField(estimator="exemplar")
    assert _held(by.convert(nn.Linear(50, 40, bias=False), some), x) < weights / 10
    assert _held(by.convert(nn.Linear(50, 40, bias=False), all_rows), x) >= weights


def test_some_rows_at_a_time_are_drawn_as_all_at_once() -> None:
    model, x = by.convert(nn.Linear(4, 3), SOME_ROWS), torch.randn(1, 4).expand(3000, 4)
    other = copy.deepcopy(model)
    other.method = by.MeanField(estimator="exemplar", init_log_std=(-1.0, -1.0))
    one, all_at_once = model(x), other(x)
    assert len(one.unique(dim=0)) == 3000
    assert torch.allclose(one.mean(0), all_at_once.mean(0), atol=0.1)
    assert torch.allclose(one.std(0), all_at_once.std(0), rtol=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows_at_once": 0}, r"MeanField\(rows_at_once=0\): expected an integer >= 1"),
        ({"rows_at_once": 2.5}, r"MeanField\(rows_at_once=2.5\): expected an integer"),
        ({"rows_at_once": 4, "estimator": "flipout"}, "only estimator='exemplar' draws weights for each row"),
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
    model = by.convert(
        layer, {Dropping: by.MeanField(estimator="exemplar", rows_at_once=2, init_log_std=(-20.0, -20.0))}
    )
    x = torch.ones(8, 6, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y.abs() > 0.1, x.grad.abs() > 0.1)


@pytest.mark.parametrize("method", [by.MeanField(init_log_std=(-1.0, -1.0)), SOME_ROWS], ids=str)
def test_an_embedding_has_the_gradient_of_its_own_noise(method: Method) -> None:
    """Of Σ y the gradient of log σ at an entry is the sum of y - μ over the rows that use it."""
    layer = by.convert(nn.Embedding(5, 3), {nn.Embedding: method})
    ids = torch.tensor([[0, 1], [2, 1], [3, 3], [1, 4], [0, 2]])
    y = layer(ids)
    y.sum().backward()
    noise = (y - layer.weight[ids]).detach()
    expected = torch.zeros(5, 3).index_add(0, ids.flatten(), noise.flatten(0, 1))
    assert torch.allclose(layer.posterior.weight_log_std.grad, expected, atol=1e-5)


# Weights that something else computes.


def _normed(layer: nn.Module) -> None:
    torch.nn.utils.weight_norm(layer)


def _parametrized(layer: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(layer)


def _pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("change", [_pruned, _normed, _parametrized])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Conv1d(4, 3, 1)], ids=["linear", "conv"])
def test_a_weight_that_is_computed_is_refused_before_and_after_conversion(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], None]
) -> None:
    net, x = nn.Sequential(make()), torch.randn(3, 4, 4)
    model = by.convert(copy.deepcopy(net), by.MeanField())
    change(net[0])
    with pytest.raises(by.ConversionError, match="remove"):
        by.convert(net, by.MeanField())
    change(model[0])
    for call in (model, model.eval(), lambda x: by.predict(model, x, 2), lambda x: by.kl(model)):
        with pytest.raises(by.BayesifyError, match=r"layer '0': its weight is not a parameter but computed"):
            call(x)
