"""The faults seen in other libraries (METHODS.md, section 6): one test for each that these layers could have."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import ARCHITECTURES, Architecture, converted, every_method, one_case_each
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bayesify as by
from bayesify.batches import first_tensor
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Method

POINTS: dict[str, Method] = {
    "folded into the weight": by.BatchEnsemble(1, mean_std=0),
    "factors of components": by.BatchEnsemble(3, mean_std=0),
    "a weight per component": by.Ensemble(3, jitter=0),
    "a weight per row": by.DropConnect(0.0, reach="row"),
    "a factor per row": by.MCDropout(0.0),
    "flipout": by.MeanField(estimator="flipout", init_log_std=(-40, -40)),
    "local": by.MeanField(estimator="local", init_log_std=(-40, -40)),
}
"""Posteriors that are a single point, the base tensors: every way to apply a draw, with a known answer."""


def distinct_outputs(model: nn.Module, *inputs: Tensor) -> int:
    with torch.no_grad():
        return torch.stack([model(*inputs) for _ in range(8)]).unique(dim=0).shape[0]


# 1. A fast path that reads `linear.weight`.


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class OwnLayer(nn.TransformerEncoderLayer):
    """A user's subclass, which has the fast path too."""


@pytest.mark.parametrize(
    "make",
    [
        encoder_layer,
        lambda: OwnLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: nn.TransformerEncoder(encoder_layer(), 2),
    ],
    ids=["layer", "subclass", "encoder"],
)
def test_transformer_fast_path_does_not_pass_by_the_draw_in_eval(make: Callable[[], nn.Module]) -> None:
    model, x = by.convert(nn.Sequential(make()), by.Rank1(1, dropout_rate=0.3)).eval(), torch.randn(2, 5, 8)
    assert distinct_outputs(model, x) == 8
    for module in model.modules():  # the fault is real: with the fast path back, every call is the same
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 1
    assert distinct_outputs(model, x) == 1


def test_transformer_without_the_fast_path_says_the_same_and_gets_it_back() -> None:
    plain, x = nn.Sequential(encoder_layer()).eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = plain(x)
        model = by.convert(plain, by.BatchEnsemble(1, mean_std=0))
        assert torch.allclose(model(x), expected, atol=1e-5)
    by.revert(model)
    assert model[0].activation_relu_or_gelu == 1


def test_attention_whose_projection_is_never_called_is_not_converted_silently() -> None:
    model = nn.Sequential(encoder_layer())
    with pytest.raises(by.ConversionError, match="out_proj: its parent MultiheadAttention draws its weight"):
        by.convert(model, {"0.self_attn.out_proj": by.Rank1(2)})
    before = {name: p.clone() for name, p in model.named_parameters()}
    drawn = dict(by.draw(by.convert(model, {"*": by.MeanField()}), 0).named_parameters())
    assert not any((drawn[name] == tensor).any() for name, tensor in before.items())


# 2. Recurrent layers converted in part without a word.


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_every_kernel_of_a_stacked_bidirectional_layer_is_converted(make: Callable[..., nn.Module]) -> None:
    model = nn.ModuleDict({"rnn": make(3, 4, num_layers=2, bidirectional=True), "head": nn.Linear(8, 2)})
    before = copy.deepcopy(model["rnn"]).state_dict()
    rows = {row.name: row for row in by.summary(by.convert(model, by.MeanField())).rows}
    assert rows["rnn"].base == rows["rnn"].added == sum(t.numel() for t in before.values())
    drawn = by.draw(model, 0)["rnn"]
    assert type(drawn) is make and drawn.state_dict().keys() == before.keys()
    assert not any((tensor == before[name]).any() for name, tensor in drawn.state_dict().items())


# 3. What conversion drops.

GEOMETRIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (4, 5, 6)),
    "reflect": (lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="reflect"), (4, 7)),
    "replicate": (lambda: nn.Conv3d(2, 3, 3, padding=(1, 0, 1), padding_mode="replicate"), (2, 4, 5, 4)),
    "same": (lambda: nn.Conv2d(4, 6, (5, 3), padding="same", dilation=(1, 2)), (4, 6, 7)),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid", stride=2), (4, 6, 7)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=(2, 1), padding=(2, 0)), (4, 6, 7)),
    "not square": (lambda: nn.Conv2d(4, 6, (1, 5), stride=(2, 1), padding=(0, 2), bias=False), (4, 6, 7)),
    "groups": (lambda: nn.Conv2d(32, 16, 3, groups=2), (32, 5, 5)),
    "depthwise": (lambda: nn.Conv1d(6, 12, 3, groups=6), (6, 9)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 0), groups=2),
        (4, 4, 5),
    ),
    "transposed dilated": (lambda: nn.ConvTranspose1d(4, 6, 3, dilation=2), (4, 5)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 4, (1, 2, 3), stride=2, bias=False), (2, 3, 3, 3)),
    "tokens": (lambda: nn.Linear(4, 5), (3, 2, 4)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 6, eps=0.1), (6, 3, 4)),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_padding_mode_dilation_and_kernels_are_not_dropped(geometry: str) -> None:
    make, shape = GEOMETRIES[geometry]
    plain, x = make().double(), torch.randn(6, *shape, dtype=torch.float64)
    for way, method in POINTS.items():
        model = copy.deepcopy(plain)
        try:
            by.convert(model, {type(model): method})
        except by.ConversionError:
            assert isinstance(plain, (nn.LayerNorm, nn.GroupNorm))  # some methods need factors, which norms don't have
            continue
        for mode in (True, False):
            assert torch.allclose(model.train(mode)(x), plain(x), rtol=1e-9, atol=1e-9), way
            assert torch.allclose(model(x[:5]), plain(x[:5]), rtol=1e-9, atol=1e-9), way


def test_an_output_size_given_to_a_transposed_convolution_is_kept() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 3, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=[10, 10])

    plain, x = Decoder(), torch.randn(3, 4, 4, 4)
    assert plain(x).shape[2:] == (10, 10) != plain.up(x).shape[2:]
    model = by.convert(copy.deepcopy(plain), by.BatchEnsemble(2, mean_std=0))
    assert torch.allclose(model.train()(x), plain(x), atol=1e-6)
    assert torch.allclose(model.eval()(x), plain(x), atol=1e-6)


@every_method
def test_a_root_level_linear_is_not_left_unconverted(method: Method) -> None:
    model = by.convert(nn.Linear(4, 3), {nn.Linear: method})
    assert list(bayesian_layers(model)) == [""]
    assert distinct_outputs(model.eval(), torch.randn(2, 4)) > 1


@pytest.mark.parametrize("method", [by.Rank1(2), by.IBNN(2), by.BatchEnsemble(2)], ids=str)
def test_tied_layers_are_not_untied(method: Method) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    by.convert(model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.clone()
    model(torch.randn(4, 4)).square().sum().backward()
    optimizer.step()
    assert model[2].weight is model[0].weight and not torch.equal(model[0].weight, before)
    assert torch.equal(copy.deepcopy(model)[2].weight, model[0].weight)


@every_method
def test_nested_nets_do_not_change_size_during_conversion(method: Method) -> None:
    def make(depth: int) -> nn.Module:
        inner = [make(depth - 1)] if depth else []
        return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), *inner, nn.Linear(3, 3))

    plain = sum(type(m) in (nn.Linear, nn.LayerNorm) for m in make(4).modules())
    model = by.convert(make(4), {"*": method})
    left = sum(type(m) in (nn.Linear, nn.LayerNorm) for m in model.modules())
    assert len(bayesian_layers(model)) + left == plain and len(bayesian_layers(model)) >= 10
    assert model(torch.randn(4, 3)).shape == (4, 3)


@one_case_each
def test_pretrained_weights_are_not_discarded(method: Method, architecture: Architecture) -> None:
    plain = architecture.make()
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randn_like(p))
    before = copy.deepcopy(plain.state_dict())
    after = by.convert(plain, method).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# 4. The divergence.


def test_kl_is_summed_not_averaged_over_layers_and_elements() -> None:
    model = by.convert(ARCHITECTURES["residual"].make(), by.MeanField(prior_std=0.7))
    expected = torch.zeros(())
    for layer in bayesian_layers(model).values():
        for name in ("weight", "bias"):
            if getattr(layer, name) is not None:
                std = getattr(layer.posterior, f"{name}_log_std").exp()
                expected = expected + kl_divergence(Normal(getattr(layer, name), std), Normal(0.0, 0.7)).sum()
    assert torch.allclose(by.kl(model), expected, rtol=1e-5)


def test_kl_of_a_mixture_is_averaged_over_components_alone() -> None:
    model = by.convert(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), by.Rank1(5, prior_std=0.2))
    expected = torch.zeros(())
    for layer in bayesian_layers(model).values():
        for side in ("in", "out"):
            loc = getattr(layer.posterior, f"{side}_loc")
            std = F.softplus(getattr(layer.posterior, f"{side}_rho")) + 1e-7
            expected = expected + kl_divergence(Normal(loc, std), Normal(1.0, 0.2)).sum() / 5
    assert torch.allclose(by.kl(model), expected, rtol=1e-5)


@every_method
def test_kl_of_a_network_twice_as_deep_is_twice_as_large(method: Method) -> None:
    layer = by.convert(nn.Linear(3, 4), {nn.Linear: method})
    alone = by.kl(layer)
    both = nn.ModuleList([layer, copy.deepcopy(layer)])
    assert torch.allclose(by.kl(both), 2 * alone, rtol=1e-5)


# 5. Flipout and squeeze.


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: nn.Linear(5, 4), (5,)), (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 4, 4))],
    ids=["linear", "conv"],
)
def test_flipout_does_not_count_the_mean_twice(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    rows, std = 20_000, 0.3
    layer = make()
    x = torch.randn(1, *shape)
    expected = layer(x)[0]
    log_std = float(torch.tensor(std).log())
    model = by.convert(layer, by.MeanField(estimator="flipout", init_log_std=(log_std, log_std))).train()
    with torch.no_grad():
        y = torch.cat([model(x.expand(100, *shape)) for _ in range(rows // 100)])
    error = y.std(0) / rows**0.5  # the signs make rows that share one ΔW uncorrelated
    assert ((y.mean(0) - expected).abs() < 5 * error).all()
    weight = torch.ones_like(layer.weight) * std**2
    variance = (F.linear if isinstance(layer, nn.Linear) else _convolved)(x.square(), weight)[0] + std**2
    assert torch.allclose(y.var(0), variance, rtol=0.4)


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


@one_case_each
def test_squeeze_does_not_break_a_batch_of_one(method: Method, architecture: Architecture) -> None:
    model, x = converted(method, architecture), architecture.batch(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # torch itself refuses statistics of a single value
    assert model(x).shape == (1, 3)
    assert model.eval()(x).shape == (1, 3)
    assert by.predict(model, x, 2).probs.shape == (1, 3)


@every_method
def test_squeeze_does_not_drop_a_single_output_or_a_single_input(method: Method) -> None:
    model = by.convert(nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1), nn.Linear(1, 1)), method)
    for x in (torch.randn(1, 1), torch.randn(1, 1, 1), torch.randn(4, 1, 1)):
        assert model.train()(x).shape == model.eval()(x).shape == x.shape


# 6. Saving.


@every_method
def test_save_and_load_do_not_lose_the_posterior(method: Method, tmp_path: Path) -> None:
    model = by.convert(ARCHITECTURES["residual"].make(), method)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.rand_like(p))  # as after training
    by.save(model, tmp_path / "m")
    torch.manual_seed(1)
    other = by.load(ARCHITECTURES["residual"].make(), tmp_path / "m")
    assert {name: t.tolist() for name, t in other.state_dict().items()} == {
        name: t.tolist() for name, t in model.state_dict().items()
    }
    assert torch.equal(by.kl(other), by.kl(model))


# 7. Batches.


@one_case_each
def test_uneven_last_batches_do_not_crash_a_mixture(method: Method, architecture: Architecture) -> None:
    model = converted(method, architecture)
    loader = DataLoader(TensorDataset(architecture.batch(11), torch.arange(11) % 3), batch_size=8)
    sizes = []
    for x, y in loader:
        loss = by.elbo(model, x, y, n=11).loss
        loss.backward()
        sizes.append(len(x))
        assert torch.isfinite(loss)
    assert sizes == [8, 3]


def test_uneven_batches_are_spread_evenly_over_the_components() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = by.convert(layer, by.BatchEnsemble(4, mean_std=0))
    with torch.no_grad():
        model.posterior.out_loc.copy_(torch.arange(4.0).unsqueeze(1))
    served = torch.zeros(4)
    for _ in range(40):
        components = model(torch.ones(7, 1)).flatten().round().long().bincount(minlength=4)
        assert components.sum() == 7 and components.max() - components.min() <= 1
        served += components
    assert served.min() > 0.8 * served.mean()


# 8. Precision.


@one_case_each
def test_float32_factors_do_not_promote_half_precision(method: Method, architecture: Architecture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that small noise is rounded away is said, and another test
        model = by.convert(architecture.make().to(torch.bfloat16), method)
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, args, out, name=name: seen.update({name: first_tensor(out).dtype}))
    x = architecture.batch(6).to(torch.bfloat16)
    for mode in (True, False):
        model.train(mode)(x)
        assert set(seen.values()) == {torch.bfloat16}, seen


@one_case_each
def test_autocast_gives_the_dtype_of_the_plain_network(method: Method, architecture: Architecture) -> None:
    plain, x = architecture.make(), architecture.batch(6)
    model = by.convert(copy.deepcopy(plain), method)
    with torch.autocast("cpu", torch.bfloat16):
        for mode in (True, False):
            try:
                expected = plain.train(mode)(x).dtype
            except RuntimeError as error:  # some processors have no such LSTM
                pytest.skip(f"the plain network does not run so here: {error}")
            assert model.train(mode)(x).dtype == expected
