"""Networks that a first call hides: what is zero, random, elsewhere in the output, or computed in training only."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.errors import RowError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))
RANK1 = by.Rank1(4)
METHODS = [RANK1, by.MeanField(), by.BatchEnsemble(4), by.DropConnect(0.3), by.ECMP(3, patches=("output",))]


class Base(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.h = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.h(self.f(x).relu())


def called(network: nn.Module, method: Any = RANK1, x: Any = X, **options: Any) -> nn.Module:
    """A converted network after its first call in training."""
    torch.manual_seed(0)
    model = by.convert(network, method, **options).train()
    model(**x) if isinstance(x, dict) else model(x)
    return model


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_sound_networks_of_these_kinds_are_not_refused(method: Any, seed: int) -> None:
    class Sound(Base):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.norm, self.drop = nn.Parameter(torch.zeros(1)), nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Any:
            h = self.f(x + 0.1 * torch.randn_like(x))
            h = self.drop(self.norm(h + self.gate * F.dropout(h, 0.5, self.training)))
            y = self.h(h)
            return {"loss": y.square().mean(), "logits": y.masked_fill(torch.tensor([False, False, True]), -torch.inf)}

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = called(Sound(), method)
        for _ in range(11):
            model(X)
        model.eval()(X)


class CosineInTraining(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.f(x).relu()
        return F.linear(F.normalize(h), F.normalize(self.h.weight)) + 0 * self.h(h) if self.training else self.h(h)


def test_a_weight_that_is_read_in_training_only_is_refused() -> None:
    with pytest.raises(RowError, match=r"layer 'h': its weight is read outside of its call[\s\S]*'h': None"):
        called(CosineInTraining())


class Views(Base):
    def forward(self, x: Tensor) -> Any:
        if not self.training:
            return super().forward(x)
        one, other = super().forward(torch.cat([x, 1.1 * x])).chunk(2)
        return (one + other) / 2


class Mixup(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.f(x).relu()
        return self.h((h + h.flip(0)) / 2 if self.training else h)


@pytest.mark.parametrize("kind", [Views, Mixup], ids=lambda kind: kind.__name__)
def test_rows_that_are_mixed_in_training_only_are_warned_of(kind: type[Base]) -> None:
    with pytest.warns(UserWarning, match="in training mode, the network computes something else than in evaluation"):
        called(kind())


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "second of a tuple": lambda y, z: (y, z),
    "entry of a dict": lambda y, z: {"features": y, "out": z},
    "logits beside a loss": lambda y, z: (z.logsumexp(1).mean(), z),
    "parameter of a distribution": lambda y, z: torch.distributions.Normal(z, 1.0),
    "attribute of an object": lambda y, z: SimpleNamespace(mean=z),
    "beside infinite ones": lambda y, z: z.masked_fill(torch.tensor([False, False, True]), -torch.inf),
    "one number": lambda y, z: z.square().mean(),
}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("training", [True, False])
def test_every_tensor_of_the_output_is_compared(output: str, training: bool) -> None:
    class Reads(Base):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return OUTPUTS[output](y, y / self.h.weight.norm(dim=1))

    model = by.convert(Reads(), by.Rank1(4)).train(training)
    with pytest.raises(RowError, match="layer 'h': its weight is read outside of its call"):
        model(X)


@pytest.mark.parametrize("output", ["second of a tuple", "entry of a dict", "logits beside a loss"])
def test_rows_that_are_mixed_in_any_tensor_of_the_output_are_refused(output: str) -> None:
    class Mixes(Base):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return OUTPUTS[output](y, y - y.mean(0))

    with pytest.raises(RowError, match=r"row 0 of (an output of shape|the output is not)"):
        called(Mixes())


def test_hidden_states_with_layers_first_are_not_taken_for_rows() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.h = nn.LSTM(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            y, state = self.lstm(x)
            return self.h(y[:, -1]), state

    for rows in (2, 4):
        called(Recurrent(), x=torch.randn(rows, 5, 4))


@pytest.mark.parametrize("methods", [{nn.Embedding: by.MeanField(), "*": by.Rank1(4)}, {"*": by.MeanField()}], ids=str)
def test_a_head_that_reads_an_embedding_drawn_by_entry_is_refused(methods: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.f = nn.Embedding(11, 8), nn.Linear(8, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.f(self.e(ids)).tanh() @ self.e.weight.T

    with pytest.raises(RowError, match="layer 'e': its weight is read outside of its call"):
        called(Tied(), methods, torch.randint(11, (6, 3)))


class DoRA(nn.Module):
    """A low-rank change of a layer, which is zero at first, and the norm of the changed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.A, self.B = (nn.Linear(*size, bias=False) for size in ((4, 8), (4, 2), (2, 8)))
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        norm = (self.base.weight + self.B.weight @ self.A.weight).norm(dim=1)
        return (self.base(x) + self.B(self.A(x))) / norm


@pytest.mark.parametrize("method", [by.BatchEnsemble(4), by.Rank1(4)], ids=str)
def test_a_weight_that_is_read_where_it_is_zero_at_first_is_refused(method: Any) -> None:
    with pytest.raises(RowError, match="layer 'A', 'B': its weight is read outside of its call"):
        called(DoRA(), {"A": method, "B": method})


def test_a_weight_that_is_read_while_all_members_are_equal_is_refused() -> None:
    class Reads(Base):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) / self.h.weight.norm(dim=1)

    for method in (by.BatchEnsemble(4, mean_std=0.0), by.Ensemble(2, jitter=0.0)):
        with pytest.raises(RowError, match="layer 'h': its weight is read outside of its call"):
            called(Reads(), method)


class Centred(Base):
    """Takes off the mean of the rows, after its last layer."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y - y.mean(0)


EQUAL_DRAWS = [
    by.BatchEnsemble(4, mean_std=0.0),
    by.Ensemble(2, jitter=0.0),
    by.MCDropout(1e-9),
    by.DropConnect(0.999, reach="row"),
]


@pytest.mark.parametrize("method", EQUAL_DRAWS, ids=str)
def test_rows_that_are_mixed_while_their_draws_are_equal_are_refused(method: Any) -> None:
    with pytest.raises(RowError, match="row 0 of the output"):
        called(Centred(), method)


@pytest.mark.parametrize("options", [{"estimator": "local"}, {"estimator": "exemplar", "rows_at_once": 2}], ids=str)
def test_rows_that_are_mixed_after_layers_that_avoid_a_weight_for_each_row_are_refused(options: Any) -> None:
    with pytest.raises(RowError, match="row 0 of the output"):
        called(Centred(), by.MeanField(**options))


def test_rows_that_are_mixed_after_an_embedding_drawn_by_entry_are_refused() -> None:
    class Words(Centred):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(7, 4)

        def forward(self, ids: Tensor) -> Any:
            return super().forward(self.e(ids).sum(1))

    with pytest.raises(RowError, match="row 0 of the output"):
        called(Words(), {"e": by.MeanField()}, torch.arange(15).reshape(5, 3) % 7)


def test_rows_that_are_mixed_by_a_network_that_is_random_are_refused() -> None:
    class Noisy(Centred):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x + 0.1 * torch.randn_like(x))

    with pytest.raises(RowError, match="row 0 of the output"):
        called(Noisy())


def test_rows_that_are_mixed_by_a_gate_that_opens_later_are_refused() -> None:
    class Gate(Base):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y + self.gate * (y @ y.T).softmax(1) @ y

    model = called(Gate())
    with torch.no_grad():
        model.gate.fill_(0.5)
    with pytest.raises(RowError, match="row 0 of the output"):
        for _ in range(9):
            model(X)


def test_lengths_that_differ_in_later_batches_only_are_followed_later() -> None:
    class Sorts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.g, self.h = nn.Linear(3, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            lengths, order = lengths.sort(descending=True, stable=True)
            packed = nn.utils.rnn.pack_padded_sequence(self.e(x).relu()[order], lengths, batch_first=True)
            return self.h(self.g(packed)[1][0][order.argsort()])

    x = torch.randn(8, 5, 3)
    model = called(Sorts(), x={"x": x, "lengths": torch.full((8,), 5)})
    with pytest.raises(RowError):
        for _ in range(9):
            model(x, torch.tensor([1, 2, 3, 5, 4, 3, 2, 1]))


# A first batch that is special.


class ReadsWhereTheInputIs(Base):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + F.linear(x, self.f.weight).mean(1, keepdim=True)


class MixesRowsAtTheEnd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.h(x)
        return y - y.mean(0)


@pytest.mark.parametrize("first", ["zeros", "equal rows"])
@pytest.mark.parametrize("network", [ReadsWhereTheInputIs, MixesRowsAtTheEnd], ids=lambda kind: kind.__name__)
def test_a_first_batch_of_zeros_or_equal_rows_hides_nothing(network: type[nn.Module], first: str) -> None:
    with pytest.raises(RowError, match=r"its weight is read outside of its call|row 0 of the output"):
        called(network(), x=torch.zeros(8, 4) if first == "zeros" else X[:1].expand(8, 4))


def test_a_sound_network_takes_a_first_batch_of_zeros() -> None:
    zeros = torch.zeros(8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(Base(), x=zeros)
    assert not zeros.any()


# A loss beside the output.


def test_a_loss_before_the_logits_is_not_taken_for_the_output() -> None:
    class WithLoss(Base):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y.square().mean(), y

    model = by.convert(WithLoss(), by.Rank1(4))
    networks = [by.draw(model, 1, index=index) for index in range(4)]
    mean = torch.stack([network(X)[1].softmax(-1) for network in networks]).mean(0)
    assert torch.allclose(by.predict(model, X, 4, seed=1).probs, mean, atol=1e-5)
    targets = torch.arange(8) % 3
    torch.manual_seed(1)
    found = by.elbo(model, X, targets, n=8).log_likelihood
    torch.manual_seed(1)
    assert torch.isclose(found, -F.cross_entropy(model(X)[1], targets))


# A network around a converted part.


def test_a_part_that_is_called_twice_is_refused_with_the_way_out() -> None:
    class Siamese(nn.Module):
        def __init__(self, encoder: nn.Module) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return self.encoder(x) - self.encoder(z)

    encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    pair, y = {"x": X, "z": X}, torch.zeros(8).long()
    model = Siamese(by.convert(encoder, by.Rank1(4))).train()
    with pytest.raises(RowError, match=r"Convert the whole network, with the part's name as a pattern"):
        by.elbo(model, pair, y, n=8)
    whole = by.convert(Siamese(by.revert(encoder)), {"encoder*": by.Rank1(4)}).train()
    by.elbo(whole, pair, y, n=8)
    assert not whole(X, X).any()


@pytest.mark.parametrize("method", [by.EMP(3), by.MeanField(estimator="shared"), by.DropConnect(0.3)], ids=str)
def test_a_part_with_one_draw_for_the_batch_is_refused_if_it_is_called_twice(method: Any) -> None:
    class Twice(nn.Module):
        def __init__(self, part: nn.Module, times: int) -> None:
            super().__init__()
            self.part, self.times = part, times

        def forward(self, x: Tensor) -> Tensor:
            return sum(self.part(x) for _ in range(self.times))

    part, y = by.convert(Base(), method), torch.zeros(8).long()
    with pytest.raises(RowError, match=r"calls a converted part more than once\. .* Convert the whole network"):
        by.elbo(Twice(part, 2).train(), X, y, n=8)
    by.elbo(Twice(part, 1).train(), X, y, n=8)
    by.elbo(by.convert(Twice(Base(), 2), method).train(), X, y, n=8)


@pytest.mark.parametrize("views", [1, 2])
def test_what_mixes_rows_around_a_part_is_refused_for_a_batch_of_one_row(views: int) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = by.convert(Base(), by.Rank1(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.part(x.repeat_interleave(views, 0)).unflatten(0, (-1, views)).sum(1)
            return y - y.mean(0)

    model, y = Centred().train(), torch.zeros(8).long()
    for rows in (1, 2):
        with pytest.raises(RowError, match="Only parts of this network were converted"):
            by.elbo(model, X[:rows], y[:rows], n=8)


def test_what_is_around_a_part_that_gets_other_rows_is_warned_of() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = by.convert(Base(), RANK1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.part(x[:5])
            return torch.cat([y - y.mean(0), y[:3]])

    with pytest.warns(UserWarning, match="around the converted parts: layer 'f' got 5 rows while the model got 8"):
        by.elbo(Masked().train(), X, torch.zeros(8).long(), n=8)


def test_after_batches_of_padding_the_next_batch_is_checked_again() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 3, padding_idx=0)

        def forward(self, ids: Tensor) -> Tensor:
            y = self.embedding(ids).mean(1)
            return y - y.mean(0)

    model, padding = by.convert(Centred(), {"*": by.BatchEnsemble(2)}).train(), torch.zeros(4, 5).long()
    model(padding), model(padding)
    with pytest.raises(RowError, match="row 0 of the output"):
        model(torch.randint(9, (4, 5)))


def test_an_outer_network_that_reads_a_converted_weight_is_refused() -> None:
    class TiedAutoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = by.convert(nn.Linear(4, 3), by.Rank1(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.encoder(x), self.encoder.weight.T)

    with pytest.raises(RowError, match="layer 'encoder': its weight is read outside of its call"):
        by.elbo(TiedAutoencoder().train(), X, torch.zeros(8).long(), n=8)


def test_parts_that_are_called_once_each_are_not_refused() -> None:
    parts = [by.convert(nn.Linear(*size), by.Rank1(4)) for size in ((4, 8), (8, 3))]
    model = nn.Sequential(parts[0], nn.ReLU(), parts[1]).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by.elbo(model, X, torch.zeros(8).long(), n=8)


# What was not checked at all.


class ReadsItsWeight(Base):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) / self.h.weight.norm(dim=1)


class Annotated(Tensor):
    """An input with something added, as of libraries for images."""


class Stored(nn.Parameter):
    """A parameter with something added, as of libraries that store weights in few bits."""


def test_a_first_call_under_autocast_is_checked() -> None:
    model = by.convert(ReadsItsWeight(), by.Rank1(4)).train()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RowError, match="layer 'h': its weight is read outside of its call"),
    ):
        model(X)


def test_inputs_in_16_bits_under_autocast_are_checked_without_a_warning() -> None:
    model = by.convert(Base(), by.Rank1(4)).train()
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X.bfloat16())
        with pytest.raises(RowError, match="layer 'h': its weight is read outside of its call"):
            by.convert(ReadsItsWeight(), by.Rank1(4)).train()(X.bfloat16())


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_network_in_16_bits_is_checked(method: Any) -> None:
    model = by.convert(ReadsItsWeight().bfloat16(), method).train()
    with pytest.raises(RowError, match="layer 'h': its weight is read outside of its call"):
        model(X.bfloat16())
    by.convert(Base().bfloat16(), method).train()(X.bfloat16())


def test_inputs_and_parameters_of_a_subclass_are_checked() -> None:
    with pytest.raises(RowError, match="layer 'h': its weight is read outside of its call"):
        called(ReadsItsWeight(), x=X.as_subclass(Annotated))
    network = nn.Sequential(nn.Linear(4, 4), ReadsItsWeight())
    network[0].weight = Stored(network[0].weight.detach())
    with pytest.raises(RowError, match=r"layer '1\.h': its weight is read outside of its call"):
        called(network, {"1": by.Rank1(4)})


def test_a_network_that_is_random_is_checked() -> None:
    class Noisy(Base):
        def forward(self, x: Tensor) -> Any:
            h = self.f(x).relu()
            return self.h(h + 0.1 * torch.randn_like(h)) / self.h.weight.norm(dim=1)

    with pytest.raises(RowError, match="layer 'h': its weight is read outside of its call"):
        called(Noisy())


def test_rows_that_are_one_example_are_refused() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.a, self.o = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, bag: Tensor) -> Tensor:
            h = self.f(bag).tanh()
            return self.o((self.a(h).softmax(0) * h).sum(0))

    with pytest.raises(RowError, match="the one number that the network returns"):
        called(Bag(), {"f": by.Rank1(4)})


@pytest.mark.parametrize("how", ["features first", "heads folded", "heads first", "all nodes"])
def test_kept_dropout_with_rows_folded_into_its_mask_is_refused(how: str) -> None:
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.d, self.h = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            (b, t, _), h = x.shape, self.f(x)
            if how == "features first":
                return self.h(self.d(h.mean(1).T).T)
            if how == "heads folded":
                return self.h(self.d(h.transpose(0, 1).reshape(t, 2 * b, 4)).reshape(t, b, 8).mean(0))
            if how == "heads first":
                h = self.d(h.reshape(b * t, 2, 4).transpose(0, 1)).transpose(0, 1)
                return self.h(h.reshape(b, t, 8).mean(1))
            return self.h(self.d(h.reshape(1, b * t, 8)).reshape(b, t, 8).mean(1))

    with pytest.raises(RowError, match="keep_dropout: a row's output changes with the order of the rows"):
        called(Folds(), {"h": by.Rank1(4)}, torch.randn(6, 5, 4), keep_dropout=True)


@pytest.mark.parametrize("how", ["partial", "list", "closure"])
def test_a_weight_that_is_held_elsewhere_is_refused(how: str) -> None:
    class Holds(Base):
        def __init__(self) -> None:
            super().__init__()
            weight = self.h.weight
            self.held = [weight]
            self.out = functools.partial(F.linear, weight=weight) if how == "partial" else lambda h: F.linear(h, weight)

        def forward(self, x: Tensor) -> Any:
            h = self.f(x).relu()
            return self.h(h) + (F.linear(h, self.held[0]) if how == "list" else self.out(h))

    with pytest.raises(
        RowError, match=r"'h\.weight' other than by this name|layer 'h': its weight is read outside of its call"
    ):
        called(Holds(), by.MeanField())


def test_a_check_leaves_the_seeds_of_devices_that_are_not_in_use_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` would replace the seed that a GPU gets when it is first used."""
    if torch.accelerator.is_available():
        pytest.skip("the device may be in use")

    def seeds_all(seed: int) -> None:
        raise AssertionError("seeds every device")

    monkeypatch.setattr(torch, "manual_seed", seeds_all)
    model = by.convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), by.Rank1(2))
    assert by.check(model, torch.randn(5, 4))
    model(torch.randn(5, 4)).sum().backward()
