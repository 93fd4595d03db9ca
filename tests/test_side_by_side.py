"""Networks that are trained side by side are those that `train` trains one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.training import train
from bayesify.lab.training.side_by_side import train_side_by_side


@pytest.fixture
def curve(tmp_path: Path) -> dict[str, Any]:
    """The `data` part of a recipe for a curve with noise."""
    x = np.linspace(-2, 2, 60)[:, None]
    np.savez(tmp_path / "curve.npz", x=x, y=x**2 + np.random.default_rng(0).normal(size=x.shape))
    return {"name": "npz", "path": str(tmp_path / "curve.npz"), "batch_size": 16}


def recipe_of(data: dict[str, Any], seed: int, **changes: Any) -> Recipe:
    training = {"epochs": 3, "optimizer": "adam", "lr": 0.01, "posterior_lr": 0.03, "schedule": "cosine"}
    given = {"data": data, "model": {"name": "mlp", "options": {"hidden": 8}}, "seed": seed, **changes}
    return Recipe.of({**given, "training": {**training, **changes.get("training", {})}})


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "none"},
        {"method": "none", "model": {"name": "mlp", "options": {"hidden": 8, "norm": "batch"}}},
        {"method": {"name": "deep_ensemble", "members": 2}, "likelihood": {"precision": 2.0}},
        {"method": "none", "likelihood": {"precision": 0.1, "units": "target", "training_precision": 2}},
        {"method": {"name": "Ensemble", "components": 2}, "training": {"mixture": "replicate", "weight_decay": 0.01}},
        {"method": "none", "training": {"optimizer": "sgd", "clip": 0.1, "weight_decay": 0.01, "epochs": 2}},
    ],
)
def test_networks_without_noise_are_those_of_train(
    changes: dict[str, Any], curve: dict[str, Any], tmp_path: Path
) -> None:
    recipes = [recipe_of(curve, seed, **{"likelihood": {"calibrate": False}, **changes}) for seed in (3, 4)]
    for recipe, (trained, data) in zip(recipes, train_side_by_side(recipes), strict=True):
        run = train(recipe, tmp_path / str(recipe.seed), progress=False, evaluated=False)
        expected = run.load().predict(data.test)
        found = trained.predict(data.test)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.aleatoric_std, expected.aleatoric_std, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["Rank1", "IBNN", "MeanField", "ECMP", "EMP", "MCDropout", "LowRankEnsemble"])
def test_noise_differs_between_networks_and_repeats(method: str, curve: dict[str, Any]) -> None:
    options = {"norm": "batch"} if "EMP" in method.replace("ECMP", "EMP") else {}
    model = {"name": "mlp", "options": {"hidden": 8, **options}}
    seeds = (1, 1, 2)  # the first two have the same data, batches and initial values
    recipes = [recipe_of(curve, seed, method=method, model=model) for seed in seeds]
    first, same, other = (trained.model.state_dict() for trained, _ in train_side_by_side(recipes))
    again = train_side_by_side(recipes)[0][0].model.state_dict()
    weights = [name for name in first if name.endswith("weight")]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], same[name]) for name in weights), "both had the same noise"
    assert any(not torch.equal(first[name], other[name]) for name in weights)


def test_what_needs_a_run_of_its_own_is_refused(curve: dict[str, Any]) -> None:
    wrong = {"training": {"patience": 3, "accumulate": 2}}
    with pytest.raises(RecipeError, match=r"training\.patience, training\.accumulate: not possible side by side"):
        train_side_by_side([recipe_of(curve, 0, **wrong)])
    with pytest.raises(RecipeError, match="differ in model"):
        train_side_by_side([recipe_of(curve, 0), recipe_of(curve, 1, model={"name": "mlp"})])
    with pytest.raises(RecipeError, match=r"training sets of \[30, 43\] rows"):
        train_side_by_side([recipe_of(curve, 0), recipe_of({**curve, "limit": 30}, 1)])
