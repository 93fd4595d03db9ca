"""Data sets: names, options, splits, what is learnt on the training split, examples, descriptions."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesify.errors import BayesifyError
from bayesify.lab import data as lab
from bayesify.lab.data import DATASETS, DataError, Images, Reals, TensorExamples, load
from bayesify.lab.data.examples import ChainedExamples, Examples, SomeExamples
from bayesify.lab.data.inputs import moments
from bayesify.lab.data.splits import divide, shares

# Names and options.


def test_all_is_what_there_is() -> None:
    assert all(hasattr(lab, name) for name in lab.__all__)
    assert len(set(lab.__all__)) == len(lab.__all__)


def test_data_errors_are_bayesify_errors() -> None:
    assert issubclass(DataError, BayesifyError)


@pytest.mark.parametrize("name", DATASETS)
def test_loaders_take_a_path_and_keyword_options(name: str) -> None:
    first, *options = inspect.signature(DATASETS[name]).parameters.values()
    assert first.name == "path" and first.default is None
    assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options)
    assert DATASETS[name].__doc__


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"name": "fashion_mnist"}, ["fashion_mnist", "fashion-mnist"]),
        ({"siez": 8}, ["siez=8", "'size'"]),
        ({"path": "x"}, ["path='x'", "scikit-learn"]),
        ({"validation": 1.5}, ["validation=1.5", "fraction"]),
        ({"validation": -1}, ["validation=-1"]),
        ({"validation": True}, ["validation=True"]),
        ({"validation": 10_000}, ["validation=10000", "1438"]),
        ({"validation": 1435}, ["3 training rows", "10 classes"]),
        ({"validation": "train:5"}, ["train:5", "test:N"]),
        ({"validation": "test:5000"}, ["test:5000", "359"]),
        ({"test": 1.0}, ["test=1.0"]),
        ({"limit": 0}, ["limit=0"]),
        ({"seed": "a"}, ["seed='a'", "integer"]),
        ({"limit": 9}, ["limit", "9 training rows", "10 classes"]),
        ({"mean": [0.1, 0.2]}, ["mean=[0.1, 0.2]", "1 channels"]),
        ({"std": [0.0]}, ["std=[0.0]", "> 0"]),
        ({"mean": "imagenet"}, ["mean='imagenet'", "list of numbers"]),
        ({"size": 0}, ["size=0"]),
    ],
)
def test_wrong_options_are_named(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        load(**arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_known_set_that_is_nowhere_says_where_it_is_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    with pytest.raises(DataError, match=rf"no folder mnist in {tmp_path}.*BAYESIFY_DATA.*path="):
        load("mnist")
    monkeypatch.delenv("BAYESIFY_DATA")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"cifar-10-batches-py in .*data or .*shared"):
        load("cifar10")


# Splits.


def test_digits_are_the_default_and_every_row_is_in_one_split() -> None:
    data = load(validation=0.2, test=100)
    assert (len(data.train), len(data.validation), len(data.test)) == (1358, 339, 100)
    assert data.inputs.shape == (1, 8, 8) and data.targets.count == 10
    rows = torch.cat([part.raw(torch.arange(len(part))) for part in (data.train, data.validation, data.test)])
    whole = load(validation=0, test=0).train
    assert torch.equal(rows.flatten(1).long().sort(0)[0], whole.raw(torch.arange(1797)).flatten(1).long().sort(0)[0])


@pytest.mark.parametrize("targets", [torch.arange(300) % 7, torch.rand(300, 1)])
def test_divide_is_a_partition_that_depends_on_seed_and_purpose(targets: torch.Tensor) -> None:
    stay, go = divide(targets, 60, seed=3, option="validation")
    assert len(go) == 60 and torch.equal(torch.cat([stay, go]).sort()[0], torch.arange(300))
    assert torch.equal(go, divide(targets, 60, seed=3, option="validation")[1])
    assert not torch.equal(go, divide(targets, 60, seed=4, option="validation")[1])
    assert not torch.equal(go, divide(targets, 60, seed=3, option="test")[1])


def test_classes_go_in_proportion() -> None:
    targets = torch.repeat_interleave(torch.arange(3), torch.tensor([100, 50, 10]))
    _, go = divide(targets, 32, seed=0, option="test")
    assert torch.bincount(targets[go]).tolist() == [20, 10, 2]


def test_every_row_is_equally_likely_to_go() -> None:
    targets = torch.arange(20) % 2
    counts = torch.zeros(20)
    for seed in range(2000):
        counts[divide(targets, 4, seed, "validation")[1]] += 1
    assert counts.sub(400).abs().max() < 5 * (2000 * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize("count", range(0, 14))
def test_shares_add_up_and_leave_one_of_each(count: int) -> None:
    sizes = [9, 1, 0, 4, 3]
    found = shares(sizes, count, "validation")
    assert sum(found) == count
    assert all(share == 0 if size == 0 else 0 <= share < size for share, size in zip(found, sizes, strict=True))


def test_the_test_split_does_not_depend_on_the_validation_split() -> None:
    a, b = load(validation=0.3).test, load(validation=0, limit=50).test
    assert torch.equal(a.raw(torch.arange(len(a))), b.raw(torch.arange(len(b))))


def test_no_real_target_may_be_left_for_training(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 2)), y=np.arange(5.0))
    with pytest.raises(DataError, match="none of the 5 rows"):
        load("npz", path=tmp_path / "d.npz", test=5)


def test_validation_from_the_first_test_rows() -> None:
    test = load().test
    data = load(validation="test:100")
    assert (len(data.train), len(data.validation), len(data.test)) == (1438, 100, 259)
    joined = torch.cat([data.validation.targets, data.test.targets])
    assert torch.equal(joined, test.targets)


def test_limit_keeps_every_class_and_nothing_is_learnt_from_the_rest() -> None:
    data = load(limit=20)
    assert torch.bincount(data.train.targets).min() >= 1 and len(data.train) == 20
    pixels = data.train.raw(torch.arange(20)).double() / 255
    assert isinstance(data.inputs, Images)
    assert data.inputs.mean[0] == pytest.approx(pixels.mean().item())
    assert data.inputs.std[0] == pytest.approx(pixels.std(correction=0).item())
    assert len(load(limit=10**6).train) == 1294


# Inputs.


def test_the_training_split_is_normalised() -> None:
    data = load()
    x = data.inputs.prepare(data.train.raw(torch.arange(len(data.train))))
    assert x.dtype == torch.float32
    assert x.mean().abs() < 1e-5 and (x.std(correction=0) - 1).abs() < 1e-5


def test_prepare_is_normalise_of_unit_for_bytes_and_floats() -> None:
    images = Images((3, 4, 4), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0))
    raw = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    expected = (raw.float() / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([1.0, 2, 3]).view(
        3, 1, 1
    )
    assert torch.allclose(images.prepare(raw), expected)
    assert torch.allclose(images.prepare(raw.float() / 255), expected)
    assert torch.allclose(images.normalise(images.unit(raw)), expected)


def test_given_mean_and_std_are_used() -> None:
    data = load(mean=[0.5], std=[0.25])
    assert isinstance(data.inputs, Images) and (data.inputs.mean, data.inputs.std) == ((0.5,), (0.25,))


def test_moments_in_blocks_are_those_of_all_rows() -> None:
    x = torch.randn(1000, 3, dtype=torch.float64) * 0.01 + 1e6
    mean, std = moments(x.split(7))
    assert torch.allclose(torch.tensor(mean).double(), x.mean(0))
    assert np.allclose(std, x.std(0, correction=0).numpy(), rtol=1e-6)
    assert moments([torch.full((9, 1), 0.1)])[1] == (1.0,)


def test_descriptions_survive_json() -> None:
    data = load()
    assert lab.inputs_from_dict(json.loads(json.dumps(data.inputs.to_dict()))) == data.inputs
    assert lab.targets_from_dict(json.loads(json.dumps(data.targets.to_dict()))) == data.targets


@pytest.mark.parametrize(
    "description, words", [({"kind": "image"}, "'images'"), ({}, "None"), ({"kind": "arrays", "shape": [1]}, "mean")]
)
def test_wrong_descriptions_are_refused(description: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        lab.inputs_from_dict(description)


def test_reals_are_standardised_and_restored() -> None:
    reals = lab.Reals(("a", "b"), mean=(1e6, 0.0), std=(2.0, 10.0))
    y = torch.tensor([[1e6 + 1, 5.0]], dtype=torch.float64)
    assert torch.allclose(reals.standardise(y), torch.tensor([[0.5, 0.5]]))
    mean, std = reals.restore(reals.standardise(y), torch.ones(1, 2))
    assert torch.allclose(mean.double(), y) and std.tolist() == [[2.0, 10.0]]


# Examples.


def parts() -> tuple[Examples, Examples]:
    a = TensorExamples(torch.arange(8).view(4, 2), torch.arange(4))
    b = TensorExamples(torch.arange(100, 106).view(3, 2), torch.arange(3))
    return a, b


@pytest.mark.parametrize("kind", ["tensor", "chained", "some"])
def test_examples_agree_with_their_rows(kind: str) -> None:
    a, b = parts()
    chained = ChainedExamples([a, b])
    examples = {"tensor": a, "chained": chained, "some": SomeExamples(chained, torch.tensor([5, 0, 4, 2]))}[kind]
    rows = torch.tensor([3, 0, 2, 2])
    x, y = examples.__getitems__(rows.tolist())
    for i, row in enumerate(rows.tolist()):
        assert torch.equal(x[i], examples[row][0]) and y[i] == examples[row][1]
    taken = examples.take(rows)
    assert torch.equal(taken.raw(torch.arange(4)), x) and torch.equal(taken.targets, y)
    other = examples.with_targets(torch.arange(len(examples)) + 50)
    assert torch.equal(other.raw(rows), x) and torch.equal(other.targets, torch.arange(len(examples)) + 50)
    assert len(list(examples)) == len(examples)
    assert len(pickle.loads(pickle.dumps(examples))) == len(examples)


def test_chained_rows_come_in_the_order_asked_for() -> None:
    chained = ChainedExamples(parts())
    assert chained.raw(torch.tensor([6, 0, 4, 3]))[:, 0].tolist() == [104, 0, 100, 6]


def test_loader_gives_whole_batches_also_from_workers() -> None:
    data = load(limit=50)
    for workers in (0, 1):
        batches = list(lab.loader(data.train, batch_size=20, num_workers=workers))
        assert [tuple(x.shape) for x, _ in batches] == [(20, 1, 8, 8), (20, 1, 8, 8), (10, 1, 8, 8)]
        assert torch.equal(torch.cat([y for _, y in batches]), data.train.targets)


def test_unequal_inputs_and_targets_are_refused() -> None:
    with pytest.raises(DataError, match="3 inputs and 2 targets"):
        TensorExamples(torch.zeros(3, 1), torch.zeros(2))


def test_optional_packages_are_imported_when_they_are_needed() -> None:
    optional = ["PIL", "pyarrow", "datasets", "sklearn", "pandas"]
    code = f"import bayesify.lab.data, sys; print([name for name in {optional} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_cubic_curve_is_x_cubed_with_the_noise_that_is_asked_for() -> None:
    data = load("cubic", validation=0, points=20, noise=2.0)
    assert len(data.train) == 20 and len(data.test) == 1000
    assert isinstance(data.targets, Reals)
    x, y = data.test.raw(torch.arange(1000)), data.test.targets
    assert x.min() == -4 and x.max() == 4
    residuals = data.targets.std[0] * y + data.targets.mean[0] - x**3
    assert abs(float(residuals.mean())) < 0.2 and 1.9 < float(residuals.std()) < 2.1  # 3 and 2 standard errors
    again, other = load("cubic", validation=0, points=20, noise=2.0), load("cubic", validation=0, curve_seed=1)
    assert torch.equal(again.train.raw(torch.arange(20)), data.train.raw(torch.arange(20)))
    assert not torch.equal(other.train.raw(torch.arange(20)), data.train.raw(torch.arange(20)))
    with pytest.raises(DataError, match="points=1"):
        load("cubic", points=1)
    with pytest.raises(DataError, match="the curve is computed"):
        load("cubic", path="curve.csv")
