"""The estimators of scikit-learn: its own checks, and predictions against distributions that are known."""

from __future__ import annotations

import math
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import has_fit_parameter
from torch import nn

import bayesify as by
from bayesify.layers import bayesian_layers
from bayesify.sklearn import BayesifyClassifier, BayesifyRegressor

QUICK: dict[str, Any] = {"epochs": 8, "lr": 0.05, "hidden": (16,), "batch_size": 128, "random_state": 0}
CHECKED: dict[str, Any] = {"epochs": 10, "lr": 0.1, "hidden": (8,), "batch_size": 512}  # sixty times
TRAINED: dict[str, Any] = {"epochs": 60, "lr": 0.01, "hidden": (32,), "random_state": 0, "validation": 0.2}


def logistic(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels, and the probability of the label 1 that these were drawn with."""
    random = np.random.RandomState(rows)  # the same data in whatever order tests run
    x = random.normal(size=(rows, 2))
    probability = 1 / (1 + np.exp(-2 * x[:, 0] + x[:, 1]))
    return x, (random.uniform(size=rows) < probability).astype(int), probability


def wave(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets in large units, and their standard deviation, which grows with the input."""
    random = np.random.RandomState(rows)
    x = random.uniform(-2, 2, size=(rows, 1))
    std = 20 * np.exp(0.5 * x[:, 0])
    return x, 500 + 100 * np.sin(2 * x[:, 0]) + std * random.normal(size=rows), std


def gaussian_nll(y: np.ndarray, mean: Any, std: Any) -> float:
    return float(np.mean(0.5 * ((y - mean) / std) ** 2 + np.log(std) + 0.5 * math.log(2 * math.pi)))


@pytest.fixture(scope="module")
def classifier() -> BayesifyClassifier:
    x, y, _ = logistic(500)
    return BayesifyClassifier(**TRAINED).fit(x, np.array(["no", "yes"])[y])


@pytest.fixture(scope="module")
def regressor() -> BayesifyRegressor:
    x, y, _ = wave(500)
    return BayesifyRegressor(precision="input", **TRAINED | {"epochs": 120, "hidden": (32, 32)}).fit(x, y)


# scikit-learn's view.


@pytest.mark.parametrize("kind", [BayesifyClassifier, BayesifyRegressor])
def test_scikit_learns_own_checks_pass(kind: type) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # checks feed what warns, such as columns for targets
        found = check_estimator(kind(**CHECKED), on_skip=None)
    assert len(found) > 45
    assert {check["check_name"] for check in found if check["status"] != "passed"} <= {"check_array_api_input"}


def test_a_grid_over_a_pipeline_finds_the_options_that_learn() -> None:
    x, y = make_classification(120, 4, random_state=0)
    x[::10, 0] = np.nan
    pipeline = make_pipeline(SimpleImputer(), BayesifyClassifier(**QUICK))
    grid = {"bayesifyclassifier__epochs": np.array([1, 10]), "bayesifyclassifier__method": [by.IBNN(2), by.Rank1(2)]}
    search = GridSearchCV(pipeline, grid, scoring="neg_log_loss", cv=2).fit(x, y)
    assert search.best_params_["bayesifyclassifier__epochs"] == 10
    found = search.best_estimator_[-1]
    methods = {layer.method for layer in bayesian_layers(found.network_).values()}
    assert {type(method) for method in methods} == {type(search.best_params_["bayesifyclassifier__method"])}
    assert search.best_score_ > -math.log(2)  # that of a coin


def test_cross_validation_of_a_regressor() -> None:
    x, y, _ = wave(150)
    assert cross_val_score(BayesifyRegressor(**QUICK | {"epochs": 25, "batch_size": 32}), x, y, cv=3).mean() > 0.5


def test_copies_and_pickles_predict_the_same(classifier: BayesifyClassifier) -> None:
    x, _, _ = logistic(50)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(x), classifier.predict_proba(x))
    assert not hasattr(clone(classifier), "network_") and clone(classifier).get_params() == classifier.get_params()


def test_a_seed_gives_the_same_numbers_and_leaves_torchs_alone() -> None:
    x, y, _ = wave(60)
    state = torch.get_rng_state()
    first, second, other = (BayesifyRegressor(**QUICK | {"random_state": seed}).fit(x, y) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(first.predict(x), second.predict(x))
    assert not np.allclose(first.predict(x), other.predict(x))


def test_without_scikit_learn_the_error_says_what_to_install_and_transformers_is_not_imported() -> None:
    code = "import sys; sys.modules['sklearn'] = None; import bayesify.integrations as found; print(*vars(found)); "
    done = subprocess.run([sys.executable, "-c", code + "import bayesify.sklearn"], capture_output=True, text=True)
    assert done.returncode and "ImportError" in done.stderr and "pip install 'bayesify[sklearn]'" in done.stderr
    assert "KLCallback" not in done.stdout.split() and by.integrations.KLCallback.__module__.endswith("transformers")


# Predictions.


def test_probabilities_are_those_that_labels_were_drawn_with(classifier: BayesifyClassifier) -> None:
    x, y, probability = logistic(4000)
    found = classifier.predict_proba(x)
    assert np.abs(found[:, 1] - probability).mean() < 0.1
    own, best, constant = (
        -np.log(np.where(y, p, 1 - p)).mean() for p in (found[:, 1], probability, np.full(len(y), y.mean()))
    )
    assert best - 0.01 < own < best + 0.06 < constant - 0.15
    edges = np.quantile(found[:, 1], np.linspace(0, 1, 6)[1:-1])
    for part in range(5):  # in each fifth, as many are 1 as predicted
        rows = np.digitize(found[:, 1], edges) == part
        assert abs(y[rows].mean() - found[rows, 1].mean()) < 0.16
    np.testing.assert_array_equal(classifier.predict(x), np.where(found[:, 1] > 0.5, "yes", "no"))
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-12)


def test_intervals_hold_as_many_targets_as_they_say(regressor: BayesifyRegressor) -> None:
    x, y, std = wave(4000)
    for coverage in (0.5, 0.9):
        low, high = regressor.predict_interval(x, coverage)
        assert abs(((low <= y) & (y <= high)).mean() - coverage) < 0.12
    mean, spread = regressor.predict(x, return_std=True)
    np.testing.assert_array_equal(regressor.predict(x), mean)
    best, constant = gaussian_nll(y, 500 + 100 * np.sin(2 * x[:, 0]), std), gaussian_nll(y, y.mean(), y.std())
    assert best - 0.02 < gaussian_nll(y, mean, spread) < best + 0.3 < constant - 0.15
    noise = regressor.predict_uncertainty(x).aleatoric
    assert np.corrcoef(np.log(noise), np.log(std))[0, 1] > 0.7 and 0.75 < (noise / std).mean() < 1.35


def test_total_uncertainty_is_that_of_the_noise_and_that_of_the_draws(
    classifier: BayesifyClassifier, regressor: BayesifyRegressor
) -> None:
    x, _, _ = logistic(20)
    entropies, p = classifier.predict_uncertainty(x), classifier.predict_proba(x)
    np.testing.assert_allclose(entropies.total, -(p * np.log(p)).sum(1), atol=1e-6)
    np.testing.assert_allclose(entropies.total, entropies["aleatoric"] + entropies["epistemic"], atol=1e-6)
    x, _, _ = wave(20)
    stds = regressor.predict_uncertainty(x)
    np.testing.assert_allclose(stds.total**2, stds.aleatoric**2 + stds.epistemic**2, rtol=1e-6)
    np.testing.assert_allclose(stds.total, regressor.predict(x, return_std=True)[1])


def test_draws_disagree_far_from_the_data(regressor: BayesifyRegressor) -> None:
    inside, outside = np.linspace(-1, 1, 20)[:, None], np.linspace(8, 10, 20)[:, None]
    spread = [regressor.predict_uncertainty(x).epistemic.mean() for x in (inside, outside)]
    assert spread[1] > 3 * spread[0]


def test_units_of_inputs_and_targets_do_not_matter() -> None:
    x, y, _ = wave(80)
    plain, scaled = (BayesifyRegressor(**QUICK).fit(a, b) for a, b in ((x, y), (x * 1e6 + 1, -0.001 * y)))
    mean, std = plain.predict(x, return_std=True)
    scaled_mean, scaled_std = scaled.predict(x * 1e6 + 1, return_std=True)
    order = np.corrcoef(scaled_mean, mean)[0, 1]  # other signs give another split
    assert order < -0.8 and 0.5 < (scaled_std / (0.001 * std)).mean() < 2


def test_several_targets_have_their_own_units() -> None:
    x, y, _ = wave(200)
    both = np.stack([y, 5 - 1000 * y], 1)
    mean, std = BayesifyRegressor(**QUICK | {"epochs": 25, "batch_size": 32}).fit(x, both).predict(x, return_std=True)
    assert mean.shape == std.shape == both.shape
    assert np.corrcoef(mean[:, 0], y)[0, 1] > 0.8 and np.corrcoef(mean[:, 1], -y)[0, 1] > 0.8
    assert 500 < (std[:, 1] / std[:, 0]).mean() < 2000


def test_a_row_is_predicted_alike_alone_and_with_others(classifier: BayesifyClassifier) -> None:
    x, _, _ = logistic(40)
    alone = np.concatenate([classifier.predict_proba(row[None]) for row in x])
    np.testing.assert_allclose(alone, classifier.predict_proba(x), rtol=1e-12)


# Training.


def test_training_stops_early_and_keeps_the_best_epoch() -> None:
    x, _, _ = logistic(60)
    y = np.random.RandomState(0).randint(2, size=60)  # nothing to learn but to overfit
    options = QUICK | {"epochs": 100, "patience": 4, "validation": 0.3, "method": by.BatchEnsemble(2)}
    stopped = BayesifyClassifier(**options).fit(x, y)
    best = int(np.argmin(stopped.validation_nll_))
    assert len(stopped.validation_nll_) == best + 1 + 4 < 100
    kept = BayesifyClassifier(**options | {"epochs": best + 1}).fit(x, y)
    np.testing.assert_array_equal(stopped.predict_proba(x), kept.predict_proba(x))


def test_validation_rows_are_of_all_classes_and_can_be_left_out() -> None:
    x, y = np.arange(100.0)[:, None], np.repeat([0, 1], [90, 10])
    parts = by.integrations.sklearn._split(y, 0.2, np.random.RandomState(0))
    assert sorted(np.concatenate(parts)) == list(range(100)) and y[parts[1]].sum() == 2
    without = BayesifyClassifier(**QUICK | {"validation": 0.0}).fit(x, y)
    assert without.validation_nll_ == [] and without.likelihood_.temperature == 1


def test_a_network_of_ones_own_is_copied_and_its_weights_are_kept() -> None:
    x, y, _ = logistic(65)  # 65: the last batch would have a single row, which batch norm refuses
    network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    options = QUICK | {"batch_size": 64, "validation": 0.0, "epochs": 1, "lr": 1e-6}
    fitted = BayesifyClassifier(network, {"3": by.MeanField()}, **options).fit(x, y)
    assert not bayesian_layers(network) and all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    torch.testing.assert_close(fitted.network_[0].weight.float(), before["0.weight"], atol=1e-4, rtol=0)
    assert list(bayesian_layers(fitted.network_)) == ["3"]


def test_a_function_makes_the_network_for_the_data() -> None:
    x, y, _ = logistic(40)
    sizes = []

    def make(features: int, outputs: int) -> nn.Module:
        sizes.append((features, outputs))
        return nn.Linear(features, outputs)

    BayesifyClassifier(make, **QUICK).fit(x, y % 2 + (x[:, 0] > 1))
    BayesifyRegressor(make, precision="input", **QUICK).fit(x, x)
    assert sizes == [(2, 3), (2, 4)]


def test_the_page_lists_all_options_and_their_defaults() -> None:
    page = (Path(__file__).parents[1] / "docs" / "sklearn.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", page, re.MULTILINE))
    assert rows == {name: repr(value) for name, value in BayesifyRegressor().get_params().items()}
    assert set(rows) - set(BayesifyClassifier().get_params()) == {"precision"}


# Errors.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"network": nn.Linear(2, 3)}, r"outputs of shape \(2, 3\); expected \(2, 2\)"),
        ({"network": nn.Linear(5, 2)}, "does not take inputs of shape"),
        ({"network": "resnet"}, "expected a torch.nn.Module, or a function"),
        ({"epochs": 0}, "epochs == 0, must be >= 1"),
        ({"lr": 0.0}, "lr == 0.0, must be > 0"),
        ({"validation": 1.0}, "validation == 1.0, must be < 1"),
        ({"mixture": "both"}, "expected 'assign' or 'replicate'"),
        ({"lr": 1e30}, "use a smaller lr|not finite"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    x, y, _ = logistic(30)
    with pytest.raises(ValueError, match=words):
        BayesifyClassifier(**QUICK | options).fit(x, y)


def test_what_rows_must_be_is_said() -> None:
    x, y, _ = logistic(30)
    with pytest.raises(by.BayesifyError, match="y has one class"):
        BayesifyClassifier(**QUICK).fit(x, np.zeros(30))
    with pytest.raises(by.BayesifyError, match="expected 'learned' or 'input'"):
        BayesifyRegressor(precision="known").fit(x, y)  # type: ignore[arg-type]
    missing = np.where(x > 1, np.nan, x)
    with pytest.raises(ValueError, match="does not accept missing values"):
        BayesifyRegressor(**QUICK).fit(missing, y)
    assert not has_fit_parameter(BayesifyClassifier(), "sample_weight")
