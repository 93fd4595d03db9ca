"""One ordinary network in place of many draws: `distill`, and the Dirichlet that its outputs may be."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from cases import METHODS, MLP, Residual
from torch import Tensor, nn
from torch.distributions import Dirichlet as TorchDirichlet
from torch.utils.data import DataLoader, TensorDataset

import bayesify as by
from bayesify.prediction.dirichlet import LOG_PRECISIONS, excess, log_precision_of, mutual_information
from bayesify.prediction.results import Classification
from bayesify.training.distill import divergence
from benchmarks.distill import RESULTS, page

ROWS = 96
LIKELIHOODS = {
    "classes": by.Categorical(),
    "warm classes": by.Categorical(temperature=2.0),
    "labels": by.Bernoulli(),
    "fixed noise": by.Gaussian(4.0),
    "learned noise": by.Gaussian("learned"),
    "noise per input": by.Gaussian("input"),
}


def network(outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, outputs))


def noisy(outputs: int = 4) -> nn.Module:
    """A model whose draws differ so much that their mean is not the mean network's prediction."""
    model = by.convert(network(outputs), by.MeanField(init_log_std=(-1.5, -1.5)))
    with torch.no_grad():
        model[2].weight.mul_(4)
    return model.eval()


def inputs() -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))


def mean_divergence(output: Tensor, model: nn.Module, likelihood: Any) -> float:
    """From 200 draws of a seed that distillation has not used."""
    target = by.predict(model, inputs(), 200, seed=10**6, likelihood=likelihood, draws=False)
    return float(divergence(output.detach(), target, likelihood.eval()).detach())


# The student.


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_student_predicts_what_draws_predict_together(name: str) -> None:
    model, likelihood, x = noisy(), LIKELIHOODS[name], inputs()
    before = mean_divergence(by.draw(model, None)(x), model, likelihood)
    student = by.distill(model, [x], epochs=150, lr=1e-2, likelihood=likelihood)
    after = mean_divergence(student(x), model, likelihood)
    assert after < before / 7


def test_the_divergence_of_classes_and_labels_is_torchs() -> None:
    output, draws = torch.randn(7, 4), torch.randn(5, 7, 4)
    target = by.Categorical().predictive(draws)
    categorical = torch.distributions.Categorical
    expected = torch.distributions.kl_divergence(categorical(draws.softmax(-1).mean(0)), categorical(logits=output))
    torch.testing.assert_close(divergence(output, target, by.Categorical()), expected.mean())
    bernoulli = torch.distributions.Bernoulli
    expected = torch.distributions.kl_divergence(bernoulli(draws.sigmoid().mean(0)), bernoulli(logits=output))
    target = by.Bernoulli().predictive(draws)
    torch.testing.assert_close(divergence(output, target, by.Bernoulli()), expected.mean())


def test_a_masked_class_costs_nothing() -> None:
    mask = torch.tensor([0.0, 0.0, -torch.inf])
    output, draws = torch.randn(7, 3, requires_grad=True), torch.randn(5, 7, 3) + mask
    for into in (None, by.Dirichlet()):
        loss = divergence(output + mask, by.Categorical().predictive(draws), by.Categorical(), into)
        (gradient,) = torch.autograd.grad(loss, output)
        assert gradient.isfinite().all() and torch.equal(gradient[:, 2], torch.zeros(7))
        if into is None:
            fewer = by.Categorical().predictive(draws[..., :2])
            torch.testing.assert_close(loss, divergence(output[:, :2], fewer, by.Categorical()))


def test_the_divergence_of_real_targets_is_torchs() -> None:
    output, draws, normal = torch.randn(7, 4), torch.randn(5, 7, 4), torch.distributions.Normal
    means, variances = draws[..., :2], (-draws[..., 2:]).exp()
    total = (means.var(0, unbiased=False) + variances.mean(0)).sqrt()
    own = normal(output[..., :2], (-0.5 * output[..., 2:]).exp())
    expected = torch.distributions.kl_divergence(normal(means.mean(0), total), own)
    likelihood: Any = by.Gaussian("input")
    torch.testing.assert_close(divergence(output, likelihood.predictive(draws), likelihood), expected.mean())
    likelihood = by.Gaussian(4.0)  # the same noise on both sides: only means can be matched
    expected = torch.distributions.kl_divergence(normal(draws.mean(0), 0.5), normal(output, 0.5))
    torch.testing.assert_close(divergence(output, likelihood.predictive(draws), likelihood), expected.mean())


@pytest.mark.parametrize("name", METHODS)
def test_it_starts_from_the_mean_network_for_every_method(name: str) -> None:
    model = by.convert(Residual(), METHODS[name])
    x, mean = torch.randn(8, 2, 6, 6), by.draw(model, None)
    student = by.distill(model, [x], epochs=1, samples=2, optimizer=lambda p: torch.optim.SGD(p, 0.0))
    assert list(student.state_dict()) == list(Residual().state_dict())
    for key, value in mean.state_dict().items():
        assert torch.equal(student.state_dict()[key], value), key
    assert not any(p.requires_grad for p in student.parameters()) and not student.training


def test_the_student_is_a_plain_network_that_torch_exports() -> None:
    model, x = by.convert(Residual(), by.Rank1(4)), torch.randn(8, 2, 6, 6)
    student = by.distill(model, [x], epochs=1, samples=2)
    assert {type(module).__module__.split(".")[0] for module in student.modules()} == {"torch", "cases"}
    again = Residual()
    again.load_state_dict(student.state_dict())
    assert torch.equal(again.eval()(x), student(x))
    torch.testing.assert_close(torch.export.export(student, (x,)).module()(x), student(x))


def test_another_network_may_be_the_start_and_stays_as_it_is() -> None:
    model, x = noisy(), inputs()
    small = nn.Linear(6, 4)
    weight = small.weight.detach().clone()
    before = mean_divergence(small(x), model, by.Categorical())
    student = by.distill(model, [x], epochs=100, lr=0.03, start=small)
    assert isinstance(student, nn.Linear) and torch.equal(small.weight, weight) and small.weight.requires_grad
    assert mean_divergence(student(x), model, by.Categorical()) < before / 3


def test_parameters_that_the_model_does_not_train_stay_but_those_of_bayesian_layers() -> None:
    model = by.convert(network(), {"2": by.Rank1(4)})
    model.requires_grad_(False)
    mean, student = by.draw(model, None), by.distill(model, [inputs()], epochs=2, samples=4)
    changed = {key for key, value in student.state_dict().items() if not torch.equal(value, mean.state_dict()[key])}
    assert changed == {"2.weight", "2.bias"}


def test_norms_keep_their_statistics_and_a_kept_dropout_is_off() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model, x = by.convert(plain, by.Rank1(4), keep_dropout=True), inputs()
    student: Any = by.distill(model, list(x.split(32)), epochs=2, samples=4, lr=0.1)
    assert torch.equal(student[1].running_mean, torch.zeros(8)) and torch.equal(student(x), student(x))


def test_an_lstm_learns_without_its_dropout() -> None:
    network = nn.Sequential(nn.LSTM(5, 4, num_layers=2, dropout=0.5, batch_first=True), Last(), nn.Linear(4, 3))
    model, x = by.convert(network, by.MeanField(init_log_std=(-1.5, -1.5))), torch.randn(16, 3, 5)
    target = by.predict(model, x, 200, seed=10**6)
    student: Any = by.distill(model, [x], epochs=40, lr=0.01, samples=10)
    assert student[0].dropout == 0.5 and not student[0].training
    again = by.distill(model, [x], epochs=40, lr=0.01, samples=10)
    assert torch.equal(student(x), again(x))  # dropout would make them differ
    before, after = (divergence(each(x), target, by.Categorical()) for each in (by.draw(model, None), student))
    assert after < before / 2


class Last(nn.Module):
    def forward(self, outputs: tuple[Tensor, Any]) -> Tensor:
        return outputs[0][:, -1]


def test_a_learned_precision_and_an_unused_parameter_stay() -> None:
    model, likelihood = noisy(), by.Gaussian("learned")
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    student: Any = by.distill(model, [inputs()], epochs=2, samples=4, likelihood=likelihood)
    assert likelihood.log_precision.grad is None and torch.equal(student.unused, torch.ones(2))


# The model and the loader.


def test_the_model_and_the_random_state_stay() -> None:
    model, x = by.convert(Residual(), by.Rank1(4)).train(), torch.randn(8, 2, 6, 6)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    by.distill(model, [x], epochs=2, samples=4, lr=0.1)
    assert torch.equal(torch.get_rng_state(), state) and [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_seed_gives_the_same_student_in_any_mode_of_gradients() -> None:
    model, x = noisy(), inputs()
    student = by.distill(model, [x], epochs=3, seed=1)
    with torch.no_grad():
        again = by.distill(model, [x], epochs=3, seed=1)
    with torch.inference_mode():
        inference = by.distill(model, [x.clone()], epochs=3, seed=1)
    other = by.distill(model, [x], epochs=3, seed=2)
    assert torch.equal(student(x), again(x)) and torch.equal(student(x), inference(x))
    assert not torch.equal(student(x), other(x))


def test_the_first_epoch_aims_at_the_prediction_of_the_seed_and_the_next_at_another() -> None:
    model, x, losses = noisy(), inputs(), []
    nothing = lambda parameters: torch.optim.SGD(parameters, 0.0)  # noqa: E731
    options: dict[str, Any] = {"samples": 5, "optimizer": nothing, "progress": lambda epoch, loss: losses.append(loss)}
    by.distill(model, [x], epochs=2, seed=7, **options)
    mean = by.draw(model, None)(x)
    expected = [divergence(mean, by.predict(model, x, 5, seed=seed), by.Categorical()) for seed in (7, 8)]
    assert losses == pytest.approx(list(map(float, expected)), rel=1e-5) and losses[0] != losses[1]


def test_a_cache_predicts_the_first_pass_alone_and_reads_the_loader_once() -> None:
    model, x, losses = noisy(), inputs(), []
    options: dict[str, Any] = {"samples": 5, "epochs": 3, "seed": 7, "cache": True}
    options["progress"] = lambda epoch, loss: losses.append(loss)
    by.distill(model, iter(x.split(32)), optimizer=lambda p: torch.optim.SGD(p, 0.0), **options)
    target = by.predict(model, x, 5, seed=7)
    expected = float(divergence(by.draw(model, None)(x), target, by.Categorical()))
    assert losses == pytest.approx([expected] * 3, rel=1e-5)
    with pytest.raises(by.BayesifyError, match="no batch in epoch 1"):
        by.distill(model, iter([]), **options)


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = network()

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        return OrderedDict(logits=self.layer(values))


def test_labelled_unlabelled_dict_and_called_batches_are_the_same() -> None:
    model, x, y = noisy(), inputs(), torch.zeros(ROWS)
    options: dict[str, Any] = {"epochs": 2, "samples": 4}
    expected = by.distill(model, list(x.split(32)), **options)(x)
    for loader in (DataLoader(TensorDataset(x, y), 32), DataLoader(TensorDataset(x), 32), DataLoader(x, 32)):
        torch.testing.assert_close(by.distill(model, loader, **options)(x), expected)
    called = by.distill(model, [{"v": part} for part in x.split(32)], call=lambda net, b: net(b["v"]), **options)
    torch.testing.assert_close(called(x), expected)
    keyword = by.convert(Keyword(), by.MeanField(init_log_std=(-1.5, -1.5)))
    keyword.layer.load_state_dict(model.state_dict())
    student = by.distill(keyword, [{"values": part} for part in x.split(32)], **options)
    assert student(x)["logits"].shape == expected.shape  # other names of layers, so other draws


def test_nothing_waits_for_the_device() -> None:
    model = noisy().to("meta")
    for into in (None, by.Dirichlet()):
        student = by.distill(model, [torch.randn(8, 6, device="meta")], epochs=2, samples=4, into=into)
        assert student(torch.randn(3, 6, device="meta")).shape == (3, 4)


# The Dirichlet.


def concentrations() -> Tensor:
    return torch.tensor([[0.3, 0.5, 2.0], [4.0, 1.0, 7.0], [40.0, 20.0, 9.0], [0.05, 0.05, 30.0]])


def test_the_mutual_information_is_that_of_monte_carlo() -> None:
    alpha = concentrations().double()
    probs = TorchDirichlet(alpha).sample((200_000,))
    entropies = -torch.xlogy(probs, probs).sum(-1)
    p: Any = by.Dirichlet().interpret(concentrations().log())
    error = 5 * entropies.std(0) / math.sqrt(len(probs))
    assert ((p.aleatoric - entropies.mean(0)).abs() < error).all()
    torch.testing.assert_close(p.probs, (alpha / alpha.sum(-1, keepdim=True)).float())
    assert ((p.epistemic - (p.entropy - entropies.mean(0))).abs() < error + 1e-6).all()
    torch.testing.assert_close(p.variance, probs.var(0).mean(-1).float(), rtol=0.02, atol=0)
    torch.testing.assert_close(p.epistemic + p.aleatoric, p.entropy)


def test_several_dirichlets_are_a_mixture() -> None:
    alpha = concentrations().double()
    p: Any = by.Dirichlet().predictive(alpha.float().log().unsqueeze(1))  # four draws of one row
    probs = TorchDirichlet(alpha).sample((100_000,)).flatten(0, 1)
    aleatoric = float(-torch.xlogy(probs, probs).sum(-1).mean())
    mean = probs.mean(0)
    assert float(p.epistemic) == pytest.approx(float(-(mean * mean.log()).sum()) - aleatoric, rel=0.01)
    assert float(p.variance) == pytest.approx(float(probs.var(0).mean()), rel=0.01)


@pytest.mark.parametrize("samples", [7, 20, 80])
def test_the_standard_error_of_dirichlets_is_that_of_their_means(samples: int) -> None:
    model, x = by.convert(nn.Linear(4, 3), by.Rank1(4, dropout_rate=0.2)), torch.randn(5, 4)
    means, p = by.predict(model, x, samples), by.predict(model, x, samples, likelihood=by.Dirichlet())
    torch.testing.assert_close(p.standard_error, means.standard_error)
    assert (p.variance > means.variance).all()
    rows = by.predict(model, x, tolerance=0.05, likelihood=by.Dirichlet())
    torch.testing.assert_close(rows.draws_used, by.predict(model, x, tolerance=0.05).draws_used)


def test_excess_keeps_its_digits_in_single_precision() -> None:
    log_x = torch.linspace(-20, 20, 401)
    exact = torch.digamma(log_x.double().exp() + 1) - log_x.double()
    near = log_x < 12  # beyond, doubles are rounded, too
    torch.testing.assert_close(excess(log_x)[near].double(), exact[near], rtol=2e-5, atol=0)
    torch.testing.assert_close(excess(log_x)[~near], 0.5 * (-log_x[~near]).exp(), rtol=1e-5, atol=0)


def test_the_precision_is_found_by_bisection() -> None:
    log_probs = torch.randn(50, 10, generator=torch.Generator().manual_seed(2)).mul(2).log_softmax(-1)
    log_precision = torch.linspace(*LOG_PRECISIONS, 52)[1:-1]
    information = mutual_information(log_probs, log_precision)
    torch.testing.assert_close(log_precision_of(log_probs, information), log_precision, rtol=0, atol=5e-3)
    assert (information[1:] > 0).all() and (information < -(log_probs.exp() * log_probs).sum(-1)).all()
    bounds = log_precision_of(log_probs[:2], torch.tensor([9.0, 0.0]))  # more than the entropy, and none at all
    torch.testing.assert_close(bounds, torch.tensor(LOG_PRECISIONS), rtol=0, atol=1e-4)


def test_probabilities_of_zero_have_no_information() -> None:
    certain = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, -200.0, -300.0]])
    assert torch.equal(mutual_information(certain, torch.tensor([1.0, -3.0])), torch.zeros(2))
    assert log_precision_of(certain, torch.zeros(2)).isfinite().all()


def test_a_dirichlet_student_knows_mean_and_epistemic_part() -> None:
    model, x = noisy(), inputs()
    teacher = by.predict(model, x, 400, seed=10**6)
    student = by.distill(model, [x], epochs=500, lr=1e-2, samples=100, into=by.Dirichlet(), cache=True)
    p: Any = by.Dirichlet().interpret(student(x))
    start: Any = by.Dirichlet().interpret(by.draw(model, None)(x))
    assert isinstance(p, Classification) and p.samples == 1
    torch.testing.assert_close(p.probs, student(x).softmax(-1))
    error, before = ((each.epistemic - teacher.epistemic).abs().mean() for each in (p, start))
    assert error < before / 5 and error < 0.2 * teacher.epistemic.mean()
    assert torch.corrcoef(torch.stack([p.epistemic, teacher.epistemic]))[0, 1] > 0.9
    assert mean_divergence(student(x), model, by.Categorical()) < 0.01


def test_a_precision_that_is_far_too_high_is_lowered_all_the_same() -> None:
    output, target = torch.randn(7, 4) + 60, by.Categorical().predictive(3 * torch.randn(5, 7, 4))
    assert isinstance(target, Classification) and (target.epistemic > 0.05).all()
    shift = torch.zeros(7, 1, requires_grad=True)
    (gradient,) = torch.autograd.grad(divergence(output + shift, target, by.Categorical(), by.Dirichlet()), shift)
    assert (gradient > 1e-3).all()  # the squared difference of mutual information is flat here


def test_a_dirichlet_of_maps_has_its_classes_where_the_likelihood_has_them() -> None:
    model = by.convert(nn.Conv2d(1, 3, 3, padding=1), by.MeanField(init_log_std=(-1.0, -1.0)))
    x = torch.randn(4, 1, 5, 5)
    student = by.distill(model, [x], epochs=2, likelihood=by.Categorical(1), into=by.Dirichlet(1))
    p: Any = by.Dirichlet(1).interpret(student(x))
    assert p.probs.shape == (4, 5, 5, 3) and p.epistemic.shape == (4, 5, 5)


# What is refused.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, r"distill\(epochs=0\): expected an integer >= 1"),
        ({"samples": 0}, "samples=0: expected an integer >= 1"),
        ({"seed": None}, r"distill\(seed=None\): expected an integer"),
        ({"into": by.Categorical()}, r"distill\(into=Categorical\(\)\): expected by.Dirichlet\(\)"),
        ({"into": by.Dirichlet(), "likelihood": by.Bernoulli()}, "expected likelihood=by.Categorical"),
        ({"into": by.Dirichlet(1)}, "with the same class_dim"),
        ({"into": by.Dirichlet(), "samples": 1}, "one draw has no epistemic part; use 2 or more"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(by.BayesifyError, match=words):
        by.distill(noisy(), [inputs()], **options)


def test_bad_loaders_and_models_are_refused() -> None:
    with pytest.raises(by.BayesifyError, match="no batch in epoch 1: it is empty"):
        by.distill(noisy(), [], epochs=2)
    with pytest.raises(by.BayesifyError, match="no batch in epoch 2: it can be read only once"):
        by.distill(noisy(), iter([inputs()]), epochs=2)
    with pytest.raises(by.BayesifyError, match="give a list of batches"):
        by.distill(noisy(), inputs().split(16))
    with pytest.raises(by.BayesifyError, match=r"by\.convert"):
        by.distill(MLP(), [inputs()])
    with pytest.raises(by.BayesifyError, match="expected a converted network, got str"):
        by.distill("model", [inputs()])  # type: ignore[arg-type]


def test_a_start_of_another_shape_is_refused() -> None:
    with pytest.raises(by.BayesifyError, match=r"the student's output has shape \(96, 3\), the model's \(96, 4\)"):
        by.distill(noisy(), [inputs()], start=nn.Linear(6, 3))


def test_losses_that_are_not_finite_say_whose_fault_it_is() -> None:
    x = inputs()
    with pytest.raises(by.BayesifyError, match="not finite in batch 1 of epoch 1: the model's prediction"):
        by.distill(noisy(), [x, torch.full_like(x, torch.nan)], epochs=2)
    with pytest.raises(by.BayesifyError, match="epoch 1: the student diverged"):
        by.distill(noisy(), [x] * 8, epochs=2, lr=1e30)


# The page.


def test_the_page_is_that_of_the_stored_figures_and_the_documentation_has_its_rows() -> None:
    stored = json.loads(RESULTS.read_text())["results"]
    text = RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    assert page(stored) == text
    documented = (RESULTS.parents[2] / "docs" / "distill.md").read_text(encoding="utf-8").split("## What is lost")[1]
    rows = [line for line in documented.splitlines() if line.startswith("| ")]
    assert len(rows) > 4 and set(rows) <= set(text.splitlines())
