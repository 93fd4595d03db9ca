"""Networks that are Bayesian in their last blocks: which layers those are, and the first part computed once."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import bayesify as by
from bayesify.batches import call_with
from bayesify.lab.models import build
from bayesify.prediction import plan
from benchmarks.last_blocks import RESULTS, ResNet18, VisionTransformer, page

METHOD = by.MeanField(estimator="shared", init_log_std=(-2.0, -1.5))
DRAWS = 9  # enough for the check of stored results


@pytest.fixture(autouse=True)
def _share_the_first_part_of_small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FIRST_PART", 0)


# Which layers are last.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (hidden, _) = self.lstm(x)
        return self.head(outputs[:, -1] + hidden[-1])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(
        nn.Embedding(9, 8), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(8, 3)
    )


@pytest.mark.parametrize(
    ("make", "blocks", "expected"),
    [
        (ResNet18, 0, ["fc"]),
        (ResNet18, 1, ["layer4.1.conv1", "layer4.1.conv2", "fc"]),
        (
            ResNet18,
            2,
            ["layer4.0.conv1", "layer4.0.conv2", "layer4.0.downsample.0", "layer4.1.conv1", "layer4.1.conv2", "fc"],
        ),
        (VisionTransformer, 1, ["blocks.5.qkv", "blocks.5.proj", "blocks.5.fc1", "blocks.5.fc2", "head"]),
        (encoder, 1, ["1.layers.2.self_attn", "1.layers.2.linear1", "1.layers.2.linear2", "2"]),
        (Recurrent, 0, ["head"]),
        (Recurrent, 1, ["lstm", "head"]),
        (mlp, 0, ["5"]),
        (mlp, 1, ["3", "5"]),
        (mlp, 2, ["0", "3", "5"]),
        (lambda: nn.Linear(4, 3), 0, [""]),
    ],
)
def test_last_takes_the_layers_of_the_last_blocks(make: Any, blocks: int, expected: list[str]) -> None:
    network = make()
    model = by.convert(network, by.last(network, by.Rank1(4), blocks))
    assert [row.name for row in by.summary(model).rows if row.method != "-"] == [name or "(model)" for name in expected]


def test_last_takes_of_the_last_blocks_what_the_method_takes_by_default() -> None:
    network = build("resnet20", shape=(3, 32, 32), outputs=10)
    assert list(by.last(network, by.ECMP(3), 1)) == ["layer3.2.bn1", "layer3.2.bn2", "linear"]


def test_names_with_the_characters_of_patterns_are_names() -> None:
    network = nn.ModuleDict({"a[0]": nn.Linear(4, 4), "b*": nn.Linear(4, 3)})
    by.convert(network, by.last(network, by.Rank1(2), 1))
    assert all(hasattr(layer, "posterior") for layer in network.values())


def test_too_many_blocks_are_an_error_that_names_them() -> None:
    network = build("resnet20", shape=(3, 32, 32), outputs=10)
    with pytest.raises(by.ConversionError, match=r"blocks=10.*9 blocks.*'layer1.0', 'layer1.1', …, 'layer3.2'; use at"):
        by.last(network, by.Rank1(4), 10)
    with pytest.raises(by.ConversionError, match=r"blocks=1.*0 blocks"):
        by.last(nn.Linear(4, 3), by.Rank1(4))
    with pytest.raises(by.BayesifyError, match=r"last\(blocks=-1\): expected an integer >= 0"):
        by.last(network, by.Rank1(4), -1)
    with pytest.raises(by.ConversionError, match=r"no layer of what follows its last block"):
        by.last(VisionTransformer().blocks, by.Rank1(4), 0)
    with pytest.raises(by.ConversionError, match=r"EMP.* no layer of its last 1 blocks, from '1' on"):
        by.last(nn.Sequential(nn.LayerNorm(4), nn.Embedding(9, 4), nn.Embedding(9, 4)), by.EMP(3, patches=("norm",)), 1)


# The first part is computed once, and every draw is what it is alone.


def drawn(model: nn.Module, batch: Any, draws: int = DRAWS) -> Tensor:
    """The outputs of draws as networks of their own."""
    with torch.no_grad():
        return torch.stack([call_with(by.draw(model, 2, index=index), batch).clone() for index in range(draws)])


def assert_as_drawn(model: nn.Module, batch: Any, **options: Any) -> None:
    """A prediction has the outputs of the draws as networks of their own, and these differ."""
    expected = drawn(model, batch)
    found = by.predict(model, batch, samples=DRAWS, seed=2, draws=True, **options).draws
    assert torch.allclose(found, expected, atol=1e-5) and not torch.allclose(expected[0], expected[1], atol=1e-5)


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "resnet with changes in place": (ResNet18, lambda: torch.randn(6, 3, 32, 32), 2),
    "transformer": (VisionTransformer, lambda: torch.randn(6, 3, 112, 112), 1),
    "mlp": (mlp, lambda: torch.randn(6, 4), 1),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_first_part_is_computed_once_for_a_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "may_store", lambda network: False)  # no draw is computed twice, to check that
    make, batch, blocks = SMALL[name]
    torch.manual_seed(0)
    network, x = make(), batch()
    taken = by.last(network, METHOD, blocks)
    first, inputs = min(dict(network.named_modules()), key=lambda n: (n not in taken, 0)), list[int]()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        handle = network.get_submodule(first).register_forward_pre_hook(
            lambda *_: inputs.append(counter.get_total_flops())
        )
        network.eval()(x)
        whole = counter.get_total_flops()
    handle.remove()
    model, rest = by.convert(network, taken), whole - inputs[0]
    assert inputs[0] > 0 and flops(lambda: by.predict(model, x, samples=7)) == whole + 6 * rest
    expected, found = drawn(model, x), by.predict(model, x, samples=DRAWS, seed=2, draws=True).draws
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_hooks_and_calls_of_ones_own_run_for_every_draw() -> None:
    network, calls, made = mlp(), [], []
    network[0].register_forward_hook(lambda module, args, output: calls.append(output.sum().item()))
    model, x = by.convert(network, by.last(network, METHOD, 1)), torch.randn(9, 4)
    found = by.predict(
        model,
        x,
        samples=7,
        seed=2,
        draws=True,
        call=lambda net, b: made.append(1) or net(b * 2),  # type: ignore[func-returns-value]
    )
    assert len(calls) == len(made) == 7 and len(set(calls)) == 1
    assert torch.allclose(found.draws, drawn(model, 2 * x, 7), atol=1e-6)


class Trap(nn.Module):
    """A first part, a middle that is drawn, a head, and something awkward between them."""

    def __init__(self, awkward: Callable[[Trap, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.body2, self.middle, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.relu, self.flatten = nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Flatten()
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.register_buffer("memory", torch.zeros(16, 8))
        self.table = torch.randn(8)
        self.flag, self.kept, self.awkward = True, [], awkward

    def forward(self, x: Tensor) -> Tensor:
        return self.awkward(self, x)

    def rest(self, h: Tensor) -> Tensor:
        return self.head(F.relu(self.middle(h)))


def _in_place_at_the_head_of_the_rest(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    y = net.middle(h)
    net.relu(h)
    return net.head(y + h)


def _adds_in_place(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    h += net.middle(h)
    return net.head(h)


def _changes_a_view(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    y = net.middle(h)
    h[:, :2].mul_(3)
    return net.head(y * h)


def _changes_the_data(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    y = net.middle(h)
    h.data.mul_(3)
    return net.head(y * h)


def _changes_the_array(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    y = net.middle(h)
    h.numpy()[:] *= 3
    return net.head(y * h)


def _changes_the_array_before(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    h.numpy()[:] += 1
    return net.rest(h)


def _in_place_in_the_first_part(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    before = h * 2
    net.relu(net.norm(h).add_(h)).mul_(2)
    h.sub_(1)
    return net.rest(before + net.relu(h))


def _reads_a_drawn_weight(net: Trap, x: Tensor) -> Tensor:
    return net.rest(net.body2(F.linear(net.body(x), net.head.weight)))


def _reads_a_drawn_weight_by_name(net: Trap, x: Tensor) -> Tensor:
    scale = dict(net.named_parameters())["head.weight"].detach().abs().mean().item()
    return net.rest(net.body(x) * scale)


def _asks_about_a_drawn_weight(net: Trap, x: Tensor) -> Tensor:
    weight = net.head.weight
    return net.rest(net.body(x.to(weight.device, weight.dtype))[:, : weight.shape[0]])


def _stores_the_first_part(net: Trap, x: Tensor) -> Tensor:
    net.kept.append(net.body(x))
    return net.rest(sum(net.kept))


def _stores_the_rest(net: Trap, x: Tensor) -> Tensor:
    net.memory[: len(x)] += net.middle(net.body(x))
    return net.head(net.memory[: len(x)])


def _reads_flags(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x) if net.flag and not net.training else net.body2(x)
    return net.rest(h if h.mean() > -100 and h.shape[0] == len(x) else -h)


def _branches_on_draws(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    y = net.middle(h)
    return net.head(net.body2(h) if y[0, 0] > 0 else net.body2(y))


def _is_random_in_python(net: Trap, x: Tensor) -> Tensor:
    return net.rest(net.body(x) * (1 if random.random() < 2 else 0) + 0 * random.random())


def _skips_at_random(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    for _ in range(random.randrange(3)):
        h = net.flatten(h)
    return net.rest(h)


def _goes_on_after_errors(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    for _ in range(random.randrange(3)):
        try:
            h = net.flatten(h)
        except Exception:
            h = -h
    return net.rest(h)


def _takes_a_gradient(net: Trap, x: Tensor) -> Tensor:
    with torch.enable_grad():
        h = net.body(x).detach().requires_grad_()
        net.rest(h).square().sum().backward()
        return h.grad


def _takes_a_gradient_later(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    net.middle(h)
    with torch.enable_grad():
        h.requires_grad_()
        net.rest(h).square().sum().backward()
        return h.grad


def _differentiates(net: Trap, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.rest(net.body(x).tanh()).square().sum(), x)[0]


def _vectorizes(net: Trap, x: Tensor) -> Tensor:
    return net.rest(torch.vmap(net.body)(x))


def _scripted(net: Trap, x: Tensor) -> Tensor:
    h = net.body(x)
    y = _SCRIPT(h)
    h.mul_(2)
    return net.rest(y + h)


@torch.jit.script
def _SCRIPT(x: Tensor) -> Tensor:
    return torch.where(x.sum() > 0, x * 2, x * 3)


def _in_inference_mode(net: Trap, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = net.body(x)
    y = net.middle(h)
    with torch.inference_mode():
        h.mul_(2)
    return net.head(y + h)


def _in_a_thread(net: Trap, x: Tensor) -> Tensor:
    found: list[Tensor] = []

    @torch.no_grad()
    def work() -> None:
        found.append(net.body(x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return net.rest(net.body2(found[0]))


def _filled_by_a_thread(net: Trap, x: Tensor) -> Tensor:
    h, filled = net.body(x), torch.zeros(len(x), 8)

    @torch.no_grad()
    def work() -> None:
        filled.add_(net.middle(h))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return net.rest(filled.relu() + h)


def _from_an_array(net: Trap, x: Tensor) -> Tensor:
    return net.rest(net.body(torch.from_numpy(x.numpy() + 1)) * net.table)


TRAPS: dict[str, Callable[[Trap, Tensor], Tensor]] = {
    function.__name__[1:].replace("_", " "): function  # type: ignore[attr-defined]
    for function in (
        _in_place_at_the_head_of_the_rest,
        _adds_in_place,
        _changes_a_view,
        _changes_the_data,
        _changes_the_array,
        _changes_the_array_before,
        _in_place_in_the_first_part,
        _reads_a_drawn_weight,
        _reads_a_drawn_weight_by_name,
        _asks_about_a_drawn_weight,
        _stores_the_first_part,
        _stores_the_rest,
        _reads_flags,
        _branches_on_draws,
        _is_random_in_python,
        _skips_at_random,
        _goes_on_after_errors,
        _takes_a_gradient,
        _takes_a_gradient_later,
        _differentiates,
        _vectorizes,
        _scripted,
        _in_inference_mode,
        _in_a_thread,
        _filled_by_a_thread,
        _from_an_array,
    )
}
TRAPS |= {
    "twice": lambda net, x: net.rest(net.body(net.body(x)) + net.body(x)),
    "views": lambda net, x: net.rest(net.flatten(nn.Identity()(net.body(x).view(-1, 2, 4)))),
    "states": lambda net, x: net.rest(sum(net.rnn(net.body(x)[:, None])[1])),
    "a list": lambda net, x: net.rest(net.body(x) * torch.tensor(x.flatten().tolist()[:8])),
    "parts": lambda net, x: net.rest(
        torch.cat([part.max(1).values[:, None].expand(-1, 4) for part in x.chunk(2, 1)], 1)
    ),
    "an index": lambda net, x: net.rest(net.body(x)[torch.arange(len(x)).flip(0), :][..., : x.shape[1]]),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_awkward_networks_are_drawn_as_they_are(trap: str) -> None:
    torch.manual_seed(0)
    model = by.convert(Trap(TRAPS[trap]).eval(), {"middle": METHOD, "head": METHOD})
    assert plan.Plan(model, 0, None).has_first_part(6, DRAWS)
    for rows in (9, 6):
        if trap == "stores the first part":  # the draws of a network that keeps results start without any
            model.kept.clear()
        assert_as_drawn(model, torch.randn(rows, 8))


def test_a_first_part_that_is_random_itself_is_computed_for_every_draw() -> None:
    model = by.convert(Trap(lambda net, x: net.rest(F.dropout(net.body(x), 0.5))), {"head": by.BatchEnsemble(2)})
    model.awkward = lambda net, x: net.head(F.dropout(net.body(x), 0.5, training=True))
    found = by.predict(model, torch.randn(9, 8), samples=8, draws=True).draws
    assert len(found[::2].unique(dim=0)) == 4
    generator = torch.Generator().manual_seed(0)
    model.awkward = lambda net, x: net.head(net.body(x) * torch.rand(8, generator=generator))
    assert len(by.predict(model, torch.randn(9, 8), samples=8, draws=True).draws[::2].unique(dim=0)) == 4


@pytest.mark.parametrize("catches", [False, True])
def test_a_result_that_only_later_draws_use_is_computed_for_them(catches: bool) -> None:
    calls: list[int] = []

    def awkward(net: Trap, x: Tensor) -> Tensor:
        h = net.body(x)
        more: Tensor | None = h * 2 + 1
        if not calls:
            more = None
        calls.append(1)
        y = net.rest(h)
        try:
            return y if more is None else y + more.sum()
        except Exception:
            if not catches:
                raise
            return y

    model, x = by.convert(Trap(awkward).eval(), {"middle": METHOD, "head": METHOD}), torch.randn(9, 8)
    expected, _ = drawn(model, x), calls.clear()
    found = by.predict(model, x, samples=DRAWS, seed=2, draws=True).draws
    assert len(calls) > DRAWS and torch.allclose(found, expected, atol=1e-4)


def test_kept_dropout_before_the_drawn_part_is_drawn() -> None:
    layers = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    model = by.convert(nn.Sequential(*layers), {"3": METHOD, "5": METHOD}, keep_dropout=True)
    assert_as_drawn(model, torch.randn(9, 4))


def test_an_encoder_with_a_bayesian_last_layer() -> None:
    network = encoder().eval()
    model = by.convert(network, by.last(network, METHOD, 1))
    assert_as_drawn(model, torch.randint(9, (6, 5)))


def test_tied_weights_of_both_parts() -> None:
    network = Trap(lambda net, x: net.rest(net.body(x)))
    network.head.weight = network.body.weight
    model = by.convert(network, {"middle": METHOD, "head": by.Rank1(3, dropout_rate=0.2)})
    assert_as_drawn(model, torch.randn(9, 8))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, values: Tensor, scale: Tensor) -> tuple[Tensor, str]:
        return self.head(self.middle(self.body(values) * scale).tanh()), "more"


def test_batches_of_every_form() -> None:
    model = by.convert(Named(), {"middle": METHOD, "head": METHOD})
    batch = {"values": torch.randn(9, 4), "scale": torch.rand(9, 1)}
    with torch.no_grad():
        expected = torch.stack([by.draw(model, 2, index=index)(**batch)[0] for index in range(DRAWS)])
    for size in (None, 5):
        found = by.predict(model, batch, samples=DRAWS, seed=2, draws=True, batch_size=size).draws
        assert torch.allclose(found, expected, atol=1e-5)
    plain = by.convert(mlp(), {"3": METHOD, "5": METHOD})
    x = torch.randn(11, 4)
    loader = DataLoader(TensorDataset(x, torch.zeros(11)), batch_size=4)
    found = by.predict(plain, loader, samples=DRAWS, seed=2, draws=True).draws
    assert torch.allclose(found, drawn(plain, x), atol=1e-5)

    def refilled() -> Any:
        buffer = torch.empty(6, 4)
        for some in x[:6], x[5:]:
            buffer.numpy()[:] = some.numpy()
            yield buffer

    found = by.predict(plain, refilled(), samples=DRAWS, seed=2, draws=True).draws
    assert torch.allclose(found, drawn(plain, torch.cat([x[:6], x[5:]])), atol=1e-5)


def test_adaptive_sampling_shares_the_first_part_of_the_rows_that_are_left() -> None:
    model, x = by.convert(mlp(), {"3": METHOD, "5": METHOD}), torch.randn(20, 4) * torch.linspace(0.1, 4, 20)[:, None]
    found = by.predict(model, x, by.Adaptive(max=48, tolerance=0.05), seed=2)
    assert len(found.draws_used.unique()) > 1
    each = drawn(model, x, 48).softmax(-1)
    expected = torch.stack([each[:used, row].mean(0) for row, used in enumerate(found.draws_used.tolist())])
    assert torch.allclose(found.probs, expected, atol=1e-5)


def test_threads_have_first_parts_of_their_own() -> None:
    model = by.convert(mlp(), {"3": METHOD, "5": METHOD})
    batches = [torch.randn(9, 4) for _ in range(4)]
    found: dict[int, Tensor] = {}
    threads = [
        threading.Thread(
            target=lambda place=place, x=x: found.update({place: by.predict(model, x, 9, seed=2, draws=True).draws})
        )
        for place, x in enumerate(batches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.allclose(found[place], drawn(model, x), atol=1e-5) for place, x in enumerate(batches))


def test_only_what_is_in_use_where_the_first_part_ends_is_kept() -> None:
    """The intermediate results of a deep first part would need as much memory as training."""
    network = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    model = by.convert(network, by.last(network, METHOD, 15))
    made: list[Any] = []
    run = plan.FirstPart.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.FirstPart, "run", lambda self, *args: made.append(self) or run(self, *args))
        by.predict(model, torch.randn(9, 8), samples=5)
    sizes = [tensor.numel() for tensor in made[0].held if not isinstance(tensor, nn.Parameter)]
    assert len(made) == 5 and not made[0].is_useless and sum(sizes) <= 2 * 9 * 8


def test_compiled_parts_are_drawn_as_they_are() -> None:
    network = Trap(lambda net, x: net.rest(net.compiled(x)))
    network.compiled = torch.compile(network.body, backend="eager")
    model = by.convert(network, {"middle": METHOD, "head": METHOD})
    found = by.predict(model, x := torch.randn(9, 8), samples=7, seed=2, draws=True).draws
    model.awkward = lambda net, x: net.rest(net.body(x))
    assert torch.allclose(found, drawn(model, x, 7), atol=1e-5)


class Padded(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.middle, self.head = encoder, nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x, src_key_padding_mask=x[..., 0] > 1).nan_to_num(5.0)
        return self.head(self.middle(h).tanh()).flatten(1)


@pytest.mark.parametrize("layers", [0, 2])
def test_padding_of_a_transformer_is_as_in_a_network_of_its_own(layers: int) -> None:
    """The fast path of attention drops padding, or fills it with zeros; a row may consist of padding alone."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    network = Padded(nn.TransformerEncoder(layer, layers) if layers else layer)
    model = by.convert(network.eval(), {"middle": METHOD, "head": METHOD})
    x = torch.randn(6, 5, 8)
    x[:, 0, 0], x[:, 4, 0] = 0, 2
    if not layers:
        x[1, :, 0] = 2
    assert_as_drawn(model, x, call=lambda network, batch: network(batch))


def test_an_encoder_without_padding_has_a_first_part() -> None:
    network = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    network.extend([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)])
    model, x = by.convert(network.eval(), {"1": METHOD, "3": METHOD}), torch.randn(6, 5, 8)
    few, many = (
        flops(lambda n=n: by.predict(model, x, samples=n, call=lambda network, batch: network(batch))) for n in (2, 9)
    )
    assert many - few == 7 * flops(lambda: by.draw(model, 2)[1:](x))
    assert_as_drawn(model, x, call=lambda network, batch: network(batch))


def test_a_first_part_is_shared_where_it_has_work_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FIRST_PART", 1 << 20)
    model = plan.Plan(by.convert(mlp(), {"3": METHOD}), 0, None)
    assert model.first_numbers == 4 * 8
    assert [model.has_first_part(rows, 2) for rows in (2**15 - 1, 2**15)] == [False, True]
    assert not model.has_first_part(2**15, 1)
    assert not plan.Plan(by.convert(mlp(), METHOD), 0, None).has_first_part(2**30, 9)


def test_meta_tensors_have_a_first_part() -> None:
    network = mlp()
    model = by.convert(network, by.last(network, METHOD, 1)).to("meta")
    p = by.predict(model, torch.randn(9, 4, device="meta"), samples=4)
    assert p.probs.shape == (9, 3) and p.probs.is_meta


def test_the_page_is_that_of_the_results() -> None:
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == page(json.loads(RESULTS.read_text()))
