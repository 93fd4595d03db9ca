"""Numbers at the edge: NaN and infinity, heavy tails, half precision, and batches of the smallest sizes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ARCHITECTURES, METHODS, every_method
from torch import Tensor, nn

import bayesify as by
from bayesify.conversion.explain_not_finite import explain_not_finite
from bayesify.lab.recipes import Recipe
from bayesify.lab.training import BayesianModule, NotFiniteError, train
from bayesify.methods.base import Method

# A number that is not finite names the layer, the step and the likely cause, and the last good checkpoint is kept.


def small(*overrides: str) -> Recipe:
    """Of 15 batches in an epoch, with a checkpoint after every fourth."""
    values = {
        "data": {"limit": 120, "batch_size": 8},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "method": {"name": "MeanField"},
        "training": {"epochs": 2, "checkpoint_steps": 4, "accelerator": "cpu"},
        "evaluation": {"samples": 2},
    }
    return Recipe.of(values, overrides)


def loss(module: BayesianModule, batch: tuple[Tensor, Tensor]) -> None:
    """Weights that a step before made infinite."""
    nn.init.constant_(last_layer(module).weight, float("inf"))


def gradient(module: BayesianModule, batch: tuple[Tensor, Tensor]) -> None:
    """A finite loss with an infinite derivative."""
    last_layer(module).weight.register_hook(lambda grad: grad / 0)


def posterior_scale(module: BayesianModule, batch: tuple[Tensor, Tensor]) -> None:
    nn.init.constant_(last_layer(module).posterior.weight_log_std, 100.0)


def inputs(module: BayesianModule, batch: tuple[Tensor, Tensor]) -> None:
    prepare = module.prepare_inputs
    assert prepare is not None
    module.prepare_inputs = lambda raw: prepare(raw) / 0


def overflow(module: BayesianModule, batch: tuple[Tensor, Tensor]) -> None:
    nn.init.constant_(last_layer(module).weight, 3e38)


def last_layer(module: BayesianModule) -> Any:
    return [layer for layer in module.network.modules() if isinstance(layer, nn.Linear)][-1]


WHAT_HAPPENS: dict[str, tuple[Callable[..., None], list[str], str]] = {
    "loss": (loss, [], r"the loss is (nan|inf) at step 6: \S+\.weight is not finite\. An earlier step was too large"),
    "gradient": (gradient, [], r"a gradient is (nan|inf) at step 7.*the gradient of \S+\.weight is not finite"),
    "posterior scale": (
        posterior_scale,
        ["training.anneal=0"],
        r"at step 6: layer '\S+' has an infinite or undefined KL: its posterior\.weight_log_std is between 100 and 100",
    ),
    "inputs": (inputs, [], r"at step 6: the inputs are not finite\. Remove or replace such rows"),
    "overflow": (
        overflow,
        ["method=Rank1"],
        r"at step 6: layer '\S+' is the first whose output is not finite: its inputs reach \S+,",
    ),
}


@pytest.mark.parametrize("what", WHAT_HAPPENS)
def test_a_non_finite_number_names_layer_step_and_cause_and_keeps_the_last_good_checkpoint(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happens, overrides, message = WHAT_HAPPENS[what]
    step = BayesianModule.training_step

    def fails(self: BayesianModule, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.batches_done == 6:
            happens(self, batch)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(BayesianModule, "training_step", fails)
    with pytest.raises(NotFiniteError, match=message) as caught:
        train(small(*overrides), tmp_path / "run", progress=False)
    assert "The last checkpoint is kept" in str(caught.value) and "training.lr" in str(caught.value)
    saved = torch.load(tmp_path / "run" / "checkpoint.ckpt", weights_only=True)
    assert saved["batches_done"] == 4
    assert all(torch.isfinite(tensor).all() for tensor in saved["state_dict"].values())


def test_a_step_that_is_too_large_does_not_replace_the_checkpoint(tmp_path: Path) -> None:
    """The loss before it is finite, and so are its gradients."""
    recipe = small("training.lr=1e38", "training.posterior_lr=1e38", "training.checkpoint_steps=1")
    with pytest.raises(NotFiniteError, match=r"after step 1 the network is not finite: layer .* KL.*training\.lr"):
        train(recipe, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "checkpoint.ckpt").exists()


def test_a_non_finite_prediction_in_validation_names_the_layer_and_does_not_stop_early_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With training.patience, Lightning would take a NaN for the end of training."""
    step = BayesianModule.validation_step

    def fails(self: BayesianModule, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        with torch.no_grad():
            last_layer(self).bias.fill_(float("nan"))
        step(self, batch, batch_idx)

    monkeypatch.setattr(BayesianModule, "validation_step", fails)
    with pytest.raises(NotFiniteError, match=r"not finite.*\.bias"):
        train(small("training.patience=1"), tmp_path / "run", progress=False)


def test_bfloat16_autocast_trains_to_finite_numbers(tmp_path: Path) -> None:
    run = train(small("training.precision=bf16-mixed"), tmp_path / "run", progress=False)
    assert all(torch.isfinite(p).all() for p in run.load().model.parameters())


def mlp(method: Method | None = None) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return net if method is None else by.convert(net, method)


@every_method
def test_a_prediction_that_is_not_finite_names_the_layer(method: Method) -> None:
    model, x = mlp(method), torch.randn(6, 4)
    nn.init.constant_(model[3].weight, float("nan"))
    with pytest.raises(NotFiniteError, match=r"the prediction is not finite.*3\.weight is not finite"):
        by.predict(model, x, 4)


def test_half_precision_that_overflows_is_told_from_a_step_that_was_too_large() -> None:
    model, x = mlp(by.Rank1(2)).half(), 1000 * torch.randn(6, 4).half()
    with torch.no_grad():
        model[0].weight.mul_(1000)
    found = explain_not_finite(model, x)
    assert "layer '0' is the first whose output is not finite" in found
    assert "the largest float16 is 6.55e+04. Here, use bfloat16 or float32" in found


def test_a_search_for_the_layer_changes_nothing() -> None:
    model, x = mlp(by.MeanField()), torch.randn(6, 4)
    before = copy.deepcopy(model.state_dict())
    assert "every parameter, layer output and layer's KL is finite" in explain_not_finite(model, x)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_gradient_that_is_named_is_the_one_nearest_to_the_loss() -> None:
    model = mlp(by.MeanField())
    model(torch.randn(6, 4)).mul(float("inf")).sum().backward()
    assert explain_not_finite(model).startswith("the gradient of 3.")


def test_masks_may_be_infinite() -> None:
    class Masked(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 3))
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0]))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x) + self.mask
            return out

    model, x = by.convert(Masked(), by.Rank1(2)), torch.randn(5, 4)
    assert by.predict(model, x).probs[:, 1].eq(0).all()
    assert "is finite" in explain_not_finite(model, x)


# Heavy tails


@pytest.mark.parametrize("optimizer", ["Adam", "SGD with clipped gradients"])
def test_cauchy_factors_stay_finite_over_long_runs(optimizer: str) -> None:
    x = torch.randn(256, 8)
    y = x[:, :3].argmax(1)
    model = by.convert(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), by.Rank1(2, posterior="cauchy"))
    adam = optimizer == "Adam"
    steps = torch.optim.Adam(model.parameters(), 0.01) if adam else torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for _ in range(2000):
        rows = torch.randint(256, (16,))
        steps.zero_grad()
        by.elbo(model, x[rows], y[rows], n=256).loss.backward()
        if not adam:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
    assert all(torch.isfinite(p).all() for p in model.parameters()) and torch.isfinite(by.kl(model))
    assert (by.predict(model, x, 20).label == y).float().mean() > 0.9


# Half precision


def step_and_predict(model: nn.Module, x: Tensor, autocast: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and the KL of a training step with finite gradients, and predicted probabilities."""
    y = torch.arange(len(x)) % 3
    context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    with context:
        torch.manual_seed(1)
        out = by.elbo(model, x, y, n=len(x))
    out.loss.backward()
    by.add_kl_grad_(model, n=len(x))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with context:
        return out.loss.detach().float(), out.kl.detach(), by.predict(model, x, 8, seed=3).probs.float()


@pytest.mark.filterwarnings("ignore:.*noise.*:UserWarning")  # that the smallest noise is rounded away is said elsewhere
@pytest.mark.parametrize("how", ["converted in it", "changed to it", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@every_method
def test_half_precision_is_close_to_float32(method: Method, dtype: torch.dtype, how: str) -> None:
    architecture = ARCHITECTURES["residual" if "norm" in method.roles else "mlp"]
    x = architecture.batch(6)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return architecture.make()

    expected = step_and_predict(by.convert(model(), method), x)
    if how == "autocast":
        found = step_and_predict(by.convert(model(), method), x, dtype)
    elif how == "changed to it":
        found = step_and_predict(by.convert(model(), method).to(dtype), x.to(dtype))
    else:
        found = step_and_predict(by.convert(model().to(dtype), method), x.to(dtype))
    assert all(torch.isfinite(value).all() for value in found)
    assert torch.allclose(found[1], expected[1], rtol=0.02, atol=0.01)
    assert (found[2] - expected[2]).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@every_method
def test_the_kl_of_small_scales_stays_finite_after_half(method: Method, dtype: torch.dtype) -> None:
    """A scale of 6e-6 has a square that float16 rounds to 0."""
    model = by.convert(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3)), method)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("rho", "log_std")):
                p.fill_(-12.0)
    expected = by.kl(model)
    by.add_kl_grad_(model.to(dtype), n=10)
    assert torch.allclose(by.kl(model), expected, rtol=1e-3)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# The smallest sizes: each is right, or refused with a clear message.

X = torch.linspace(-1, 1, 24).reshape(6, 4)
Y = torch.zeros(6).long()


def net(method: Method, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return by.convert(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, outputs)), method)


def one_row(m: Method) -> bool:
    """The same draws predict the same for a row alone as among others."""
    out = by.elbo(net(m), X[:1], Y[:1], n=1)
    out.loss.backward()
    alone, among = by.predict(net(m), X[:1], 8).probs, by.predict(net(m), X, 8).probs[:1]
    return bool(torch.isfinite(out.loss)) and torch.allclose(alone, among, atol=1e-6)


def one_sample(m: Method) -> bool:
    """One draw has no epistemic uncertainty, and predicts what the drawn network does."""
    model = net(m)
    p = by.predict(model, X, 1, seed=5)
    drawn = by.draw(model, 5).eval()(X).softmax(-1)
    return bool((p.epistemic.abs() < 1e-6).all()) and torch.allclose(p.probs, drawn, atol=1e-6)


def one_sample_of_a_regression(m: Method) -> bool:
    p = by.predict(net(m), X, 1, likelihood=by.Gaussian(4.0))
    low, high = p.interval(0.9)
    return bool((p.epistemic_std == 0).all()) and torch.allclose(high - low, torch.full_like(low, 1.645), atol=1e-2)


def more_components_than_rows(m: Method) -> bool:
    out = by.elbo(net(m), X[:2], Y[:2], n=2)
    out.loss.backward()
    both = by.elbo(net(m), X[:2], Y[:2], n=2, mixture="replicate", bound="mixture")
    return bool(torch.isfinite(out.loss) and torch.isfinite(both.loss))


def an_empty_call(m: Method) -> bool:
    return net(m).train()(X[:0]).shape == net(m).eval()(X[:0]).shape == (0, 3)


def an_empty_batch_in_a_loader(m: Method) -> bool:
    return torch.allclose(by.predict(net(m), [X[:2], X[:0], X[2:]], 8).probs, by.predict(net(m), X, 8).probs, atol=1e-6)


RIGHT = (
    *(one_row, one_sample, one_sample_of_a_regression, more_components_than_rows),
    *(an_empty_call, an_empty_batch_in_a_loader),
)
REFUSED: dict[str, tuple[Callable[[Method], object], str]] = {
    "one class": (lambda m: by.predict(net(m, 1), X), "a single class always has probability 1"),
    "one class in training": (lambda m: by.elbo(net(m, 1), X, Y, n=6), "a single class always has probability 1"),
    "one class adaptively": (lambda m: by.predict(net(m, 1), X, by.Adaptive(max=40)), "a single class always has"),
    "an empty prediction": (lambda m: by.predict(net(m), X[:0]), r"nothing to predict: the input has shape \(0, 4\)"),
    "an empty loader": (lambda m: by.predict(net(m), []), "nothing to predict: the data has no batches"),
    "no samples": (lambda m: by.predict(net(m), X, 0), "samples=0: expected an integer >= 1"),
    "no samples in training": (lambda m: by.elbo(net(m), X, Y, n=6, samples=0), "samples=0: expected an integer >= 1"),
    "no training examples": (lambda m: by.elbo(net(m), X, Y, n=0), "n=0: expected the number of training examples"),
    "an empty training batch": (lambda m: by.elbo(net(m), X[:0], Y[:0], n=6), "no rows"),
    "an empty batch of out-of-distribution inputs": (lambda m: by.uncertainty_loss(net(m), X[:0]), "no rows"),
    "a check of one row": (lambda m: by.check(net(m), X[:1]), "at least 2 rows"),
    "a check of no rows": (lambda m: by.check(net(m), X[:0]), "at least 2 rows"),
}


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
@every_method
def test_the_smallest_sizes_are_right(method: Method, case: Callable[[Method], bool]) -> None:
    assert case(method)


@pytest.mark.parametrize("case", REFUSED)
def test_the_smallest_sizes_that_have_no_answer_are_refused(case: str) -> None:
    call, message = REFUSED[case]
    for method in METHODS.values():
        with pytest.raises(by.BayesifyError, match=message):
            call(method)
