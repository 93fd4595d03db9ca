"""The uncertainty regulariser in recipes: noisy images, given data, both; presets; what is refused."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bayesify as by
from bayesify.lab.data import Data, load
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.training import BayesianModule, train
from bayesify.lab.training.ood_inputs import ood_inputs_of
from bayesify.training.ood import ALPHA, DRAWS, GAMMA, PAPER

DIGITS = {"name": "digits", "limit": 120, "batch_size": 32}


def recipe_with(regulariser: dict[str, Any], **parts: Any) -> Recipe:
    model = {"name": "cnn", "options": {"channels": [8, 8]}}
    return Recipe.of({"data": DIGITS, "model": model, "training": {"epochs": 1, "regulariser": regulariser}, **parts})


@pytest.fixture(scope="module")
def digits() -> Data:
    return load("digits", limit=120)


@pytest.fixture
def white(tmp_path: Path) -> dict[str, Any]:
    """A data set of images of one colour: white; larger than digits, and in colour."""
    file = tmp_path / "white.npz"
    np.savez(file, x=np.full((20, 3, 16, 16), 255, np.uint8), y=np.arange(20) % 2)
    return {"name": "npz", "path": str(file)}


def inputs_of(regulariser: dict[str, Any], digits: Data, **parts: Any) -> tuple[Tensor, Tensor]:
    """A raw batch, and out-of-distribution inputs for it, from 0 to 1."""
    make = ood_inputs_of(recipe_with(regulariser, **parts), digits)
    assert make is not None
    raw = digits.train.raw(torch.arange(40))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (digits.inputs.mean, digits.inputs.std))
    return digits.inputs.unit(raw), make(raw) * std + mean


def is_white(x: Tensor) -> Tensor:
    return (x > 1 - 1e-5).flatten(1).all(1)


# Inputs.


def test_noisy_images_are_within_epsilon_and_from_0_to_1(digits: Data) -> None:
    x, noisy = inputs_of({"epsilon": 0.2, "share": 0.5}, digits)
    assert len(noisy) == 20 and noisy.min() > -1e-5 and noisy.max() < 1 + 1e-5
    change = noisy - x[:20]
    assert 0.19 < change.abs().max() <= 0.2 + 1e-5 and abs(change[x[:20].sub(0.5).abs() < 0.3].mean()) < 0.02


@pytest.mark.parametrize(("share", "rows"), [(1.0, 40), (0.25, 10), (0.001, 1)])
def test_share_is_that_of_the_rows_of_a_batch(share: float, rows: int, digits: Data, white: dict[str, Any]) -> None:
    for given in ({}, {"data": white}, {"data": white, "noise": 0.5}):
        assert len(inputs_of({"share": share, **given}, digits)[1]) == rows


def test_given_images_are_resized_and_made_grey(digits: Data, white: dict[str, Any]) -> None:
    _, found = inputs_of({"data": white}, digits)
    assert found.shape[1:] == (1, 8, 8) and is_white(found).all()


@pytest.mark.parametrize("noise", [0.5, 0.3])
def test_noise_is_the_share_of_noisy_images(noise: float, digits: Data, white: dict[str, Any]) -> None:
    torch.manual_seed(0)
    make = ood_inputs_of(recipe_with({"data": white, "noise": noise, "share": 0.2}), digits)
    assert make is not None
    raw = digits.train.raw(torch.arange(16))  # 3 inputs, of which 0.9 or 1.5 are noisy
    noisy = [int((~is_white(make(raw) * digits.inputs.std[0] + digits.inputs.mean[0])).sum()) for _ in range(2000)]
    assert abs(sum(noisy) / 2000 - 3 * noise) < 5 * 0.5 / 2000**0.5 and len(set(noisy)) == 2


def test_given_images_are_augmented_at_random(digits: Data, tmp_path: Path) -> None:
    dot = np.zeros((1, 1, 8, 8), np.uint8)
    dot[..., 4, 4] = 255
    np.savez(tmp_path / "dot.npz", x=dot.repeat(20, 0), y=np.arange(20) % 2)
    data = {"name": "npz", "path": str(tmp_path / "dot.npz"), "augment": [{"blur": {"sigma": [0.5, 3.0]}}]}
    torch.manual_seed(0)
    _, found = inputs_of({"data": data, "noise": 0, "share": 1.0}, digits)
    peaks = found[:, 0, 4, 4]
    is_sharp = peaks > 0.999
    assert 8 < int(is_sharp.sum()) < 32 and len(set(peaks[~is_sharp].round(decimals=3).tolist())) > 5
    assert torch.allclose(found.sum((1, 2, 3)), torch.ones(40), atol=1e-4)  # a blur keeps the mean, at the border too


# Recipes.


def test_the_defaults_are_those_of_the_loss_and_the_paper_has_a_name() -> None:
    usual = recipe_with({}).training.regulariser
    assert usual is not None and (usual.gamma, usual.alpha, usual.draws) == (GAMMA, ALPHA, DRAWS)
    paper = recipe_with({"preset": "paper", "draws": 5}).training.regulariser
    assert paper is not None and (paper.gamma, paper.alpha, paper.draws, paper.epsilon) == (0.75, 3.0, 5, 0.031)
    assert usual.share_of_noise == paper.share_of_noise == 1
    shares = [recipe_with({"data": {}, **given}).training.regulariser for given in ({}, {"preset": "paper"})]
    assert [each and each.share_of_noise for each in shares] == [0, 0.5]
    assert PAPER == {"gamma": 0.75, "alpha": 3.0, "draws": 2}


def test_a_preset_is_kept_in_the_file(tmp_path: Path) -> None:
    recipe = recipe_with({"preset": "paper", "alpha": 1.5})
    recipe.write(tmp_path / "recipe.yaml")
    assert Recipe.read(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize(
    ("regulariser", "message"),
    [
        ({"noise": 0.5}, "training.regulariser: noise=0.5 needs data"),
        ({"noise": 1, "data": {"name": "digits"}}, "noise=1 leaves nothing to data"),
        ({"preset": "papers"}, "training.regulariser.preset: must be 'default' or 'paper'"),
        ({"draws": 1}, "training.regulariser.draws: must be greater than or equal to 2"),
        ({"share": 0}, "training.regulariser.share: must be greater than 0"),
        ({"shar": 1}, "training.regulariser.shar: no such key; did you mean 'share'"),
    ],
)
def test_what_a_recipe_cannot_say_is_told(regulariser: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_with(regulariser)


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "table.csv"
    file.write_text("a,b,y\n" + "\n".join(f"{i},{i * i % 7},{'yes' if i % 2 else 'no'}" for i in range(60)))
    return {"name": "table", "path": str(file), "options": {"target": "y"}}


def test_images_and_tables_do_not_mix(digits: Data, white: dict[str, Any], table: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"data='table' has columns; expected images"):
        inputs_of({"data": table}, digits)
    rows = load("table", path=table["path"], target="y")
    for regulariser, message in (
        ({"data": white}, "data='npz' has images; expected columns"),
        ({}, "adds noise to images; for other inputs set"),
        ({"data": table, "noise": 0.5}, r"noise=0.5: noise is added to images only; set it to 0"),
        ({"data": {**table, "augment": ["flip"]}}, "no images to augment"),
    ):
        with pytest.raises(RecipeError, match=message):
            ood_inputs_of(recipe_with(regulariser), rows)
    make = ood_inputs_of(recipe_with({"data": table, "share": 1.0}), rows)
    assert make is not None and make(rows.train.raw(torch.arange(9))).shape[0] == 9


def idx_files(folder: Path) -> dict[str, Any]:
    """A data set in MNIST's format without training rows."""
    for name, x in (
        ("images-idx3", np.zeros((20, 28, 28), np.uint8)),
        ("labels-idx1", np.arange(20, dtype=np.uint8) % 10),
    ):
        header = bytes([0, 0, 8, x.ndim]) + b"".join(size.to_bytes(4, "big") for size in x.shape)
        (folder / f"t10k-{name}-ubyte").write_bytes(header + x.tobytes())
    return {"name": "mnist", "path": str(folder)}


def test_rows_that_training_sees_are_not_evaluated_on(digits: Data, tmp_path: Path) -> None:
    part = {"name": "digits", "options": {}}
    inputs_of({"data": part}, digits, evaluation={"ood": ["digits"]})  # which has training rows
    only = idx_files(tmp_path)
    inputs_of({"data": only}, digits, evaluation={"ood": [{"name": "digits"}]})
    with pytest.raises(RecipeError, match=r"data='mnist' has test rows only.*leave it out of one of them"):
        inputs_of({"data": only}, digits, evaluation={"ood": [only]})


# Training.


def test_it_raises_the_uncertainty_of_what_it_sees(white: dict[str, Any], tmp_path: Path) -> None:
    options = {"epochs": 8, "optimizer": "adam", "lr": 0.003, "schedule": "constant"}
    regulariser = {"alpha": 3.0, "gamma": 1.2, "draws": 8, "noise": 0, "data": {**white, "augment": ["blur", "jpeg"]}}
    run = train(recipe_with({}, training={**options, "regulariser": regulariser}), tmp_path / "run", progress=False)
    with run.log_file.open() as file:
        losses = [float(row["regulariser"]) for row in csv.DictReader(file) if row["regulariser"]]
    assert 0 < losses[0] <= 3 * 1.2 and losses[-1] < 0.5 * losses[0]
    assert run.load().predict(torch.full((20, 1, 8, 8), 255).byte()).epistemic.mean() > 0.8


def test_the_paper_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="gamma=0.75 is out of reach: the mutual information of 2 draws"):
        train(recipe_with({"preset": "paper"}), tmp_path / "paper", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by.uncertainty_loss(by.convert(torch.nn.Linear(2, 2), by.Rank1(2)), torch.randn(3, 2))


def test_the_former_name_of_ood_inputs_still_works_and_is_deprecated() -> None:
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.warns(DeprecationWarning, match=r"strange=….*ood_inputs=…"):
        module = BayesianModule(by.convert(torch.nn.Linear(4, 3), by.Rank1(2)), n=9, strange=noise)
    assert module.ood_inputs is noise
