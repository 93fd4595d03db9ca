"""Attacks against closed forms and explicit draws; what they may change, and what they must leave alone."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.errors import BayesifyError
from bayesify.lab import load
from bayesify.lab.attacks import ATTACKS, SIZES, AttackError, AttackResult, PosteriorPredictive, attack
from bayesify.lab.data import Arrays, Classes, DataError, Images, Reals, TensorExamples
from bayesify.lab.evaluation import predictive
from bayesify.lab.models import build
from bayesify.lab.recipes import Recipe
from bayesify.lab.trained import Trained

GREY = Images((1, 4, 4), mean=(0.5,), std=(0.25,))
COLOURED = Images((3, 4, 4), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


def made(model: nn.Module, inputs: Any = GREY, classes: int = 2, **evaluation: Any) -> Trained:
    recipe = Recipe.of({"evaluation": evaluation})
    return Trained(model, by.Categorical(), inputs, Classes(tuple(map(str, range(classes)))), recipe)


def linear(classes: int = 2) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))


def pictures(rows: int = 12, classes: int = 2, shape: tuple[int, ...] = (1, 4, 4)) -> TensorExamples:
    return TensorExamples(0.2 + 0.6 * torch.rand(rows, *shape), torch.arange(rows) % classes)


def bayesian(classes: int = 5) -> nn.Module:
    layers = nn.Conv2d(3, 6, 3), nn.ReLU(), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, classes)
    return by.convert(nn.Sequential(*layers), by.Rank1(4, prior_std=0.5)).eval()


@cache
def digits(method: str) -> tuple[Trained, TensorExamples]:
    """A classifier of digits, trained for seconds, and its test images."""
    torch.manual_seed(0)
    data = load("digits")
    network = build("cnn", shape=data.inputs.shape, outputs=10)
    model = network if method == "none" else by.convert(network, getattr(by, method)())
    x, y = data.inputs.prepare(data.train.raw(torch.arange(len(data.train)))), data.train.targets
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(6):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            if method != "none":
                loss = loss + by.kl(model) / len(x)
            loss.backward()
            optimizer.step()
    optimizer.zero_grad()
    trained = Trained(model.eval(), by.Categorical(), data.inputs, data.targets, Recipe.of({}))
    test = data.test.take(torch.arange(200))
    assert isinstance(test, TensorExamples)
    return trained, test


def unit(examples: TensorExamples) -> Tensor:
    return examples.x.float() / 255 if examples.x.dtype == torch.uint8 else examples.x


# Closed forms.


@pytest.mark.parametrize("classes", [2, 7])
def test_fgsm_on_a_linear_model_is_its_closed_form(classes: int) -> None:
    model, examples = linear(classes), pictures(classes=classes)
    found = attack(made(model, classes=classes), examples, name="fgsm", epsilon=0.1)
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    logits = model(GREY.prepare(examples.x))
    pull = (logits.softmax(-1) - F.one_hot(examples.targets, classes)) @ layer.weight
    expected = examples.x + 0.1 * pull.sign().view_as(examples.x)
    assert torch.allclose(found.inputs, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["pgd", "bim", "momentum"])
def test_steps_on_a_linear_model_end_in_the_corner(name: str) -> None:
    model, examples = linear(), pictures()
    found = attack(made(model), examples, name=name, epsilon=0.1, step_size=0.02)
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    other = layer.weight[1 - examples.targets] - layer.weight[examples.targets]
    expected = examples.x + 0.1 * other.sign().view_as(examples.x)
    assert torch.allclose(found.inputs, expected, atol=1e-6)


def test_a_step_in_the_euclidean_norm_goes_along_the_gradient() -> None:
    model, examples = linear(), pictures()
    found = attack(made(model), examples, name="fgsm_l2", epsilon=0.3)
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    other = layer.weight[1 - examples.targets] - layer.weight[examples.targets]
    expected = examples.x + 0.3 * F.normalize(other).view_as(examples.x)
    assert torch.allclose(found.inputs, expected, atol=1e-5)


def test_deepfool_crosses_a_line_and_no_more() -> None:
    """The distance to the line w·x + b = 0 in the maximum norm is |w·x + b| / ‖w‖₁."""
    model, examples = linear(), pictures()
    right = TensorExamples(examples.x, model(GREY.prepare(examples.x)).argmax(-1))
    found = attack(made(model), right, name="deepfool", epsilon=1.0)
    logits = model(GREY.prepare(examples.x)).detach()
    weight = model[1].weight.detach() / GREY.std[0]
    distance = (logits[:, 0] - logits[:, 1]).abs() / (weight[0] - weight[1]).abs().sum()
    moved = (found.inputs - examples.x).flatten(1).abs().amax(1)
    assert found.robust_accuracy == 0 and torch.allclose(moved, 1.02 * (distance + 1e-4), atol=1e-5)


# The loss.


def explicit(model: nn.Module, x: Tensor, inputs: Images, indices: range, seed: int) -> Tensor:
    """log mean_s p_s from frozen networks, one for each draw, through plain autograd."""
    networks = [by.draw(model, seed, index=index) for index in indices]
    return torch.stack([network(inputs.prepare(x)).log_softmax(-1) for network in networks]).logsumexp(0) - np.log(
        len(networks)
    )


METHODS = {
    "Rank1": by.Rank1(4, prior_std=0.5),
    "MeanField": by.MeanField(),
    "ECMP": by.ECMP(3),
    "MCDropout": by.MCDropout(0.3),
    "LowRankEnsemble": by.LowRankEnsemble(3),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_and_its_gradient_are_those_of_explicit_draws(name: str) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(24, 5)
    )
    model = by.convert(network, METHODS[name])
    x, y = torch.rand(7, 3, 4, 4), torch.randint(5, (7,))
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    target = PosteriorPredictive(model, COLOURED.prepare, samples=6, seed=5)
    loss = F.nll_loss(target(found), y, reduction="none")
    by_hand = -explicit(model, expected, COLOURED, range(6), seed=5).gather(1, y[:, None])[:, 0]
    assert torch.allclose(loss, by_hand, atol=1e-5)
    loss.sum().backward(), by_hand.sum().backward()
    assert expected.grad is not None and expected.grad.abs().max() > 1e-3
    assert torch.allclose(found.grad, expected.grad, atol=1e-5)
    by_predict = by.predict(model, COLOURED.prepare(x), 6, seed=5).log_probs
    assert torch.allclose(target(x), by_predict, atol=1e-5) and not target(x).requires_grad


def test_the_gradient_of_any_class_is_right_in_double_precision() -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), by.Rank1(2)).double()
    target = PosteriorPredictive(model, lambda x: x, samples=4)
    target.log_probs = lambda x, index: target.drawn.write_draw(0, index)(x).log_softmax(-1)  # type: ignore[method-assign]
    assert torch.autograd.gradcheck(target, torch.rand(3, 4, dtype=torch.float64, requires_grad=True))


def test_foolbox_attacks_the_posterior_predictive() -> None:
    """One step on many draws goes along the sign of the gradient of -log mean_s p_s(y)."""
    model, examples = bayesian(), pictures(classes=5, shape=(3, 4, 4))
    seen: list[int] = []
    original = PosteriorPredictive.__init__

    def spy(self: PosteriorPredictive, *args: Any, **options: Any) -> None:
        seen.append(options["seed"])
        original(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosteriorPredictive, "__init__", spy)
        found = attack(made(model, COLOURED, 5), examples, name="fgsm", epsilon=0.05, samples=8, seed=3)
    x = examples.x.clone().requires_grad_()
    log_probs = explicit(model, x, COLOURED, range(8), seed=seen[0])
    F.nll_loss(log_probs, examples.targets, reduction="sum").backward()
    assert x.grad is not None
    assert torch.allclose(found.inputs, examples.x + 0.05 * x.grad.sign(), atol=1e-6)


def test_frozen_draws_stay_and_fresh_ones_go_on() -> None:
    model, x = bayesian(), torch.rand(5, 3, 4, 4)
    frozen = PosteriorPredictive(model, COLOURED.prepare, samples=4, seed=1)
    assert torch.equal(frozen(x), frozen(x))
    fresh = PosteriorPredictive(model, COLOURED.prepare, samples=4, draws="fresh", seed=1)
    first, second = fresh(x), fresh(x)
    assert torch.equal(first, frozen(x)) and not torch.allclose(first, second, atol=1e-4)
    assert torch.allclose(second, explicit(model, x, COLOURED, range(4, 8), seed=1), atol=1e-5)


def test_the_gradient_is_of_the_draws_that_were_called_even_when_others_came_since() -> None:
    model, x = bayesian(), torch.rand(5, 3, 4, 4).requires_grad_()
    fresh = PosteriorPredictive(model, COLOURED.prepare, samples=4, draws="fresh")
    first = fresh(x)
    fresh(x)
    (found,) = torch.autograd.grad(first[:, 0].sum(), x)
    (expected,) = torch.autograd.grad(explicit(model, x, COLOURED, range(4), seed=0)[:, 0].sum(), x)
    assert torch.allclose(found, expected, atol=1e-5)


def test_only_one_draw_is_held_at_a_time() -> None:
    held: list[int] = []

    class Counted(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self) -> None:
            super().__init__(lambda tensor: (held.append(tensor.numel()), tensor)[1], lambda tensor: tensor)

    for samples in (1, 16):
        x = torch.rand(5, 3, 4, 4).requires_grad_()
        with Counted():
            PosteriorPredictive(bayesian(), COLOURED.prepare, samples=samples)(x)
    assert len(held) == 4 and held[:2] == held[2:]  # x and the result, whatever the draws


# What an attack may change.


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_keeps_to_its_ball_and_to_the_range_of_pixels(name: str) -> None:
    trained, examples = made(bayesian(), COLOURED, 5), TensorExamples(torch.rand(9, 3, 4, 4), torch.arange(9) % 5)
    epsilon = SIZES[ATTACKS[name].norm][0]
    found = attack(trained, examples, name=name, steps=4, samples=4, batch_size=4)
    assert found.inputs.shape == examples.x.shape and found.inputs.dtype == torch.float32
    assert float(found.inputs.min()) >= 0 and float(found.inputs.max()) <= 1
    order = {"linf": float("inf"), "l2": 2, "l1": 1}[ATTACKS[name].norm]
    size = torch.linalg.vector_norm((found.inputs - examples.x).flatten(1), order, dim=1)
    assert float(size.max()) <= epsilon * (1 + 1e-5) + 1e-6
    assert float(size.max()) > 0 and found.epsilon == epsilon
    assert found.steps == (4 if ATTACKS[name].steps else None)
    assert (found.step_size is not None) == ATTACKS[name].step_size


def test_the_sizes_are_those_of_the_paper() -> None:
    """METHODS, section 4: ε 0.031, 20 steps of 0.003, S = 20."""
    found = attack(made(bayesian(), COLOURED, 5), pictures(4, 5, (3, 4, 4)))
    assert (found.epsilon, found.steps, found.step_size, found.clean.samples) == (0.031, 20, 0.003, 20)


# What comes of it.


@pytest.mark.parametrize("method", ["none", "Rank1"])
def test_an_undefended_classifier_of_digits_falls(method: str) -> None:
    trained, test = digits(method)
    options = {"epsilon": 0.15, "step_size": 0.015, "samples": 4 if method == "Rank1" else None}
    found = attack(trained, test, **options)
    noise = attack(trained, test, name="noise", **options)
    assert found.clean_accuracy > 0.9
    assert noise.robust_accuracy > found.clean_accuracy - 0.1
    assert found.robust_accuracy < noise.robust_accuracy - 0.3


def test_more_steps_are_not_weaker() -> None:
    trained, test = digits("none")
    losses = []
    for name, steps in (("fgsm", 1), ("bim", 5), ("bim", 40)):
        found = attack(trained, test, name=name, steps=steps, epsilon=0.1, step_size=0.1 / min(steps, 10))
        losses.append(float(F.nll_loss(found.adversarial.log_probs, test.targets)))
    assert losses[0] < losses[1] < losses[2]


def test_the_larger_the_ball_the_fewer_withstand() -> None:
    trained, test = digits("none")
    found = [attack(trained, test, epsilon=e, step_size=e / 8).robust_accuracy for e in (0.01, 0.05, 0.2)]
    assert found[0] > found[1] > found[2]


def test_the_predictions_are_those_of_the_model_with_draws_of_their_own() -> None:
    trained, test = digits("Rank1")
    found = attack(trained, test, samples=4, steps=3, seed=7)
    again = predictive(trained, TensorExamples(found.inputs, test.targets), samples=4, seed=7)
    before = predictive(trained, test, samples=4, seed=7)
    assert torch.equal(found.adversarial.log_probs, again.log_probs)  # type: ignore[attr-defined]
    assert torch.equal(found.clean.log_probs, before.log_probs)  # type: ignore[attr-defined]
    truth = np.r_[np.zeros(200), np.ones(200)]
    for kind in ("entropy", "epistemic"):
        values = np.r_[getattr(found.clean, kind), getattr(found.adversarial, kind)]
        assert found.average_precision[kind] == pytest.approx(average_precision_score(truth, values), abs=1e-6)
    right = (found.adversarial.label == test.targets).double().mean()
    assert found.robust_accuracy == pytest.approx(float(right))


def test_what_is_written_of_an_attack() -> None:
    trained, test = digits("none")
    found = json.loads(json.dumps(attack(trained, test, name="fgsm", epsilon=0.1).to_dict()))
    assert found["average_precision"]["epistemic"] is None and 0 < found["average_precision"]["entropy"] <= 1
    assert found["epsilon"] == 0.1 and found["steps"] is None and found["step_size"] is None
    assert found["draws"] == "frozen" and found["samples"] == 1 and found["n"] == 200
    assert found["robust_accuracy"] < found["clean_accuracy"]


# What it must leave alone.


@pytest.mark.parametrize("draws", ["frozen", "fresh"])
def test_the_seed_decides(draws: Any) -> None:
    trained, examples = made(bayesian(), COLOURED, 5), pictures(8, 5, (3, 4, 4))
    options: dict[str, Any] = {"samples": 4, "draws": draws, "steps": 5, "epsilon": 0.1}
    first = attack(trained, examples, seed=1, **options)
    torch.rand(7)
    again, other = (attack(trained, examples, seed=seed, **options) for seed in (1, 2))
    assert torch.equal(first.inputs, again.inputs) and not torch.equal(first.inputs, other.inputs)
    assert torch.equal(first.adversarial.log_probs, again.adversarial.log_probs)


def test_frozen_and_fresh_draws_differ() -> None:
    trained, examples = made(bayesian(), COLOURED, 5), pictures(8, 5, (3, 4, 4))
    frozen, fresh = (attack(trained, examples, samples=4, steps=5, draws=draws) for draws in ("frozen", "fresh"))  # type: ignore[arg-type]
    assert not torch.equal(frozen.inputs, fresh.inputs)


@pytest.mark.parametrize("method", ["none", "Rank1", "MCDropout"])
def test_model_gradients_mode_examples_and_randomness_stay(method: str) -> None:
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Dropout(0.2), nn.Linear(24, 5))
    model = network if method == "none" else by.convert(network, getattr(by, method)())
    trained, examples = made(model.train(), COLOURED, 5), pictures(6, 5, (3, 4, 4))
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    before, pixels = copy.deepcopy(model.state_dict()), examples.x.clone()
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    for name in ("pgd", "deepfool", "noise"):
        attack(trained, examples, name=name, steps=3, samples=3, draws="fresh")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is not None and bool((p.grad == 3).all()) for p in model.parameters())
    assert all(module.training for module in model.modules()) and torch.equal(examples.x, pixels)


def test_an_attack_works_where_gradients_are_off() -> None:
    trained, examples = made(bayesian(), COLOURED, 5), pictures(6, 5, (3, 4, 4))
    expected = attack(trained, examples, samples=3, steps=3).inputs
    with torch.no_grad():
        assert torch.equal(attack(trained, examples, samples=3, steps=3).inputs, expected)
    with torch.inference_mode():
        assert torch.equal(attack(trained, examples, samples=3, steps=3).inputs, expected)


def test_bytes_are_images_too() -> None:
    trained, test = digits("none")
    assert test.x.dtype == torch.uint8
    few = test.take(torch.arange(20))
    found = attack(trained, few, name="bim", steps=2)
    same = attack(trained, TensorExamples(unit(few), few.targets), name="bim", steps=2)
    assert torch.equal(found.inputs, same.inputs)


def test_the_recipe_says_how_many_draws() -> None:
    found = attack(made(bayesian(), COLOURED, 5, samples=3), pictures(4, 5, (3, 4, 4)), name="fgsm")
    assert isinstance(found, AttackResult) and found.adversarial.samples == 3


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "pdg"}, "no attack is called 'pdg'; did you mean 'pgd'"),
        ({"name": "zzz"}, "no attack is called 'zzz'; expected one of: bim, "),
        ({"epsilon": 0}, "epsilon=0: expected a number > 0"),
        ({"epsilon": -0.1}, r"epsilon=-0\.1: expected a number > 0"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"step_size": 0.0}, r"step_size=0\.0: expected a number > 0"),
        ({"steps": 0}, "steps=0: expected an integer >= 1"),
        ({"steps": 2.5}, r"steps=2\.5: expected an integer >= 1"),
        ({"draws": "melted"}, "draws='melted': expected 'frozen' or 'fresh'"),
        ({"samples": 0}, "samples=0: expected"),
        ({"batch_size": -3}, "batch_size=-3: expected an integer >= 1"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BayesifyError, match=message):
        attack(made(bayesian(), COLOURED, 5), pictures(4, 5, (3, 4, 4)), **options)


def test_what_cannot_be_attacked_is_refused() -> None:
    model, examples = linear(), pictures(4)
    recipe, classes = Recipe.of({}), Classes(("a", "b"))
    reals = Trained(model, by.Gaussian(1.0), GREY, Reals(("a", "b"), (0.0, 0.0), (1.0, 1.0)), recipe)
    with pytest.raises(AttackError, match="predicts real numbers; only classifiers can be attacked"):
        attack(reals, examples)
    arrays = Trained(model, by.Categorical(), Arrays((16,), (0.0,) * 16, (1.0,) * 16), classes, recipe)
    with pytest.raises(AttackError, match="the inputs are arrays; only classifiers of images"):
        attack(arrays, examples)
    with pytest.raises(AttackError, match="there are no examples"):
        attack(made(model), examples.take(torch.arange(0)))
    with pytest.raises(AttackError, match="labels from -1 to -1: expected 0 to 1"):
        attack(made(model), examples.with_targets(torch.full((4,), -1)))
    with pytest.raises(AttackError, match=r"pixels from .* to 25\d: expected bytes, or floats from 0 to 1"):
        attack(made(model), TensorExamples(255 * torch.linspace(0, 1, 64).view(4, 1, 4, 4), examples.targets))


def test_without_foolbox_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foolbox", None)
    with pytest.raises(DataError, match=r"an attack needs the package foolbox: pip install 'bayesify\[attacks\]'"):
        attack(made(linear()), pictures(4))


def test_foolbox_is_imported_late_and_needs_no_git() -> None:
    code = (
        "import sys, bayesify.lab.attacks as a; assert 'foolbox' not in sys.modules; "
        "from bayesify.lab.attacks.registry import foolbox; print(foolbox().__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PATH": "/nowhere"}
    )
    assert done.stdout.strip() == "foolbox", done.stderr
