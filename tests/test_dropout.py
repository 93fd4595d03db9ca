"""Kept dropout: one draw is one function of a row, with the module's own rate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bayesify as by

Change = Callable[[Tensor], Tensor]


class Reshaped(nn.Module):
    """A drawn layer, a change of shape, a dropout and the way back: what the dropout sees depends on the change."""

    def __init__(self, drop: nn.Module, change: Change, back: Change | None = None) -> None:
        super().__init__()
        self.first, self.drop, self.change, self.back = nn.Linear(6, 6), drop, change, back

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.change(self.first(x)))
        return self.back(y) if self.back else y


def kept(net: nn.Module, batch_dim: int = 0) -> nn.Module:
    """The network with its dropout kept and weights that hardly vary between draws."""
    return by.convert(net, {"first": by.MeanField(init_log_std=(-30.0, -30.0))}, batch_dim=batch_dim, keep_dropout=True)


BATCH_FIRST: dict[str, tuple[nn.Module, tuple[int, ...], Change, Change | None]] = {
    "(B, D)": (nn.Dropout(0.5), (6,), lambda x: x, None),
    "(B, T, D)": (nn.Dropout(0.5), (4, 6), lambda x: x, None),
    "(B, C, H, W)": (nn.Dropout(0.5), (3, 2, 6), lambda x: x, None),
    "(B, C, D, H, W)": (nn.Dropout(0.5), (3, 2, 2, 6), lambda x: x, None),
    "(B·T, D)": (nn.Dropout(0.5), (4, 6), lambda x: x.flatten(0, 1), lambda x: x.unflatten(0, (-1, 4))),
    "(B·heads, T, d)": (
        nn.Dropout(0.5),
        (4, 6),
        lambda x: x.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1),
        lambda x: x.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2),
    ),
    "Dropout1d (B, C, L)": (nn.Dropout1d(0.5), (4, 6), lambda x: x, None),
    "Dropout2d (B, C, H, W)": (nn.Dropout2d(0.5), (4, 2, 6), lambda x: x, None),
    "Dropout2d (B, C)": (nn.Dropout2d(0.5), (6,), lambda x: x, None),
    "Dropout3d (B, C, D, H, W)": (nn.Dropout3d(0.5), (4, 2, 2, 6), lambda x: x, None),
}
TIME_FIRST: dict[str, tuple[nn.Module, tuple[int, ...], Change, Change | None]] = {
    "(T, B, D)": (nn.Dropout(0.5), (6,), lambda x: x, None),
    "(B, D) by pooling": (nn.Dropout(0.5), (6,), lambda x: x.mean(0), None),
    "(B, D) of the last step": (nn.Dropout(0.5), (6,), lambda x: x[-1], None),
    "(T·B, D)": (nn.Dropout(0.5), (6,), lambda x: x.flatten(0, 1), lambda x: x.unflatten(0, (3, -1))),
}


def assert_a_function_of_rows(model: nn.Module, x: Tensor, dim: int) -> None:
    """The same outputs in any order, with repetition, and for every batch size, from draws that differ."""

    def predicted(x: Tensor, **options: int) -> Tensor:
        draws = by.predict(model, x, samples=3, likelihood=by.Gaussian(), **options).draws
        return draws.movedim(1 + dim if draws.dim() > 1 + x.dim() - 1 else 1, 1)

    whole = predicted(x)
    assert whole.std(0).max() > 0.1
    order = torch.tensor([4, 0, 0, 3, 2, 1, 4])
    assert torch.allclose(predicted(x.index_select(dim, order)), whole[:, order], atol=1e-5)
    for size in (1, 2, 3):
        assert torch.allclose(predicted(x, batch_size=size), whole, atol=1e-5)


@pytest.mark.filterwarnings("ignore:dropout2d")
@pytest.mark.parametrize("case", BATCH_FIRST.values(), ids=BATCH_FIRST)
def test_one_draw_is_one_function_of_a_row(case: tuple[nn.Module, tuple[int, ...], Change, Change | None]) -> None:
    drop, shape, change, back = case
    model, x = kept(Reshaped(copy.deepcopy(drop), change, back)), torch.randn(5, *shape)
    assert_a_function_of_rows(model, x, 0)
    model.eval()
    y = model(x[:1].expand_as(x))  # the same row five times
    assert torch.allclose(y, y[:1].expand_as(y))


@pytest.mark.parametrize("case", TIME_FIRST.values(), ids=TIME_FIRST)
def test_batch_dim_1_keeps_rows_of_pooled_tensors(
    case: tuple[nn.Module, tuple[int, ...], Change, Change | None],
) -> None:
    drop, shape, change, back = case
    model, x = kept(Reshaped(copy.deepcopy(drop), change, back), batch_dim=1), torch.randn(3, 5, *shape)
    assert_a_function_of_rows(model, x, 1)
    y = by.draw(model, 0)(x)
    assert 0 < (y == 0).flatten(0, -2).all(0).float().mean() < 1 or y.dim() > 2  # features are dropped
    assert not (y == 0).flatten(1).all(1).any()  # and no whole row


def test_an_unbatched_vector_loses_elements_and_not_everything() -> None:
    model, x = kept(Reshaped(nn.Dropout(0.5), lambda x: x)), torch.randn(6)
    shares = torch.tensor([float((by.draw(model, 0, index=i)(x) == 0).float().mean()) for i in range(40)])
    assert 0.35 < shares.mean() < 0.65 and ((shares > 0) & (shares < 1)).sum() > 30
    draw = by.draw(model, 0)
    assert torch.allclose(draw(x), draw(x[None])[0])  # the same function as on a batch of one


def test_p_changed_after_conversion_changes_draws_as_it_changes_training() -> None:
    model, x = kept(Reshaped(nn.Dropout(0.5), lambda x: x.repeat(1, 200))).eval(), torch.randn(2, 6)
    for p in (0.1, 0.9, 0.0, 0.5):
        model.drop.p = p
        for y in (by.draw(model, 0)(x), model(x), by.revert(copy.deepcopy(model), 3)(x), by.members(model, 1)[0](x)):
            assert float((y == 0).float().mean()) == pytest.approx(p, abs=0.05)
        kept_values = by.draw(model, 0)(x) / by.draw(model, None)(x)
        assert torch.allclose(kept_values[kept_values != 0], torch.tensor(1 / (1 - p)), rtol=1e-4)
        draws = by.predict(model, x, 2, likelihood=by.Gaussian()).draws
        assert float((draws == 0).float().mean()) == pytest.approx(p, abs=0.05)
    model.drop.p = 1.0
    with pytest.raises(by.BayesifyError, match=r"'drop' is a dropout with p=1.0: expected 0 <= p < 1"):
        by.predict(model, x, 2)


def test_a_draw_keeps_the_rate_that_it_was_drawn_with() -> None:
    model, x = kept(Reshaped(nn.Dropout(0.5), lambda x: x)), torch.randn(2, 6)
    draw = by.draw(model, 0)
    before = draw(x)
    model.drop.p = 0.9
    assert torch.equal(draw(x), before)


def test_an_inplace_dropout_changes_its_input() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop = nn.Linear(6, 40), nn.Dropout(0.5, inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            self.drop(y)
            return y

    model, x = kept(Forgetful()).eval(), torch.randn(3, 6)
    for y in (model(x), by.draw(model, 0)(x)):
        assert 0.2 < float((y == 0).float().mean()) < 0.8


def test_a_dropout_called_twice_in_a_call_is_one_function() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop = nn.Linear(6, 40), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.ones_like(self.first(x))
            return torch.stack([self.drop(y), self.drop(y)], 1)

    model, x = kept(Twice()).eval(), torch.ones(1, 6)
    for network in (model, by.draw(model, 0)):
        first, second = network(x)[0]
        assert torch.equal(first, second) and len(first.unique()) == 2


# Where rows can't be told apart.


def test_a_batch_in_another_dimension_is_refused() -> None:
    """A batch-first network that transposes inside: each row would get a mask of its own."""
    model = kept(Reshaped(nn.Dropout(0.5), lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1)))
    with pytest.raises(by.RowError, match=r"shape \(8, 4, 6\) while the model got 4 rows: .* in dimension 1, not 0"):
        by.predict(model, torch.randn(4, 8, 6))
    images = kept(Reshaped(nn.Dropout(0.5), lambda x: x.movedim(0, 1)), batch_dim=1)
    with pytest.raises(by.RowError, match=r"in dimension 0, not 1"):
        by.predict(images, torch.randn(8, 4, 6))


def test_numbers_without_features_are_refused() -> None:
    model = kept(Reshaped(nn.Dropout(0.5), lambda x: x.sum(1)))
    with pytest.raises(by.RowError, match=r"Dropout 'drop' got an input of shape \(4,\) while the model got 4 rows"):
        by.predict(model, torch.randn(4, 6))
    rows = kept(Reshaped(nn.Dropout1d(0.5), lambda x: x))
    with pytest.raises(by.RowError, match=r"Dropout1d 'drop' got an input of shape \(4, 6\)"):
        by.predict(rows, torch.randn(4, 6))


def test_a_dropout2d_of_three_dimensions_is_refused() -> None:
    """Torch takes (N, C, L) in training, and the same numbers may be an image (C, H, W) without a batch."""
    model = kept(Reshaped(nn.Dropout2d(0.5), lambda x: x)).eval()
    for network in (model, by.draw(model, 0)):
        with pytest.raises(
            by.RowError, match=r"Dropout2d 'drop' got .* \(5, 4, 6\).* Use nn.Dropout1d for \(N, C, L\)"
        ):
            network(torch.randn(5, 4, 6))


def test_an_unbatched_volume_loses_channels_not_rows() -> None:
    net = nn.Sequential(nn.Conv3d(1, 40, 1), nn.Dropout3d(0.5))
    model = by.convert(net, {"0": by.MeanField()}, keep_dropout=True)
    dropped = (by.draw(model, 0)(torch.randn(1, 3, 3, 3)) == 0).flatten(1)
    assert torch.equal(dropped.any(1), dropped.all(1)) and 5 < dropped.all(1).sum() < 35


def test_parts_of_a_draw_can_be_called_alone() -> None:
    draw = by.draw(kept(Reshaped(nn.Dropout(0.5), lambda x: x)), 0)
    assert draw.drop(torch.ones(4, 6)).shape == draw.drop(torch.ones(4)[None]).T.expand(4, 6).shape


def test_a_dropout_of_another_type_is_not_left_out_in_silence() -> None:
    class Own(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else x

    with pytest.raises(by.ConversionError, match=r"layer '1' is an Own, which keep_dropout does not support"):
        by.convert(nn.Sequential(nn.Linear(3, 3), Own(0.2)), by.Rank1(2), keep_dropout=True)


# Draws elsewhere.


def test_a_draw_can_be_copied_pickled_and_called_in_threads() -> None:
    draw = by.draw(kept(Reshaped(nn.Dropout(0.5), lambda x: x)), 0)
    x = torch.randn(5, 6)
    expected = draw(x)
    assert torch.equal(copy.deepcopy(draw)(x), expected)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda n: draw(x[: 1 + n % 5]), range(200)))
    assert all(torch.allclose(part, expected[: len(part)]) for part in parts)


def test_a_frozen_mask_survives_a_failed_call() -> None:
    draw = by.draw(kept(Reshaped(nn.Dropout(0.5), lambda x: x)), 0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        draw(torch.randn(4, 7))
    assert draw.drop(torch.ones(4)).shape == (4,)  # no call is under way any more


@pytest.mark.filterwarnings("ignore")  # of the tracer
def test_a_graph_that_others_trace_does_not_draw_anew() -> None:
    """It would hold a generator, whose masks are right in the first call only."""
    draw, x = by.draw(kept(Reshaped(nn.Dropout(0.5), lambda x: x)), 0), torch.randn(5, 6)
    with pytest.raises(by.BayesifyError, match=r"another mask at each call; use by.export"):
        torch.export.export(draw, (x,))
    with pytest.raises(by.BayesifyError, match=r"another mask at each call; use by.export"):
        torch.jit.trace(draw, x)


def test_a_compiled_draw_keeps_its_masks() -> None:
    draw, x = by.draw(kept(Reshaped(nn.Dropout(0.5), lambda x: x)), 0), torch.randn(5, 6)
    expected, compiled = draw(x), torch.compile(draw, backend="eager")
    for rows in (5, 5, 2):
        assert torch.allclose(compiled(x[:rows]), expected[:rows])


def test_a_rate_that_was_changed_is_saved(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    model, x = by.convert(network(), by.MeanField(), keep_dropout=True), torch.randn(6, 4)
    model[1].p = 0.1
    by.save(model, tmp_path / "model.safetensors")
    again = by.load(network(), tmp_path / "model.safetensors")
    assert again[1].p == 0.1
    assert torch.equal(by.predict(again, x, 4).probs, by.predict(model, x, 4).probs)
    with pytest.raises(by.CheckpointError, match="dropout '1'"):
        by.load(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), tmp_path / "model.safetensors")


def test_dropout_alone_is_mc_dropout(tmp_path: Path) -> None:
    """Gal and Ghahramani 2016: the predictive is the average over masks, here all eight of three units."""
    plain = nn.Sequential(nn.Dropout(0.4), nn.Linear(3, 2))
    model, x = by.convert(copy.deepcopy(plain), {}, keep_dropout=True), torch.randn(5, 3)
    kept_units = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    chances = (0.6 ** kept_units.sum(1)) * (0.4 ** (3 - kept_units.sum(1)))
    exact = sum(p * plain[1](x * mask / 0.6).softmax(-1) for p, mask in zip(chances, kept_units, strict=True))
    assert by.check(model, x) == {}
    prediction = by.predict(model, x, samples=2000)
    assert torch.allclose(prediction.probs, exact, atol=0.03) and (prediction.epistemic > 0).all()
    out = by.elbo(model.train(), x, torch.zeros(5).long(), n=5)
    assert float(out.kl) == 0 and torch.equal(out.loss, -out.log_likelihood)
    by.save(model, tmp_path / "model.safetensors")
    loaded = by.load(copy.deepcopy(plain), tmp_path / "model.safetensors")
    assert torch.equal(by.predict(loaded, x, samples=3, seed=1).probs, by.predict(model, x, samples=3, seed=1).probs)


def test_dropout_alone_needs_dropout() -> None:
    with pytest.raises(by.ConversionError, match="needs a dropout module, but the network has none"):
        by.convert(nn.Linear(3, 2), {}, keep_dropout=True)
    with pytest.raises(by.ConversionError, match="expected a method"):
        by.convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)), {})
