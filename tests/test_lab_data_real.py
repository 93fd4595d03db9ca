"""The real data sets, where BAYESIFY_DATA names the folder that has them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bayesify.lab.data import Images, load

ROOT = Path(os.environ.get("BAYESIFY_DATA", ""))
SIZES = {
    "fashion-mnist": ("fashion-mnist", 60_000, 10_000, (1, 28, 28), 10),
    "mnist": ("mnist", None, 10_000, (1, 28, 28), 10),
    "kmnist": ("kmnist", None, 10_000, (1, 28, 28), 10),
    "notmnist": ("notmnist", None, None, (1, 28, 28), 10),
    "cifar10": ("cifar-10-batches-py", 50_000, 10_000, (3, 32, 32), 10),
    "cifar100": ("cifar-100-python", None, 10_000, (3, 32, 32), 100),
}
"""Folder, training and test images (None: some copies have none, or others), shape, classes."""
UCI = {
    "bostonHousing": (506, 13),
    "concrete": (1030, 8),
    "energy": (768, 8),
    "yacht": (308, 6),
    "power-plant": (9568, 4),
}


def need(folder: str) -> Path:
    if not os.environ.get("BAYESIFY_DATA") or not (ROOT / folder).is_dir():
        pytest.skip(f"no real data: BAYESIFY_DATA names no folder with {folder}")
    return ROOT / folder


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    folder, train, test, shape, classes = SIZES[name]
    need(folder)
    data = load(name, validation=0)
    assert data.inputs.shape == shape and data.targets.count == classes
    assert train is None or len(data.train) == train
    assert test is None or len(data.test) == test


def test_the_pixels_of_cifar10_are_those_that_everyone_has() -> None:
    need("cifar-10-batches-py")
    data = load("cifar10", validation=0)
    assert isinstance(data.inputs, Images)
    assert np.allclose(data.inputs.mean, [0.4914, 0.4822, 0.4465], atol=1e-4)
    assert np.allclose(data.inputs.std, [0.2470, 0.2435, 0.2616], atol=1e-4)


@pytest.mark.parametrize("name", UCI)
def test_every_uci_split_is_a_partition(name: str) -> None:
    path = need(f"uci/{name}")
    rows, columns = UCI[name]
    for split in (0, 19):
        data = load("uci", path=path, split=split)
        assert len(data.train) + len(data.validation) + len(data.test) == rows and data.inputs.shape == (columns,)


def test_the_deaths_of_physionet2012() -> None:
    data = load("physionet2012", path=need("physionet2012"))
    splits = (data.train, data.validation, data.test)
    assert [(len(split), int(split.targets.sum())) for split in splits] == [(4000, 554), (4000, 568), (4000, 585)]
    assert data.inputs.shape == (48, 2 * (37 + 5))
