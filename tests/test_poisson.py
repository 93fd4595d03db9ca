"""Counts, checked against SciPy's Poisson distribution."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import poisson
from torch import Tensor, nn

import bayesify as by

RATES = torch.tensor([0.02, 0.7, 3.0, 40.0, 900.0])


def mixture(draws: int = 6) -> Tensor:
    """Logarithms of rates (S, B, 1) of some draws."""
    return (RATES.log() + 0.3 * torch.randn(draws, len(RATES)).cumsum(1)).unsqueeze(-1)


def test_log_probabilities_are_those_of_scipy() -> None:
    output, counts = torch.randn(50, 2), torch.poisson(5 * torch.rand(50, 2))
    expected = poisson.logpmf(counts.numpy(), output.exp().numpy()).sum(1)
    assert np.allclose(by.Poisson().log_prob(output, counts), expected, atol=1e-4)
    assert torch.equal(by.Poisson().log_prob(output, counts.long()), by.Poisson().log_prob(output, counts))


def test_a_prediction_is_the_mixture_of_its_draws() -> None:
    outputs, counts = mixture(), torch.tensor([[0.0], [2.0], [1.0], [50.0], [870.0]])
    p, rates = by.Poisson().predictive(outputs, keep=True), outputs.exp().double().numpy()
    each = poisson.logpmf(counts.numpy(), rates)[..., 0]
    assert np.allclose(p.log_prob(counts), np.log(np.exp(each).mean(0)), atol=1e-3)
    assert np.allclose(p.mean, rates.mean(0), rtol=1e-5)
    assert np.allclose(p.std**2, rates.mean(0) + rates.var(0), rtol=1e-4)
    for level in (0.5, 0.9, 0.99):
        for bound, q in zip(p.interval(level), ((1 - level) / 2, (1 + level) / 2), strict=True):
            below, at = (poisson.cdf(bound.numpy() - shift, rates).mean(0) for shift in (1, 0))
            assert (at >= q).all() and ((below < q) | (bound.numpy() == 0)).all()


def test_without_draws_rates_have_the_mean_and_the_spread_of_all() -> None:
    outputs = (RATES.log() + 0.1 * torch.randn(2000, len(RATES))).unsqueeze(-1)
    exact, close = (by.Poisson().predictive(outputs, keep=keep) for keep in (True, False))
    assert close.draws is None and torch.allclose(close.std, exact.std)
    for one, other in zip(exact.interval(0.9), close.interval(0.9), strict=True):
        assert ((one - other).abs() <= 1 + 0.05 * exact.std).all()


def test_a_network_learns_rates_and_predicts_counts_as_often_as_its_intervals_say(tmp_path: Path) -> None:
    x = torch.rand(2000, 1) * 4 - 2
    y = torch.poisson((1 + x).exp())
    model = by.convert(nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 1)), by.Rank1(4, noise=0.05))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for rows in [rows for _ in range(20) for rows in torch.randperm(1000).split(100)]:
        optimizer.zero_grad()
        by.elbo(model, x[rows], y[rows], n=1000, likelihood=by.Poisson()).loss.backward()
        optimizer.step()
    p = by.predict(model, x[1000:], likelihood=by.Poisson())
    assert (p.mean.log() - 1 - x[1000:]).abs().mean() < 0.15
    low, high = p.interval(0.9)
    inside = ((low <= y[1000:]) & (y[1000:] <= high)).float().mean()
    least, most = (torch.as_tensor(each) for each in poisson.interval(0.9, (1 + x[1000:]).exp().numpy()))
    assert (
        abs(inside - ((least <= y[1000:]) & (y[1000:] <= most)).float().mean()) < 0.02
    )  # above 0.9, as counts are few
    p.save(tmp_path / "p.safetensors")
    assert torch.equal(by.Prediction.load(tmp_path / "p.safetensors").log_prob(y[1000:]), p.log_prob(y[1000:]))
    adaptive = by.predict(model, x[1000:1010], samples=by.Adaptive(max=200, tolerance=0.1), likelihood=by.Poisson())
    assert torch.allclose(adaptive.mean, p.mean[:10], rtol=0.3)


def test_a_student_learns_the_mean_rate() -> None:
    model, x = by.convert(nn.Linear(2, 1), by.IBNN(2, noise=1.0)), torch.randn(200, 2)
    student = by.distill(model, [x], samples=20, epochs=300, lr=0.02, likelihood=by.Poisson())
    expected = by.predict(model, x, samples=20, likelihood=by.Poisson()).mean
    before, after = (each(x).exp() for each in (by.draw(model, None), student))
    kl_before, kl_after = ((expected * (expected / rate).log() - expected + rate).mean() for rate in (before, after))
    assert kl_after < 0.5 * kl_before, f"{kl_after} after, {kl_before} before"


@pytest.mark.parametrize("counts", [[[-1.0]], [[0.5]], [[float("nan")]]], ids=str)
def test_what_is_no_count_is_refused(counts: list[list[float]]) -> None:
    with pytest.raises(by.BayesifyError, match="expected whole numbers from 0 on"):
        by.Poisson().log_prob(torch.zeros(1, 1), torch.tensor(counts))
    with pytest.raises(by.BayesifyError, match="they must be the same"):
        by.Poisson().log_prob(torch.zeros(1, 1), torch.zeros(1))
