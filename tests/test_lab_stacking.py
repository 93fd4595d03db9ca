"""Stacking weights against scipy's optimiser and closed forms; what is weighted, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.stacking import Stacking, stack
from bayesify.prediction.results import Classification, Regression


def classes(draws: int = 4, rows: int = 300) -> tuple[Classification, Tensor]:
    """Draws of which some know more than others."""
    y = torch.randint(3, (rows,))
    right = torch.nn.functional.one_hot(y, 3).float()
    logits = torch.stack([s * right + torch.randn(rows, 3) for s in range(draws)])
    return by.Categorical().predictive(logits, keep=True), y


def scipys(densities: np.ndarray) -> np.ndarray:
    """The weights by a general optimiser under the constraints of the simplex."""
    count = len(densities)
    found = minimize(
        lambda w: -np.log(w @ densities).mean(),
        np.full(count, 1 / count),
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    return np.asarray(found.x)


def test_the_weights_are_scipys() -> None:
    p, y = classes()
    assert p.draws is not None
    probs = p.draws.double().softmax(-1)[:, torch.arange(len(y)), y].numpy()
    found = stack(p, y)
    assert found.weights.numpy() == pytest.approx(scipys(probs), abs=2e-3)
    assert found.after == pytest.approx(float(np.log(found.weights.numpy() @ probs).mean()))
    assert found.before == pytest.approx(-float(torch.nn.functional.nll_loss(p.log_probs, y)), rel=1e-5)
    assert found.after > found.before


def test_a_weight_of_all_draws_of_a_component() -> None:
    p, y = classes(draws=6)
    assert p.draws is not None
    probs = p.draws.double().softmax(-1)[:, torch.arange(len(y)), y].reshape(3, 2, -1).mean(0).numpy()
    found = stack(p, y, components=2).weights
    assert found.sum() == pytest.approx(1) and torch.equal(found[:2], found[2:4])
    assert 3 * found[:2].numpy() == pytest.approx(scipys(probs), abs=2e-3)


def test_weighted_predictions_are_those_of_repeated_draws() -> None:
    """Weights of 3/4 and 1/4 are three copies of one draw and one of the other."""
    logits, y = torch.randn(2, 20, 3), torch.zeros(20).long()
    p, repeated = (by.Categorical().predictive(logits[index], keep=True) for index in ([0, 1], [0, 0, 0, 1]))
    assert isinstance(p, Classification) and isinstance(repeated, Classification)
    weights = torch.tensor([0.75, 0.25], dtype=torch.float64)
    found = Stacking(weights, 0.0, 0.0).predict(p)
    assert isinstance(found, Classification)
    for name in ("log_probs", "mean_log_probs", "aleatoric", "variance", "entropy", "epistemic"):
        assert torch.allclose(getattr(found, name), getattr(repeated, name), atol=1e-6), name
    assert stack(p, y).predict(p).log_probs.dtype == torch.float32
    means = torch.randn(2, 20, 1)
    q, both = (by.Gaussian(2.0).predictive(means[index], keep=True) for index in ([0, 1], [0, 0, 0, 1]))
    assert isinstance(q, Regression) and isinstance(both, Regression)
    real = Stacking(weights, 0.0, 0.0).predict(q)
    assert isinstance(real, Regression)
    assert torch.allclose(real.mean, both.mean, atol=1e-6) and torch.allclose(real.std, both.std, atol=1e-6)


def test_the_draws_of_a_seed_keep_their_weights_on_other_rows() -> None:
    """A component that is right on held-out rows is the one that is right on others."""
    model = by.convert(nn.Sequential(nn.Linear(3, 3, bias=False)), by.EMP(3, patches="output"))
    with torch.no_grad():
        model[0].weight.copy_(5 * torch.eye(3))
        model[0].posterior.weight.copy_(torch.stack([5 * torch.eye(3).roll(1, 0), -5 * torch.eye(3)]))
    y = torch.arange(60) % 3
    x = torch.nn.functional.one_hot(y, 3).float()
    held, other = (by.predict(model, each, 12, seed=3, draws=True) for each in (x[:30], x[30:]))
    found = stack(held, y[:30])
    nll = [float(torch.nn.functional.nll_loss(p.log_probs, y[30:])) for p in (other, found.predict(other))]
    assert nll[1] < 0.05 < 0.5 < nll[0]


def test_what_cannot_be_stacked_is_refused() -> None:
    p, y = classes(rows=5)
    with pytest.raises(by.BayesifyError, match="expected a number that divides the 4 draws"):
        stack(p, y, components=3)
    with pytest.raises(by.BayesifyError, match=r"targets of shape \(4,\): expected \(5,\)"):
        stack(p, y[:4])
    with pytest.raises(by.BayesifyError, match="the prediction has no draws"):
        stack(by.Categorical().predictive(torch.zeros(2, 5, 3)), y)
    with pytest.raises(by.BayesifyError, match="weights for 4 draws; the prediction has 2"):
        stack(p, y).predict(by.Categorical().predictive(torch.zeros(2, 5, 3), keep=True))
    with pytest.raises(by.BayesifyError, match="for classes and real numbers"):
        stack(by.Bernoulli().predictive(torch.zeros(2, 5), keep=True), y)
