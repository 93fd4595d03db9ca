"""`by.Familiarity`: its density against numpy and scikit-learn, its ranks, its files, and inputs far from the data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.stats import kstest
from sklearn.covariance import ledoit_wolf
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import bayesify as by
from bayesify.errors import BayesifyError, CheckpointError
from bayesify.familiarity.density import Ranks, fit_density, shrunk_covariance
from bayesify.familiarity.familiarity import total_uncertainty
from bayesify.familiarity.features import MOST_FEATURES, FeatureNetwork, pooled


def net(inputs: int = 5, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def data(rows: int = 600, inputs: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three clusters with correlated columns."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (rows,), generator=generator)
    mix = torch.randn(inputs, inputs, generator=torch.Generator().manual_seed(99))
    x = torch.randn(rows, inputs, generator=generator) @ mix + 3 * torch.eye(3, inputs)[y]
    return x, y


METHODS: list[by.methods.Method | None] = [
    None,
    by.Rank1(4),
    by.MCDropout(0.1),
    by.ECMP(4),
    by.MeanField(),
    by.BatchEnsemble(4),
    by.Ensemble(2),
]


def model_of(method: by.methods.Method | None, plain: nn.Module | None = None) -> nn.Module:
    network = net() if plain is None else plain
    return network if method is None else by.convert(network, method)


# The density.


@pytest.mark.parametrize("rows", [12, 40, 2000])
def test_covariance_is_shrunk_as_by_scikit_learn(rows: int) -> None:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)).double() @ torch.randn(8, 8).double()
    x = x - x.mean(0)
    expected, _ = ledoit_wolf(x.numpy(), assume_centered=True)
    assert torch.allclose(shrunk_covariance(x), torch.from_numpy(expected), rtol=1e-9)


def test_distance_is_mahalanobis_to_the_nearest_class_by_numpy() -> None:
    x, y = data()
    density, new = fit_density(x, y), data(50, seed=1)[0]
    a, b = x.double().numpy(), new.double().numpy()
    z = (a - a.mean(0)) / a.std(0)
    centres = np.stack([z[y.numpy() == k].mean(0) for k in range(3)])
    precision = np.linalg.inv(ledoit_wolf(z - centres[y.numpy()], assume_centered=True)[0])
    gaps = ((b - a.mean(0)) / a.std(0))[:, None] - centres
    expected = np.einsum("nki,ij,nkj->nk", gaps, precision, gaps).min(1)
    assert np.allclose(density.log_distance(new.double()).exp().numpy(), expected)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 4),
        torch.ones(30, 4),
        torch.randn(3, 100),
        torch.randn(50, 1).expand(50, 6),
        torch.cat([torch.randn(40, 2), torch.zeros(40, 3)], 1),
        1e12 * torch.randn(40, 3),
    ],
    ids=["one row", "constant", "few rows", "rank one", "dead units", "large"],
)
def test_densities_without_full_rank_are_finite(x: Tensor) -> None:
    for labels in (None, torch.arange(len(x)) % 2, torch.arange(len(x))):
        density = fit_density(x, labels)
        assert all(bool(t.isfinite().all()) for t in vars(density).values())
        near, far = density.log_distance(x.double()), density.log_distance(x.double() + 1e14)
        assert bool(near.isfinite().all()) and bool((far > near).all())


def test_ranks_are_the_shares_of_higher_values_with_an_exponential_tail() -> None:
    values = torch.distributions.Exponential(2.0).sample((200_000,))
    at = torch.tensor([0.1, 0.5, 1.0, 3.0, 6.0])
    assert torch.allclose(Ranks.of(values).surprise(at), 2 * at, rtol=0.02)  # -log p is linear
    assert Ranks.of(torch.ones(5)).surprise(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([0, 0], abs=3)
    order = Ranks.of(torch.randn(7)).surprise(torch.linspace(-4, 9, 200))
    assert bool((order.diff() >= -1e-6).all()) and bool(order.isfinite().all())


# Features.


def test_features_are_what_layers_are_given() -> None:
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    x = torch.randn(5, 2, 4, 4)
    found = FeatureNetwork(network).of(x)
    assert list(found) == ["0", "3"]
    assert torch.allclose(found["0"], torch.cat([x.mean((2, 3)), x.std((2, 3), correction=0)], 1), atol=1e-6)
    assert torch.allclose(found["3"], network[:3](x))
    sequence = torch.randn(5, 7, 6)
    found = FeatureNetwork(nn.Linear(6, 2)).of(sequence)
    assert torch.allclose(found[""], torch.cat([sequence.mean(1), sequence.std(1, correction=0)], 1), atol=1e-6)


def test_at_most_six_layers_are_chosen_the_first_and_last_among_them() -> None:
    network = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    found = FeatureNetwork(network).of(torch.randn(4, 3))
    assert len(found) == 6 and next(iter(found)) == "0" and list(found)[-1] == "19"


def test_long_features_are_hashed_so_that_distances_stay() -> None:
    x = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0))
    short = pooled(x)
    assert short.shape == (40, MOST_FEATURES)
    ratio = torch.pdist(short) / torch.pdist(x)
    assert 0.95 < float(ratio.mean()) < 1.05 and float(ratio.std()) < 0.1  # as of a random projection: 1/√(2·128)


def test_a_bayesian_model_has_the_features_of_its_first_members_mean() -> None:
    model = by.convert(net(), by.Ensemble(3))
    x = data()[0]
    expected = by.members(model)[0][:2](x)
    assert torch.allclose(FeatureNetwork(model).of(x)["2"], expected, atol=1e-6)


# Fitting and scoring.


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_familiarity_of_new_rows_is_uniform_and_that_of_far_rows_nil(method: by.methods.Method | None) -> None:
    model, new = model_of(method), data(2000, seed=2)[0]
    f = by.Familiarity.fit(model, data(3000))
    found = f.score(model, new)
    assert kstest(found.numpy(), "uniform").pvalue > 1e-3
    far = torch.cat([new[:50] * 30, new[:50] + 100, torch.full((1, 5), 1e9), -torch.full((1, 5), 1e30)])
    assert float(f.score(model, far).max()) < 1e-3


@pytest.mark.parametrize("method", METHODS[1:], ids=str)
def test_predict_gives_familiarity_whatever_the_batches_and_the_seed(method: by.methods.Method) -> None:
    model, x = model_of(method), data(50, seed=3)[0]
    f = by.Familiarity.fit(model, data())
    p = by.predict(model, x, 8, familiarity=f)
    assert torch.allclose(p.familiarity, f.score(model, x, batch_size=7), atol=1e-5)
    q = by.predict(model, x, 8, familiarity=f, batch_size=9, seed=5)
    assert torch.allclose(p.familiarity, q.familiarity, atol=1e-5) and p.doubt is None
    assert torch.equal(by.predict(model, x, 8).probs, p.probs)
    adaptive = by.predict(model, x, by.Adaptive(), familiarity=f)
    assert torch.allclose(adaptive.familiarity, p.familiarity, atol=1e-5)


def test_every_form_of_data_gives_the_same() -> None:
    model, (x, y) = model_of(by.Rank1(4)), data()
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64)
    expected = by.Familiarity.fit(model, (x, y)).score(model, x)
    for form in (loader, [(x[:100], y[:100]), (x[100:], y[100:])]):
        assert torch.allclose(by.Familiarity.fit(model, form).score(model, form), expected, atol=1e-5)
    called = by.Familiarity.fit(model, loader, call=lambda network, batch: network(batch[0]))
    assert torch.allclose(called.score(model, x), expected, atol=1e-5)
    one = by.Familiarity.fit(model, x)
    assert one.densities[0].centres.shape[0] == 1 and called.densities[0].centres.shape[0] == 3

    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    f = by.Familiarity.fit(Keyword(), [{"x": x, "labels": y}])
    assert f.densities[0].centres.shape[0] == 3


def test_rows_are_a_random_sample() -> None:
    x, y = data(1000)
    order = y.argsort()  # a loader that is sorted by class
    f = by.Familiarity.fit(net(), (x[order], y[order]), rows=100, batch_size=30)
    assert f.rows == 100 and f.densities[0].centres.shape[0] == 3


def test_few_rows_are_refused_as_new_ones_like_them_would_be_unfamiliar() -> None:
    for rows in (1, 5, 19):
        with pytest.raises(BayesifyError, match=f"data has {rows} rows"):
            by.Familiarity.fit(net(), data(rows))
        with pytest.raises(BayesifyError, match=f"held_out has {rows} rows"):
            by.Familiarity.fit(net(), data(), held_out=data(rows)[0])
    f, model = by.Familiarity.fit(net(), data()), by.convert(net(), by.Rank1(4))
    with pytest.raises(BayesifyError, match="the prediction has 19 rows"):
        f.calibrated(by.predict(model, data(19)[0]))
    with pytest.raises(BayesifyError, match="got Tensor"):
        f.calibrated(data()[0])  # type: ignore[arg-type]
    few = by.Familiarity.fit(net(), data(20)).score(net(), data(2000, seed=1)[0])
    assert float((few < 0.05).float().mean()) < 0.5


def test_inputs_that_are_all_the_same_are_refused() -> None:
    with pytest.raises(BayesifyError, match="the same features"):
        by.Familiarity.fit(net(), torch.full((100, 5), 1234.5))


@pytest.mark.parametrize("steps", [7, 60])
def test_a_pair_with_rows_in_the_second_dimension_keeps_its_classes(steps: int) -> None:
    model = by.convert(nn.LSTM(5, 4), by.Rank1(4), batch_dim=1).eval()
    x, y = torch.randn(steps, 60, 5), torch.arange(60) % 3
    f = by.Familiarity.fit(model, (x, y), batch_size=25)
    expected = by.Familiarity.fit(model, [(x[:, :25], y[:25]), (x[:, 25:50], y[25:50]), (x[:, 50:], y[50:])])
    assert f.rows == 60 and torch.equal(f.densities[0].centres, expected.densities[0].centres)
    assert f.densities[0].centres.shape == (3, 10)


def test_held_out_data_give_the_ranks() -> None:
    model, wide = net(), data(3000, seed=4)[0] * 3
    f = by.Familiarity.fit(model, data(), held_out=wide)
    assert kstest(f.score(model, data(1000, seed=5)[0] * 3).numpy(), "uniform").pvalue > 1e-3
    assert float(f.score(model, data(1000, seed=5)[0]).mean()) > 0.8


def test_a_named_layer_is_used_alone() -> None:
    f = by.Familiarity.fit(net(), data(), layers="2")
    assert f.layers == ("2",) and len(f.densities[0].mean) == 16


def test_sequences_and_regression() -> None:
    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]

    x = torch.randn(300, 6, 4)
    for model in (Series(), by.convert(Series(), by.Rank1(4))):
        f = by.Familiarity.fit(model, (x, torch.randn(300, 1)))
        assert f.layers == ("lstm", "head") and float(f.score(model, 50 * x).max()) < 1e-3
    p = by.predict(model, x, 8, likelihood=by.Gaussian(1.0), familiarity=f)
    q = by.predict(model, x, 8, likelihood=by.Gaussian(1.0), familiarity=f.calibrated(p))
    assert q.doubt is not None and q.doubt.shape == (300,) and bool(q.doubt.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_give_nearly_the_same(dtype: torch.dtype) -> None:
    model, (x, y) = net(), data()
    f = by.Familiarity.fit(model, (x, y))
    found = f.score(net().to(dtype), x.to(dtype))
    assert found.dtype == torch.float32
    assert float((found - f.score(model, x)).abs().max()) < (0.15 if dtype.itemsize == 2 else 1e-4)


def test_the_meta_device_can_score() -> None:
    model = by.convert(net(), by.Rank1(4))
    f = by.Familiarity.fit(model, data())
    p = by.predict(model.to("meta"), torch.empty(6, 5, device="meta"), 4, familiarity=f)
    assert p.familiarity.is_meta and p.familiarity.shape == (6,)


def test_the_model_stays_as_it_is() -> None:
    model = net().train()
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    f = by.Familiarity.fit(model, data())
    f.score(model, data()[0])
    assert model.training and [len(m._forward_pre_hooks) for m in model.modules()] == hooks


# Doubt.


def test_doubt_is_the_sum_of_both_parts_and_needs_both() -> None:
    model, (x, y) = by.convert(net(), by.Rank1(4)), data()
    f = by.Familiarity.fit(model, (x, y))
    p = by.predict(model, x, 8, familiarity=f)
    with pytest.raises(BayesifyError, match="calibrated"):
        f.doubt(p)
    g = f.calibrated(p)
    with pytest.raises(BayesifyError, match="familiarity=f"):
        g.doubt(by.predict(model, x, 8))
    q = by.predict(model, torch.cat([x, 100 * x]), 8, familiarity=g)
    rank = np.searchsorted(np.sort(p.entropy.numpy()), q.entropy.numpy()) / len(x)
    inside = (q.familiarity > 0.1).numpy() & (rank < 0.9)
    assert np.allclose(q.doubt.numpy()[inside], -np.log(1 - rank[inside]), atol=0.05)
    assert float(q.doubt[len(x) :].min()) > 10
    expected = 2 * -np.log(10 * q.familiarity[0].clamp(max=0.1)) if float(q.familiarity[0]) < 0.1 else 0.0
    assert math.isclose(float(g.doubts(q)["unfamiliar"][0]), float(expected), rel_tol=1e-4, abs_tol=1e-6)


def test_total_uncertainty_is_entropy_or_the_root_mean_square_of_stds() -> None:
    p = by.Categorical().predictive(torch.randn(3, 4, 5))
    assert torch.equal(total_uncertainty(p), p.entropy)
    r = by.Gaussian(2.0).predictive(torch.randn(3, 4, 2))
    assert torch.allclose(total_uncertainty(r), r.std.square().mean(1).sqrt())


def test_columns_out_of_range() -> None:
    x, y = data()
    f = by.Familiarity.fit(net(), (x, y))
    low, high = x.amin(0), x.amax(0)
    rows = torch.stack([low, high, high + 0.09 * (high - low), high + 0.11 * (high - low), low - 100])
    assert f.out_of_range(rows).all(1).tolist() == [False, False, False, True, True]
    assert not bool(f.out_of_range(rows[:3]).any())
    with pytest.raises(BayesifyError, match=r"expected \(N, 5\)"):
        f.out_of_range(torch.zeros(2, 4))
    images = by.Familiarity.fit(nn.Conv2d(1, 2, 3), torch.randn(30, 1, 4, 4))
    with pytest.raises(BayesifyError, match="columns have ranges only"):
        images.out_of_range(torch.zeros(2, 4))


# Files, and what is refused.


def test_a_file_gives_the_same_back(tmp_path: Path) -> None:
    model, (x, y) = by.convert(net(), by.Rank1(4)), data()
    f = by.Familiarity.fit(model, (x, y))
    for each in (f, f.calibrated(by.predict(model, x, 4))):
        each.save(tmp_path / "f.safetensors")
        again = by.Familiarity.load(tmp_path / "f.safetensors")
        assert again.layers == f.layers and again.rows == 600
        p, q = (by.predict(model, x, 4, familiarity=one) for one in (each, again))
        assert torch.equal(p.familiarity, q.familiarity)
        assert (p.doubt is None and q.doubt is None) or torch.equal(p.doubt, q.doubt)
        assert torch.equal(again.out_of_range(3 * x), f.out_of_range(3 * x))
    with pytest.raises(CheckpointError, match="does not exist"):
        f.save(tmp_path / "nowhere" / "f.safetensors")


class Imputing(nn.Module):
    """Replaces NaN and infinity by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.nan_to_num(0.0, 0.0, 0.0))


def test_ranges_are_those_of_finite_values_and_can_be_saved(tmp_path: Path) -> None:
    x = data()[0]
    x[3, 1], x[4, 2] = torch.nan, torch.inf
    f = by.Familiarity.fit(Imputing(), x)
    assert f.low is not None and f.high is not None
    assert f.low.tolist() == np.nanmin(x.numpy(), 0).tolist()
    assert f.high[2] == x[torch.arange(600) != 4, 2].max()
    f.save(tmp_path / "f.safetensors")
    assert bool(by.Familiarity.load(tmp_path / "f.safetensors").out_of_range(1e4 * torch.ones(1, 5)).all())
    x[:, 3] = torch.nan
    by.Familiarity.fit(Imputing(), x).save(tmp_path / "f.safetensors")
    assert by.Familiarity.load(tmp_path / "f.safetensors").low is None


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
CHANGES: dict[str, Change] = {
    "format": lambda header, tensors: header.update(format=2),
    "layers": lambda header, tensors: header.update(layers="0"),
    "no layers": lambda header, tensors: header.update(layers=[]),
    "numbers": lambda header, tensors: header.update(layers=[0, 1]),
    "same layer": lambda header, tensors: header.update(layers=["0", "0"]),
    "rows": lambda header, tensors: header.update(rows=-1),
    "sums": lambda header, tensors: header.update(checksums=["a", "b"]),
    "missing": lambda header, tensors: tensors.pop("mean.1"),
    "extra": lambda header, tensors: tensors.update(more=torch.zeros(2)),
    "shape": lambda header, tensors: tensors.update({"whiten.0": torch.zeros(5, 4)}),
    "type": lambda header, tensors: tensors.update({"mean.0": torch.zeros(5).long()}),
    "nan": lambda header, tensors: tensors["centres.0"].fill_(math.nan),
    "scale": lambda header, tensors: tensors["scale.0"].zero_(),
    "unsorted": lambda header, tensors: tensors["ranks"].neg_(),
    "spread": lambda header, tensors: tensors["log_distances"].zero_(),
    "whiten": lambda header, tensors: tensors["whiten.0"].zero_(),
    "ends": lambda header, tensors: tensors["low"].add_(1e6),
    "one end": lambda header, tensors: tensors.pop("high"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_edited_file_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    by.Familiarity.fit(net(), data()).save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["familiarity"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    CHANGES[change](header, tensors)
    save_file(tensors, path, {"familiarity": json.dumps(header)})
    with pytest.raises(CheckpointError, match="did not write it"):
        by.Familiarity.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        by.Familiarity.load(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        by.Familiarity.load(tmp_path / "f")
    by.save(by.convert(net(), by.Rank1(4)), tmp_path / "f")
    with pytest.raises(CheckpointError, match="no familiarity"):
        by.Familiarity.load(tmp_path / "f")


def test_another_network_is_refused_or_warned_about() -> None:
    f = by.Familiarity.fit(net(), data())
    with pytest.raises(BayesifyError, match="no layer '2'"):
        f.score(nn.Sequential(nn.Linear(5, 3)), data()[0])
    wider = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3))
    with pytest.warns(UserWarning, match="other weights"), pytest.raises(BayesifyError, match="has 20 features"):
        f.score(wider, data()[0])
    scaled = net()
    scaled[0].weight.data.mul_(5)
    with pytest.warns(UserWarning, match="other weights"):
        f.score(scaled, data()[0])
    torch.manual_seed(7)
    trained = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    with pytest.warns(UserWarning, match="fit it again after training"):
        f.score(trained, data()[0])


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((torch.zeros(0, 5), torch.zeros(0).long()), {}, "no rows"),
        ([], {}, "no rows"),
        ((torch.zeros(4, 5), torch.zeros(3)), {}, "4 inputs and 3 targets"),
        (torch.zeros(4, 5), {"rows": 19}, "rows=19"),
        (torch.zeros(4, 5), {"layers": "fc"}, "no layer 'fc'"),
        (torch.zeros(4, 5), {"layers": []}, "expected names of layers"),
        (torch.zeros(4, 5), {"layers": ["0", "0"]}, "each once"),
        (torch.zeros(4, 5), {"layers": ["1"], "call": lambda network, batch: network[0](batch)}, "'1' was not given"),
        (torch.full((4, 5), torch.nan), {}, "are not finite"),
    ],
)
def test_what_can_not_be_fitted_is_refused(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BayesifyError, match=message):
        by.Familiarity.fit(net(), given, **options)


class ByKeyword(nn.Module):
    """Calls its layers by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](input=self.layers[0](input=x).relu())


def test_layers_that_are_parametrized_or_called_by_keyword_have_features() -> None:
    x, y = data()
    plain = by.Familiarity.fit(net(), (x, y))
    assert torch.equal(by.Familiarity.fit(ByKeyword(), (x, y)).score(ByKeyword(), x), plain.score(net(), x))
    for add in (parametrizations.weight_norm, parametrizations.spectral_norm):
        model = net()
        add(model[0]), add(model[2])
        f = by.Familiarity.fit(model, (x, y))
        assert f.layers == ("0", "2") and bool((f.score(model, 1e4 * x) < 1e-6).all())


def test_a_network_without_a_layer_of_features_asks_for_one() -> None:
    with pytest.raises(BayesifyError, match=r"name one with layers="):
        by.Familiarity.fit(nn.Embedding(5, 3), torch.zeros(4, 2).long())
