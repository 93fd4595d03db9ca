"""What a user gives to `by.predict` first, and what they look at in what comes back."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import bayesify as by
from bayesify.prediction.results import Regression

X = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.Rank1(2))


class Pairs(Dataset[tuple[np.ndarray, int]]):
    """A data set of one's own, with NumPy rows."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return X[i].numpy(), i


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> object:  # type: ignore[override]
        return iter(X)


def test_predict_takes_arrays_lists_frames_and_data_sets(model: nn.Module) -> None:
    pandas = pytest.importorskip("pandas")
    expected = by.predict(model, X, samples=4).probs
    read_only = X.numpy().astype(np.float64)[::-1]
    read_only.flags.writeable = False
    for data in (
        X.numpy(),
        X.numpy().astype(np.float64),
        read_only[::-1],
        X.tolist(),
        pandas.DataFrame(X.numpy()),
        (X.numpy(), np.zeros(10)),
        TensorDataset(X, torch.zeros(10)),
        Pairs(),
        Stream(),
        [X[:3].numpy(), X[3:].numpy()],  # a list of arrays is one of batches, as it is of tensors
        (part.numpy() for part in X.split(4)),
    ):
        assert torch.allclose(by.predict(model, data, samples=4).probs, expected, atol=1e-5), type(data)
    backwards = by.predict(model, read_only, samples=4).probs
    assert torch.allclose(backwards, expected.flip(0), atol=1e-5)  # negative strides


def test_a_data_set_comes_in_batches_of_batch_size(model: nn.Module) -> None:
    sizes: list[int] = []

    def call(network: nn.Module, batch: list[Tensor]) -> Tensor:
        sizes.append(len(batch[0]))
        return network(batch[0])  # type: ignore[no-any-return]

    by.predict(model, TensorDataset(X, torch.zeros(10)), samples=2, batch_size=4, call=call)
    assert set(sizes) == {4, 2}


def test_a_prediction_prints_in_one_line(model: nn.Module) -> None:
    assert repr(by.predict(model, X, samples=4)) == "Classification(10 rows, probs (10, 3), 4 draws)"
    real = by.predict(model, X, samples=4, likelihood=by.Gaussian())
    assert repr(real) == "Regression(10 rows, mean (10, 3), 4 draws)"
    yes_or_no = by.predict(model, X, samples=4, likelihood=by.Bernoulli())
    assert repr(yes_or_no) == "BinaryPrediction(10 rows, probs (10, 3), 4 draws)"


@pytest.mark.parametrize(
    "likelihood", [by.Categorical(), by.Bernoulli(), by.Gaussian()], ids=lambda x: type(x).__name__
)
def test_a_prediction_has_a_length_and_an_index(model: nn.Module, likelihood: by.Likelihood) -> None:
    p = by.predict(model, X, samples=4, likelihood=likelihood)
    value = "mean" if isinstance(p, Regression) else "probs"
    all_rows = getattr(p, value)
    mask = torch.arange(10) % 3 == 0
    for index in (2, -1, slice(2, 5), [7, 1], np.array([7, 1]), mask, mask.numpy(), torch.tensor([3])):
        rows = np.atleast_1d(np.arange(10)[index.numpy() if isinstance(index, Tensor) else index])
        some = p[index]
        assert type(some) is type(p) and len(some) == len(rows)
        assert torch.equal(getattr(some, value), all_rows[rows.tolist()])
        if p.draws is not None:
            assert some.draws.shape[1] == len(rows)
    assert len(list(p)) == 10
    with pytest.raises(IndexError):
        p[10]


def test_a_prediction_is_a_dict_and_a_data_frame(model: nn.Module) -> None:
    pytest.importorskip("pandas")
    familiarity = by.Familiarity.fit(model, (X.repeat(3, 1), torch.arange(30) % 3))
    p = by.predict(model, X, samples=4, familiarity=familiarity)
    found = json.loads(json.dumps(p.to_dict()))
    assert found["label"] == p.label.tolist() and found["probs"][3] == pytest.approx(p.probs[3].tolist())
    table = p.to_dataframe()
    assert list(table.columns[:6]) == ["label", "confidence", "entropy", "aleatoric", "epistemic", "probs_0"]
    assert "familiarity" in table and len(table) == 10
    assert table["probs_2"].tolist() == p.probs[:, 2].tolist()
    pixels = by.Categorical().predictive(torch.zeros(2, 5, 4, 3))  # of a segmentation: rows, pixels, classes
    with pytest.raises(by.BayesifyError, match="more than two dimensions"):
        pixels.to_dataframe()


@pytest.mark.parametrize(
    "likelihood", [by.Categorical(), by.Bernoulli(), by.Gaussian()], ids=lambda x: type(x).__name__
)
def test_a_prediction_is_saved_whole_or_not_at_all(
    model: nn.Module, likelihood: by.Likelihood, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = by.predict(model, X, samples=4, likelihood=likelihood)
    p.save(tmp_path / "p.safetensors")
    again = by.Prediction.load(tmp_path / "p.safetensors")
    assert type(again) is type(p)
    for field in fields(p):
        before, after = getattr(p, field.name), getattr(again, field.name)
        assert before.equal(after) if isinstance(before, Tensor) else before == after, field.name
    content = (tmp_path / "p.safetensors").read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        p[:2].save(tmp_path / "p.safetensors")
    assert (tmp_path / "p.safetensors").read_bytes() == content and len(list(tmp_path.iterdir())) == 1


def test_files_that_are_no_predictions_are_refused(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    p = by.predict(model, X, samples=4)
    p.save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(by.CheckpointError, match=r"not a file of Prediction\.save, or damaged"):
        by.Prediction.load(path)
    for header in ({}, {"bayesify_prediction": '{"kind": "Regression", "samples": 3}'}, {"bayesify_prediction": "[]"}):
        save_file({"log_probs": p.log_probs.clone()}, path, header)
        with pytest.raises(by.CheckpointError, match=r"not a file of Prediction\.save, or damaged"):
            by.Prediction.load(path)
    with pytest.raises(by.CheckpointError, match="nowhere"):
        by.Prediction.load(tmp_path / "nowhere.safetensors")


def test_a_segmentation_has_a_length_and_rows(model: nn.Module) -> None:
    p = by.Categorical().predictive(torch.randn(2, 5, 4, 3))
    assert len(p) == 5 and p[1:3].probs.shape == (2, 4, 3)
