"""What experiments measure of networks for classes, against metrics and means computed here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, log_loss
from torch import Tensor

import bayesify as by
from bayesify.lab.data import Data, load
from bayesify.lab.data.examples import evenly_spread
from bayesify.lab.recipes import Recipe
from bayesify.lab.reproduction import measures
from bayesify.lab.reproduction.measures import SCALED
from bayesify.lab.runs import make_likelihood
from bayesify.lab.shift import CORRUPTIONS, KINDS, shifted
from bayesify.lab.trained import Trained
from bayesify.lab.training import bayesian_network

RECIPE = Recipe.of(
    {
        "data": {"name": "digits", "limit": 60, "options": {"size": 32}},
        "model": {"name": "mlp", "options": {"hidden": 8}},
        "method": {"name": "IBNN", "components": 2, "mean_std": 1.0},
        "evaluation": {
            "samples": 4,
            "rows": 8,
            "attack": {"name": "pgd", "epsilon": 0.1, "steps": 2, "step_size": 0.05},
        },
    }
)


@pytest.fixture(scope="module")
def digits() -> Data:
    return load("digits", limit=60, size=32)


@pytest.fixture
def trained(digits: Data) -> Trained:
    """A network that was not trained, whose likelihood has a temperature that no measure may use."""
    torch.manual_seed(0)
    network, likelihood = bayesian_network(RECIPE, digits), make_likelihood(RECIPE, digits.targets, temperature=7.0)
    return Trained(network.eval(), likelihood, digits.inputs, digits.targets, RECIPE)


def probabilities(trained: Trained, raw: Tensor) -> np.ndarray:
    p = by.predict(trained.model, trained.inputs.prepare(raw), 4)
    found: np.ndarray = p.probs.double().numpy()
    return found / found.sum(1, keepdims=True)


def test_the_fit_is_that_of_the_mean_probabilities_and_of_their_best_temperature(
    trained: Trained, digits: Data
) -> None:
    found = measures.classes(trained, digits)
    raw, y = digits.test.raw(torch.arange(len(digits.test))), digits.test.targets.numpy()
    probs = probabilities(trained, raw)
    assert found[""]["nll"] == pytest.approx(log_loss(y, probs, labels=range(10)), abs=1e-4)
    assert found[""]["error"] == pytest.approx((probs.argmax(1) != y).mean(), abs=1e-6)
    assert found[SCALED]["error"] == found[""]["error"], "a temperature changes no label"
    p = by.predict(trained.model, trained.inputs.prepare(raw), 4)
    kept = p.epistemic.argsort(stable=True)[: -(-len(y) * 4 // 5)].numpy()
    rejected = (probs.argmax(1) != y).mean() - (probs.argmax(1) != y)[kept].mean()
    assert found[""]["rejection"] == pytest.approx(rejected, abs=2e-3)
    held, labels = digits.validation.raw(torch.arange(len(digits.validation))), digits.validation.targets.numpy()
    logs = np.log(probabilities(trained, held))

    def loss(temperature: float, logs: np.ndarray, labels: np.ndarray) -> float:
        powers = np.exp(logs / temperature)
        return float(log_loss(labels, powers / powers.sum(1, keepdims=True), labels=range(10)))

    best = min(np.geomspace(0.2, 100, 200), key=lambda temperature: loss(temperature, logs, labels))
    assert found[SCALED]["nll"] == pytest.approx(loss(best, np.log(probs), y), abs=1e-3)


def test_corrupted_measures_are_means_over_kinds_and_severities(trained: Trained, digits: Data) -> None:
    found = measures.corrupted_classes(trained, digits)[""]
    few = evenly_spread(digits.test, 8)
    losses, errors = [], {kind: [] for kind in CORRUPTIONS}
    for kind in CORRUPTIONS:
        for level in KINDS[kind]:
            rows = shifted(few, kind, level, inputs=digits.inputs)
            probs = probabilities(trained, rows.raw(torch.arange(8)))
            losses.append(log_loss(rows.targets, probs, labels=range(10)))
            errors[kind].append((probs.argmax(1) != rows.targets.numpy()).mean())
    assert len(losses) == 75
    assert found["cnll"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert found["cerror"] == pytest.approx(np.mean(list(errors.values())), abs=1e-6)
    assert found["error fog"] == pytest.approx(np.mean(errors["fog"]), abs=1e-6)


def test_relative_errors_are_those_of_table_8_of_emp() -> None:
    """Snow: EMP's CE of 99.6% and rCE of 101% fit errors of 33.0% and 33.9% without corruption and one of about 70%."""
    plain = {"error": 0.339, **{f"error {kind}": 0.77 for kind in CORRUPTIONS}}
    ours = {"error": 0.330, **{f"error {kind}": 0.996 * 0.77 for kind in CORRUPTIONS}}
    found = measures.relative_errors({"plain": plain, "EMP": ours, "other": {"error": 0.1}}, "plain")
    assert found.keys() == {"plain", "EMP"} and found["plain"] == {"mce_plain": 1.0, "rmce_plain": 1.0}
    assert found["EMP"]["mce_plain"] == pytest.approx(0.996)
    assert found["EMP"]["rmce_plain"] == pytest.approx((0.996 * 0.77 - 0.330) / (0.77 - 0.339))
    assert found["EMP"]["rmce_plain"] == pytest.approx(1.01, abs=0.01)


def test_detection_is_the_average_precision_of_mutual_information(trained: Trained, digits: Data) -> None:
    found = measures.detection(trained, digits, ["digits"])
    assert found.keys() == {"ap_digits", "ap_pgd"} and 0 <= found["ap_pgd"] <= 1
    few = evenly_spread(digits.test, 8)
    outside = evenly_spread(load("digits", validation=0).test, 8)  # what the set is loaded as, and then resized

    def information(raw: Tensor) -> np.ndarray:
        scores: np.ndarray = by.predict(trained.model, trained.inputs.prepare(raw), 4).epistemic.numpy()
        return scores

    resized = measures.load_ood_sets(["digits"], digits.inputs)["digits"]
    theirs = information(evenly_spread(resized, 8).raw(torch.arange(8)))
    ours = information(few.raw(torch.arange(8)))
    assert len(outside) == len(theirs) == 8
    expected = average_precision_score([0] * 8 + [1] * 8, np.concatenate([ours, theirs]))
    assert found["ap_digits"] == pytest.approx(expected, abs=1e-5)


def test_noise_curves_and_numbers_of_draws(trained: Trained, digits: Data) -> None:
    curve = measures.noise_curve(trained, digits, "mixing", (0.0, 1.0))
    assert list(curve) == [", 0", ", 1"]
    p = trained.predict(evenly_spread(digits.test, 8))
    cold = replace(trained, likelihood=by.Categorical()).predict(evenly_spread(digits.test, 8))
    assert curve[", 0"]["entropy"] == pytest.approx(float(cold.entropy.mean()), abs=1e-6)
    assert curve[", 0"]["entropy"] != pytest.approx(float(p.entropy.mean()), abs=1e-3)
    assert 0 <= curve[", 1"]["share"] <= 1
    draws = measures.draws_of(trained, digits, (1, 4))
    assert draws[", 4 draws"]["nll"] == pytest.approx(measures.classes(trained, digits)[""]["nll"], abs=1e-6)
    assert draws[", 1 draws"]["nll"] > draws[", 4 draws"]["nll"]
