"""Mistakes that were silent once, or failed with a message that helps nobody, each made as a user makes it."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bayesify as by
from bayesify.errors import BayesifyError

X, Y = torch.randn(32, 4), torch.arange(32) % 3
METHODS = [
    by.Rank1(2),
    by.IBNN(2),
    by.MeanField(),
    by.ECMP(2),
    by.BatchEnsemble(2),
    by.LowRankEnsemble(2),
    by.Ensemble(2),
]
UNTRAINED = "none of its .* posterior tensors"


def network(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        by.elbo(model, X, Y, n=32).loss.backward()
        optimizer.step()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained_by_an_optimizer_made_before(method: Any = METHODS[0]) -> nn.Module:
    plain = network()
    optimizer = sgd(plain.parameters())
    model = by.convert(plain, method)
    train(model, optimizer)
    return model


# An optimizer made before `convert`.


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_an_optimizer_made_before_convert_is_warned_of_once(method: Any) -> None:
    model = trained_by_an_optimizer_made_before(method)
    with pytest.warns(UserWarning, match=UNTRAINED):
        by.predict(model, X, 2)
    by.predict(model, X, 2)  # warnings are errors


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_posterior_that_was_trained_is_not_warned_of(method: Any) -> None:
    model = by.convert(network(), method)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-4), steps=1)
    by.predict(model, X, 2)


@pytest.mark.parametrize(
    "step",
    [
        lambda model: copy.deepcopy(model),  # as early stopping keeps the best
        lambda model: model.zero_grad(set_to_none=True) or model,
        lambda model: model.eval(),
        lambda model: model.double().float(),
    ],
    ids=["copied", "gradients cleared", "evaluation", "moved"],
)
def test_what_is_done_to_the_model_does_not_hide_its_untrained_posterior(step: Callable[[Any], nn.Module]) -> None:
    model = step(trained_by_an_optimizer_made_before())
    with pytest.warns(UserWarning, match=UNTRAINED):
        by.predict(model, X, 2)


def test_a_fused_optimizer_made_before_convert_is_warned_of() -> None:
    """It writes to tensors without counting their versions."""
    plain = network()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    model = by.convert(plain, by.Rank1(2))
    train(model, optimizer)
    with pytest.warns(UserWarning, match=UNTRAINED):
        by.predict(model, X, 2)


def test_saving_an_untrained_posterior_is_warned_of_and_loading_a_trained_one_is_not(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=UNTRAINED):
        by.save(trained_by_an_optimizer_made_before(), tmp_path / "untrained")
    model = by.convert(network(), by.Rank1(2))
    train(model, sgd(model.parameters()))
    by.save(model, tmp_path / "trained")
    loaded = by.load(network(), tmp_path / "trained")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    by.predict(loaded, X, 2)


def only_called(model: nn.Module) -> None:
    by.elbo(model, X, Y, n=32)


def frozen(model: nn.Module) -> None:
    model.requires_grad_(False)
    model[0].weight.requires_grad_(True)  # type: ignore[index, union-attr]
    train(model, sgd([model[0].weight]))  # type: ignore[index, union-attr]


def loaded(model: nn.Module) -> None:
    """A plain network's weights, before training."""
    model.load_state_dict({f"1.{name}": p for name, p in network().state_dict().items()}, strict=False)


def half(model: nn.Module) -> None:
    """Rounding moves the network's weights, and not the posterior."""
    only_called(model)
    model.bfloat16()


def initialised(model: nn.Module) -> None:
    """After a first call."""
    only_called(model)
    nn.init.normal_(model[0].weight)  # type: ignore[index, union-attr, arg-type]


def rescaled(model: nn.Module) -> None:
    """Each call changes this weight in place."""
    model[0] = nn.Embedding(5, 4, max_norm=0.1)  # type: ignore[operator]
    model.train()(torch.arange(5))


@pytest.mark.parametrize("use", [only_called, frozen, loaded, half, initialised, rescaled])
def test_a_posterior_that_nobody_meant_to_train_is_not_warned_of(use: Callable[[nn.Module], None]) -> None:
    model = by.convert(nn.Sequential(nn.Linear(4, 4), network()), {"1": by.Rank1(2)})
    use(model)
    dtype = model[1][0].weight.dtype  # type: ignore[index, union-attr]
    by.predict(model, torch.arange(5) if use is rescaled else X.to(dtype), 2)


@pytest.mark.parametrize("method", [by.MCDropout(0.1), by.DropConnect(0.1)], ids=str)
def test_methods_without_posterior_tensors_are_not_warned_of(method: Any) -> None:
    by.predict(trained_by_an_optimizer_made_before(method), X, 2)


def test_check_names_what_an_optimizer_made_before_convert_does_not_train() -> None:
    plain = network()
    early = sgd(plain.parameters())
    model = by.convert(plain, by.Rank1(2))
    with pytest.raises(BayesifyError, match=r"8 of 8 posterior tensors, such as '0.posterior.\w+'.*parameter_groups"):
        by.check(model, X, optimizer=early)
    late = sgd(by.parameter_groups(model, lr=0.1, posterior_lr=1.0))
    assert by.check(model, X, optimizer=late) == by.check(model, X)
    posterior = [p for name, p in model.named_parameters() if "posterior" in name]
    by.check(model, X, optimizer=[early, sgd(posterior)])
    for p in posterior:
        p.requires_grad_(False)
    by.check(model, X, optimizer=early)
    with pytest.raises(BayesifyError, match=r"optimizer=float: expected a torch.optim.Optimizer"):
        by.check(model, X, optimizer=[0.1])  # type: ignore[list-item]


# Training in evaluation mode.


def by_elbo(model: nn.Module) -> None:
    by.elbo(model, X, Y, n=32).loss.backward()


def by_hand(model: nn.Module) -> None:
    (F.cross_entropy(model(X), Y) + by.kl(model) / 32).backward()


def by_gradient(model: nn.Module) -> None:
    F.cross_entropy(model(X), Y).backward()
    by.add_kl_grad_(model, n=32)


@pytest.mark.parametrize("step", [by_elbo, by_hand, by_gradient])
def test_training_in_evaluation_mode_is_warned_of_once(step: Callable[[nn.Module], None]) -> None:
    model = by.convert(network(), by.Rank1(2)).eval()
    with pytest.warns(UserWarning, match=r"trained in evaluation mode.*model.train\(\)"):
        step(model)
    step(model)
    step(by.convert(network(), by.Rank1(2)))


def test_the_bound_of_validation_rows_is_not_taken_for_training() -> None:
    model = by.convert(network(), by.Rank1(2)).eval()
    by.elbo(model, X, Y, n=32)
    with torch.no_grad():
        by.elbo(model, X, Y, n=32)


# Numbers, likelihoods and labels that don't fit.


def gaussian(y: Tensor) -> Callable[[nn.Module], Any]:
    return lambda model: by.elbo(model, X, y, n=32, likelihood=by.Gaussian()).loss.backward()


def labelled(y: Tensor) -> Callable[[nn.Module], Any]:
    return lambda model: by.elbo(model, X, y, n=32)


def with_likelihood(given: Any) -> Callable[[nn.Module], Any]:
    return lambda model: by.elbo(model, X, Y, n=32, likelihood=given)


def predicted_with(given: Any) -> Callable[[nn.Module], Any]:
    return lambda model: by.predict(model, X, 2, likelihood=given)


HOLE = X.clone()
HOLE[3, 1] = torch.nan


def test_a_network_that_returns_probabilities_is_warned_of() -> None:
    """A softmax of a softmax makes all classes much alike."""
    model = by.convert(nn.Sequential(network(), nn.Softmax(-1)), by.Rank1(2))
    with pytest.warns(UserWarning, match="outputs are probabilities .* leave out its softmax"):
        by.predict(model, X, 2)
    by.predict(by.convert(nn.Sequential(network(), nn.LogSoftmax(-1)), by.Rank1(2)), X, 2)


def test_a_loader_that_shuffles_is_warned_of() -> None:
    model, rows = by.convert(network(), by.Rank1(2)), TensorDataset(X, Y)
    with pytest.warns(UserWarning, match="the loader shuffles.*shuffle=False"):
        by.predict(model, DataLoader(rows, batch_size=8, shuffle=True), 2)
    assert torch.equal(
        by.predict(model, DataLoader(rows, batch_size=8), 2).probs, by.predict(model, X, 2, batch_size=8).probs
    )


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "n smaller than the batch": (lambda m: by.elbo(m, X, Y, n=8), "alone has 32 rows, more than n=8 training examples"),
    "labels from 1": (labelled(Y + 1), "labels of type torch.int64 from 1 to 3: expected integers .* from 0 to 2"),
    "a label of -100": (labelled(Y.where(Y > 0, -100)), "from -100 to 2: expected .* leave out rows without a label"),
    "labels as floats": (labelled(Y.float()), r"labels of type torch.float32 .*: expected integers \(torch.long\)"),
    "labels as bytes": (labelled(Y.byte()), r"labels of type torch.uint8 .*: expected integers \(torch.long\)"),
    "NaN inputs": (lambda m: by.elbo(m, HOLE, Y, n=32), r"1 NaN, the first at \(3, 1\) of shape \(32, 4\). Remove"),
    "NaN inputs later": (
        lambda m: [by.elbo(m, x, Y, n=32).loss.backward() for x in (X, HOLE)],
        r"the loss is nan, as the batch has 1 NaN, the first at \(3, 1\)",
    ),
    "NaN inputs of a prediction": (lambda m: by.predict(m, HOLE, 2), "1 of 32 rows .* row 3: the inputs are not fin"),
    "NaN targets": (gaussian(torch.full((32, 3), torch.nan)), r"96 NaN, the first at \(0, 0\) of shape \(32, 3\)"),
    "infinite inputs": (lambda m: by.elbo(m, X / 0, Y, n=32), "the batch has 128 infinite numbers, the first at"),
    "infinite targets": (gaussian(torch.full((32, 3), torch.inf)), "the loss is inf, as the batch has 96 infinite"),
    "a negative beta": (lambda m: by.elbo(m, X, Y, n=32, beta=-1.0), "beta=-1.0: expected the weight of the KL"),
    "a beta that is NaN": (lambda m: by.add_kl_grad_(m, n=32, beta=torch.nan), "beta=nan: expected the weight"),
    "labels that do not calibrate": (
        lambda m: by.Categorical().calibrate(by.predict(m, X, 2, draws=True), Y + 1),
        "calibrate: labels from 1 to 3; expected integers from 0 to 2",
    ),
    "load's arguments swapped": (lambda m: by.load("file", m), "expected a network .*, got str"),  # type: ignore[arg-type, type-var]
    "a likelihood's class": (with_likelihood(by.Gaussian), r"it is a class, so call it: by.Gaussian\(\)"),
    "a likelihood's name": (with_likelihood("gaussian"), "likelihood='gaussian': expected what a call of by.Categor"),
    "a loss": (with_likelihood(F.cross_entropy), "likelihood=<function cross_entropy.*not a loss"),
    "a module that is a loss": (with_likelihood(nn.CrossEntropyLoss()), r"likelihood=CrossEntropyLoss\(\): expected"),
    "a likelihood's class to predict": (predicted_with(by.Bernoulli), r"by.Bernoulli\(\)"),
    "a likelihood's name to predict": (predicted_with("bernoulli"), "likelihood='bernoulli': expected"),
    "a name to distill": (
        lambda m: by.distill(m, [X], epochs=1, likelihood="categorical"),  # type: ignore[arg-type]
        "likelihood='categorical': expected",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_value_that_does_not_fit_is_refused(mistake: str) -> None:
    act, message = REFUSED[mistake]
    with pytest.raises(BayesifyError, match=message):
        act(by.convert(network(), by.Rank1(2)))


def test_one_output_has_no_classes() -> None:
    """Its softmax is 1 for everybody."""
    model = by.convert(network(1), by.Rank1(2))
    for act in (lambda: by.predict(model, X, 2), lambda: by.elbo(model, X, 0 * Y, n=32)):
        with pytest.raises(BayesifyError, match=r"a single class always has probability 1.*by.Bernoulli\(\)"):
            act()
    assert by.predict(model, X, 2, likelihood=by.Bernoulli()).probs.shape == (32, 1)


def test_labels_and_losses_are_not_looked_at_on_an_accelerator() -> None:
    """The meta device has no numbers, so that each look would fail."""
    model = by.convert(network(), by.Rank1(2)).to("meta")
    by.elbo(model, X.to("meta"), (Y + 7).to("meta"), n=32).loss.backward()


# Precision.


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_posterior_stays_float32_in_a_half_network(method: Any) -> None:
    found = by.convert(network(), method).half()
    assert found[0].weight.dtype == torch.float16
    assert {p.dtype for name, p in found.named_parameters() if "posterior" in name} == {torch.float32}
    assert by.kl(found).dtype == torch.float32 and by.kl(found).isfinite()


@pytest.mark.parametrize("method", [*METHODS, by.MCDropout(0.1), by.DropConnect(0.1)], ids=str)
def test_a_default_type_of_float64_gives_what_a_double_network_gives(method: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = by.convert(network(), method).double()
    torch.set_default_dtype(torch.float64)
    try:
        model = by.convert(network(), method)
        model.load_state_dict(expected.state_dict())
        by.elbo(model, X.double(), Y, n=32).loss.backward()
        found = by.predict(model, X.double(), 4).probs
        by.save(model, tmp_path / "model")
        assert torch.equal(by.predict(by.load(network(), tmp_path / "model"), X.double(), 4).probs, found)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float64
    assert torch.allclose(found, by.predict(expected, X.double(), 4).probs)


# TorchScript.


@pytest.mark.parametrize("compiled", [lambda m: torch.jit.trace(m, X), torch.jit.script], ids=["trace", "script"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torch_jit_is_told_what_it_can_take(compiled: Callable[[nn.Module], Any]) -> None:
    model = by.convert(network(), by.Rank1(2)).eval()
    with pytest.raises(BayesifyError, match=r"torch.jit calls them alone: give it by.draw\(model\)"):
        compiled(model)
    drawn = by.draw(model)
    assert torch.allclose(compiled(drawn)(X), drawn(X))


# A torchvision that doesn't fit.


def test_a_torchvision_for_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's metrics import it wherever it is installed."""
    (tmp_path / "torchvision").mkdir()
    code = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "bayesify.lab._torchvision", raising=False)
    with pytest.raises(BayesifyError, match=r"torchvision .*nms does not exist.* torch 2.*pip"):
        importlib.import_module("bayesify.lab._torchvision")
