"""Series with gaps: what the network sees of them, their files, and what can be wrong with those."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import bayesify as by
from bayesify import lab
from bayesify.lab.data import Data, DataError, Series, inputs_from_dict, load
from bayesify.lab.evaluation.ood_sets import noise
from bayesify.lab.models import build
from bayesify.lab.models.bin_embedding import BinEmbedding

STEPS, VARIABLES, STATIC = 6, 3, 2


def stays(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Series that are mostly gaps, with wild values among them, and static variables with a gap."""
    rng = np.random.default_rng(seed)
    x = rng.normal([50, 7.4, 100], [10, 0.1, 30], (rows, STEPS, VARIABLES)).astype(np.float32)
    x[rng.random(x.shape) < 0.6] = np.nan
    static = rng.normal(60, 15, (rows, STATIC)).astype(np.float32)
    static[0, 1] = np.nan
    return {"x": x, "static": static, "y": np.arange(rows) % 2}


def saved(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def challenge(folder: Path, rows: int = 40) -> Path:
    """A stand-in for the challenge's three sets."""
    folder.mkdir()
    sets = {name: stays(rows, seed) for seed, name in enumerate("abc")}
    arrays = {f"{name}_{key}": value for name, some in sets.items() for key, value in some.items()}
    names = np.array(["HR", "pH", "Glucose"])
    saved(folder / "hourly48.npz", **arrays, dyn_names=names)
    return folder


def seen(data: Data, split: str = "train") -> torch.Tensor:
    rows = getattr(data, split)
    x: torch.Tensor = data.inputs.prepare(rows.raw(torch.arange(len(rows))))
    return x


def test_the_network_sees_what_pandas_makes_of_the_series(tmp_path: Path) -> None:
    arrays = stays(200)
    data = load("series", path=saved(tmp_path / "d.npz", **arrays), test=0, validation=0)
    assert str(data) == f"series: 200 train, 0 validation, 0 test; series ({STEPS}, 10), 2 classes"
    every = np.full((200, STEPS, VARIABLES + STATIC), np.nan)
    every[..., :VARIABLES] = arrays["x"]
    every[:, 0, VARIABLES:] = arrays["static"]
    flat = pd.DataFrame(every.reshape(-1, VARIABLES + STATIC))
    low, high = flat.quantile(0.01), flat.quantile(0.99)
    bounded = flat.clip(low, high, axis=1)
    filled = bounded.groupby(np.repeat(np.arange(200), STEPS)).ffill()
    values = ((filled - bounded.mean()) / bounded.std(ddof=0)).fillna(0)
    expected = np.concatenate([values, flat.notna()], 1).reshape(200, STEPS, -1)
    np.testing.assert_allclose(seen(data).numpy(), expected, atol=2e-4)


def test_a_variable_that_training_never_measured_is_nothing(tmp_path: Path) -> None:
    train, test = stays(20), stays(10, seed=1)
    train["x"][..., 1] = np.nan
    arrays = {
        f"{key}_{split}": value for split, some in (("train", train), ("test", test)) for key, value in some.items()
    }
    data = load("series", path=saved(tmp_path / "d.npz", **arrays), validation=0)
    assert (seen(data, "test")[..., 1] == 0).all() and seen(data, "test")[..., 1 + VARIABLES + STATIC].any()
    assert data.inputs == load("series", path=tmp_path / "d.npz", validation=0).inputs


def test_the_sets_of_the_challenge_are_its_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = challenge(tmp_path / "physionet2012")
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    data = load("physionet2012")
    assert str(data) == "physionet2012: 40 train, 40 validation, 40 test; series (6, 10), 2 classes"
    assert data.targets.names == ("survived", "died")
    for split, seed in (("train", 0), ("validation", 1), ("test", 2)):
        raw = getattr(data, split).raw(torch.arange(40)).numpy()
        np.testing.assert_array_equal(raw[..., :VARIABLES], stays(40, seed)["x"])
        np.testing.assert_array_equal(raw[:, 0, VARIABLES:], stays(40, seed)["static"])
    assert load("physionet2012", path=folder / "hourly48.npz").inputs == data.inputs
    with pytest.raises(DataError, match="own validation split"):
        load("physionet2012", validation=10)


def test_new_series_are_read_as_the_training_data_were(tmp_path: Path) -> None:
    data = load("series", path=saved(tmp_path / "d.npz", **stays(50)), test=0, validation=0)
    inputs = inputs_from_dict(json.loads(json.dumps(data.inputs.to_dict())))
    assert inputs == data.inputs
    new = stays(50)
    examples, names = inputs.read([saved(tmp_path / "new.npz", x=new["x"][:3], static=new["static"][:3])])
    assert names == ["new.npz:0", "new.npz:1", "new.npz:2"]
    assert torch.equal(inputs.prepare(examples.raw(torch.arange(3))), seen(data)[:3])
    with pytest.raises(DataError, match="exactly one of static for the static variables"):
        inputs.read([saved(tmp_path / "bare.npz", x=new["x"])])
    with pytest.raises(DataError, match=r"shape \(5, 5\); expected \(6, 5\).*last 2 are static"):
        inputs.read([saved(tmp_path / "short.npz", x=new["x"][:, 1:], static=new["static"])])
    (tmp_path / "new.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"expected an \.npz or \.npy file"):
        inputs.read([tmp_path / "new.csv"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": np.zeros((20, 6))}, r"shape \(20, 6\); expected numbers \(N, time, variables\)"),
        ({"x": np.full((20, 6, 3), np.inf)}, "infinity, first in row 0; use NaN for missing values"),
        ({"static": np.zeros(20)}, r"static variables .*expected numbers \(N, variables\)"),
        ({"static": np.zeros((19, 2))}, "20 series and 19 rows of static"),
        ({"y": np.zeros(19, int)}, "20 inputs and 19 targets"),
    ],
)
def test_what_is_wrong_with_series_is_said(tmp_path: Path, change: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(DataError, match=words):
        load("series", path=saved(tmp_path / "d.npz", **{**stays(20), **change}))


def test_what_the_challenge_lacks_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected also a_x, a_static, a_y, b_x"):
        load("physionet2012", path=saved(tmp_path / "hourly48.npz", **stays(20)))


def test_noise_for_series_has_no_gaps_and_is_wider_than_the_data() -> None:
    series = Series(4, low=(-1e3,) * 2, high=(1e3,) * 2, mean=(5.0, 0.0), std=(2.0, 1.0))
    x = series.prepare(noise(series, 500).raw(torch.arange(500)))
    assert x.shape == (500, 4, 4) and (x[..., 2:] == 1).all()
    assert float(x[..., :2].std()) == pytest.approx(3, rel=0.1)


# Bins.


def test_words_follow_their_definition() -> None:
    layer = BinEmbedding(4, bins=4, size=2)
    nothing, low, high = 0.0, -2.0, 0.5
    values = torch.tensor([[nothing, nothing], [low, nothing], [low, high], [high, high]])
    measured = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    words = layer.indices(torch.cat([values, measured], 1)[None])[0]
    # Quarters of a standard Normal end at -0.674, 0, 0.674; 9 words for each variable.
    assert words.tolist() == [[0, 9], [1, 9], [1 + 4, 9 + 3], [3, 9 + 3 + 4]]


def test_bins_are_equally_full_for_normal_values() -> None:
    layer = BinEmbedding(2, bins=5, size=2)
    x = torch.cat([torch.randn(20_000, 1, 1, generator=torch.Generator().manual_seed(0)), torch.ones(20_000, 1, 1)], -1)
    assert torch.bincount(layer.indices(x).flatten())[1:] / 20_000 == pytest.approx(0.2, abs=0.015)


def test_the_sum_of_embeddings_is_a_linear_layer_of_one_hot_words() -> None:
    layer, x = BinEmbedding(6, bins=3, size=5), torch.randn(4, 7, 6)
    one_hot = torch.nn.functional.one_hot(layer.indices(x), 3 * 7).sum(-2).float()
    assert torch.allclose(layer(x), one_hot @ layer.embedding.weight, atol=1e-6)


def test_an_odd_number_of_features_has_no_marks() -> None:
    with pytest.raises(by.BayesifyError, match="got 5 features"):
        build("lstm", shape=(6, 5), outputs=2, bins=4)


# A whole run.


@pytest.mark.parametrize(
    "method",
    [
        {
            "name": "mixed",
            "layers": {"*embedding": {"name": "MeanField", "estimator": "flipout"}, "*": {"name": "Rank1"}},
        },
        {"name": "deep_ensemble", "members": 2},
    ],
    ids=lambda method: str(method["name"]),
)
def test_a_recipe_of_series_trains_reports_and_predicts(tmp_path: Path, method: dict[str, object]) -> None:
    recipe = {
        "data": {"name": "physionet2012", "path": str(challenge(tmp_path / "sets"))},
        "model": {"name": "lstm", "options": {"hidden": 4, "bins": 3, "embedding": 2}},
        "method": method,
        "training": {"epochs": 1, "optimizer": "adam", "lr": 1e-3},
        "evaluation": {"samples": 3},
    }
    run = lab.train(lab.Recipe.of(recipe), tmp_path / "run", progress=False)
    assert {"nll", "average_precision", "ece"} <= set(run.metrics["test"])
    again = inputs_from_dict(run.load().inputs.to_dict())
    new = stays(5)
    examples, _ = again.read([saved(tmp_path / "new.npz", x=new["x"], static=new["static"])])
    assert lab.predictive(run.load(), examples).probs.shape == (5, 2)
