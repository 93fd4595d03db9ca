"""What must hold for every case. An oracle returns if it does, and raises otherwise.

A `BayesifyError` is a refusal: bayesify says what it can't do. Anything else that is raised is a fault, and so is a
difference. What is expected comes from a network that is built again from the case's description, into which the
tensors of a draw are loaded: no attribute, hook or cache of the converted model can reach it.
"""

from __future__ import annotations

import copy
import pickle
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draws import Call, watched_calls
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

import bayesify as by
from bayesify.batches import call_with
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.layers import bayesian_layers
from fuzz.case import DTYPES, Case
from fuzz.layers import Flag

Oracle = Callable[[Case], None]
DRAWS = 5
TOLERANCE = {"float64": 1e-7, "float32": 2e-3, "bfloat16": 0.15}
"""Differences in units of the largest expected number."""


# What is expected.


def reference(case: Case, drawn: nn.Module) -> nn.Module:
    """The case's network, built again, with the tensors and the dropout masks of a draw."""
    network = case.network().eval()
    untie(network)
    network.load_state_dict(drawn.state_dict())
    for name, module in list(network.named_modules()):
        if isinstance(module, _DropoutNd):
            network.set_submodule(name, copy.deepcopy(drawn.get_submodule(name)))
    return network


def untie(network: nn.Module) -> None:
    """Give every layer tensors of its own."""
    for module in network.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(p.detach().clone())


@torch.no_grad()
def expected_draws(case: Case, model: nn.Module, batch: Any, flag: bool = False) -> Tensor:
    """The outputs of draws 0, 1, … by one network after the other."""
    outputs = []
    for index in range(DRAWS):
        network = reference(case, by.draw(model, case.seed, index=index))
        set_flags(network, flag)
        outputs.append(call_with(network, batch))
    return torch.stack(outputs)


def predicted_draws(case: Case, model: nn.Module, batch: Any, batch_size: int | None = None) -> Tensor:
    """The outputs of the same draws by `predict`."""
    options: dict[str, Any] = {"seed": case.seed, "likelihood": by.Gaussian(), "batch_size": batch_size}
    return by.predict(model, batch, DRAWS, draws=True, **options).draws


def same(case: Case, found: Tensor, expected: Tensor, what: str, tolerance: float | None = None) -> None:
    """Require that numbers are equal but for rounding."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert expected.isfinite().all(), f"{what}: the expected numbers are not finite"
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    tolerance = TOLERANCE[case.dtype] if tolerance is None else tolerance
    difference = float((found - expected).abs().max()) if expected.numel() else 0.0
    assert difference <= tolerance * largest + 1e-13, (
        f"{what}: differs by {difference:.3g}, where the largest expected number is {largest:.3g}"
    )


# Oracles.


def predictions(case: Case) -> None:
    """`predict` is a loop over draws, averaged by hand."""
    model, batch = converted(case), case.batch()
    expected = expected_draws(case, model, batch)
    same(case, predicted_draws(case, model, batch), expected, "the draws of predict")
    probs = by.predict(model, batch, DRAWS, seed=case.seed).probs
    tolerance = max(1e-4, TOLERANCE[case.dtype])
    same(case, probs, expected.float().softmax(-1).mean(0), "the probabilities of predict", tolerance)


def invariance(case: Case) -> None:
    """Predictions do not depend on the size of batches, the order of rows, calls before, or changes in between."""
    model, batch = converted(case), case.batch()
    first, dim = predicted_draws(case, model, batch), 1 + case.output.row_dim
    if not case.has("mixes_rows") and case.tells_batch_dim:
        for size in (1, 2):
            same(case, predicted_draws(case, model, batch, size), first, f"batches of {size}")
        backwards = case.rows_of(batch, torch.arange(case.rows).flip(0))
        same(case, predicted_draws(case, model, backwards).flip(dim), first, "rows in reverse order")
    same(case, predicted_draws(case, model, batch), first, "a second call", 0.0)
    with torch.no_grad():
        call_with(model.eval(), batch)
    same(case, predicted_draws(case, model, batch), first, "after a call of the model")


def changes(case: Case) -> None:
    """After training steps, a changed dropout rate or a changed flag, predictions are those of a new model."""
    model, batch = converted(case), case.batch()
    predicted_draws(case, model, batch)
    _move_parameters(model, 1)
    other = case.convert(case.network())
    other.load_state_dict(model.state_dict())
    for network in (model, other):
        set_flags(network, True)
        for module in network.modules():
            if isinstance(module, _DropoutNd):
                module.p /= 2
    expected = expected_draws(case, other, batch, flag=True)
    same(case, predicted_draws(case, model, batch), expected, "after changes")


def set_flags(network: nn.Module, value: bool) -> None:
    """Set the flags of a network."""
    for module in network.modules():
        if isinstance(module, Flag):
            module.flag = value


def training_rows(case: Case) -> None:
    """A row of a training call is the plain network with that row's draw in its weights."""
    model, batch = converted(case), case.batch()
    _refuse_noise_without_weights(model)
    make_rows_independent(model)
    with torch.no_grad(), watched_calls(model) as call:
        found = call_with(model, batch)
    assert found.dtype == DTYPES[case.dtype] and found.isfinite().all(), f"a training call returned {found}"
    if case.dtype == "bfloat16":
        return  # factors on activations and in the weight are rounded differently
    dim = case.output.row_dim
    for row in sorted({0, case.rows // 2, case.rows - 1}):
        network = reference(case, _with_row(case, model, call, row)).train()
        make_rows_independent(network)
        with torch.no_grad():
            expected = call_with(network, batch)
        same(case, found.select(dim, row), expected.select(dim, row), f"row {row} of a training call")


def _with_row(case: Case, model: nn.Module, call: Call, row: int) -> nn.Module:
    """The plain network with the draws that served a row of a call."""
    network = case.network()
    untie(network)
    network.load_state_dict({name: t for name, t in model.state_dict().items() if ".posterior." not in f".{name}"})
    for name, layer in bayesian_layers(model).items():
        network.get_submodule(name).load_state_dict(call.tensors(layer, row), strict=False)
    return network


def gradients(case: Case) -> None:
    """Gradients of the loss with fixed draws are finite differences; `add_kl_grad_` adds the gradient of `kl`."""
    case = replace(case, dtype="float64")
    if any(name == "through_numpy" for name, _ in case.blocks) or _option(case, "learn_mixing"):
        raise NotApplicable  # gradients that are not those of what is computed: cut off, or straight-through estimates
    model, batch = converted(case).double(), case.batch()
    if case.rows == 1:
        model.apply(lambda module: module.eval() if isinstance(module, _BatchNorm) else module)

    def loss(network: nn.Module) -> Tensor:
        torch.manual_seed(case.seed)
        output = call_with(network, batch)
        return (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output)).sum() + by.kl(network)

    loss(model)  # the first call of a model in training does more than later ones
    start = copy.deepcopy(model)
    if not (total := loss(model)).requires_grad:
        raise NotApplicable
    total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any(_slopes_agree(start, loss, grads, seed) for seed in range(3)), "autograd differs from finite differences"
    _kl_gradients_agree(case, start)


def _slopes_agree(start: nn.Module, loss: Callable[[nn.Module], Tensor], grads: dict[str, Tensor], seed: int) -> bool:
    """Whether the slope along a random direction is a finite difference; at a kink, which one may hit, it is not."""
    generator = torch.Generator().manual_seed(seed)
    direction = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in start.named_parameters()}
    for module_name, module in start.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:  # whose gradient torch leaves out
            direction[f"{module_name}.weight"][module.padding_idx] = 0
    slope = sum(float((grad * direction[name]).sum()) for name, grad in grads.items())
    size = sum(float((grad * direction[name]).abs().sum()) for name, grad in grads.items()) + 1e-6

    def at(step: float) -> float:
        network = copy.deepcopy(start)
        with torch.no_grad():
            for name, p in network.named_parameters():
                p.add_(direction[name], alpha=step)
            return float(loss(network))

    steps = (1e-5, 1e-7)
    return any(abs((at(step) - at(-step)) / (2 * step) - slope) <= 1e-4 * size for step in steps)


def _kl_gradients_agree(case: Case, model: nn.Module) -> None:
    torch.manual_seed(case.seed)
    total = by.kl(model) / 10
    if total.requires_grad:
        total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.manual_seed(case.seed)
    by.add_kl_grad_(model, n=10)
    for name, p in model.named_parameters():
        zero = torch.zeros_like(p)
        same(case, zero if p.grad is None else p.grad, grads.get(name, zero), f"add_kl_grad_ of {name}", 1e-5)


NOISELESS: dict[str, dict[str, Any]] = {
    "Rank1": {"mean_std": 0.0, "dropout_rate": 1e-14, "signs": None},
    "IBNN": {"mean_std": 0.0, "scale_mean": 1e-12, "scale_std": 0.0},
    "EMP": {"init_copies": "jitter", "jitter": 0.0},
    "ECMP": {"init_copies": "jitter", "jitter": 0.0},
    "MeanField": {"init_log_std": [-30.0, -30.0]},
    "LowRankEnsemble": {"std": 0.0},
    "BatchEnsemble": {"mean_std": 0.0, "signs": None},
    "MCDropout": {"p": 0.0},
    "DropConnect": {"p": 0.0},
    "Ensemble": {"init_copies": "jitter", "jitter": 0.0},
}
"""Options that leave a method without any noise: its factors are 1, its copies equal, its scales 0."""


def zero_noise(case: Case) -> None:
    """Without noise a converted network is the plain one: in training, in evaluation, in every draw, after revert."""
    if _option(case, "posterior", "cauchy"):
        raise NotApplicable  # it has no smallest scale: now and then a factor is far from 1
    methods = [[key, name, options | NOISELESS.get(name, {})] for key, name, options in case.methods]
    dtype = "float32" if case.dtype == "bfloat16" else case.dtype
    case = replace(case, methods=methods, keep_dropout=False, dtype=dtype)
    model, plain, batch = case.convert(case.network()), case.network(), case.batch()
    for network in (model, plain):
        make_rows_independent(network)
    tolerance = max(1e-4, TOLERANCE[case.dtype])
    with torch.no_grad():
        same(case, call_with(model, batch), call_with(plain, batch), "a training call", tolerance)
        model.eval(), plain.eval()
        expected = call_with(plain, batch)
        same(case, call_with(model, batch), expected, "a call in evaluation", tolerance)
        repeated = expected.expand(DRAWS, *expected.shape)
        same(case, predicted_draws(case, model, batch), repeated, "the draws of predict", tolerance)
        for network in (by.draw(model, None), *by.members(model)):
            same(case, call_with(network, batch), expected, "a mean", tolerance)


def round_trips(case: Case) -> None:
    """Saving and loading, deepcopy, pickle and revert keep the function."""
    model, batch = converted(case), case.batch()
    expected = predicted_draws(case, model, batch)
    with tempfile.TemporaryDirectory() as folder:
        by.save(model, Path(folder) / "model.safetensors")
        loaded = by.load(replace(case, seed=case.seed + 1).network(), Path(folder) / "model.safetensors")
    copies = {"load": loaded, "deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    for name, other in copies.items():
        same(case, predicted_draws(case, other, batch), expected, name, 0.0)
    with torch.no_grad():
        reverted = by.revert(copy.deepcopy(model), case.seed, index=2).eval()
        same(case, call_with(reverted, batch), expected[2], "revert to a draw")
        mean = call_with(by.draw(model, None), batch)
        same(case, call_with(by.revert(model).eval(), batch), mean, "revert to the mean")


def unchanged(case: Case) -> None:
    """`predict`, `draw` and `kl` leave the model, its mode, its attributes and the global random state unchanged."""
    model, batch = converted(case), case.batch()
    for place, module in enumerate(model.modules()):
        module.training = bool(place % 3)
    before = _state(model)
    by.predict(model, batch, DRAWS, seed=case.seed)
    by.draw(model, 1), by.draw(model, None), by.members(model)
    assert not (moved := _differences(before, _state(model))), f"changed: {moved}"


def composed(case: Case) -> None:
    """Two copies of a converted network in a larger one have noise of their own, and predict as one network."""
    part = converted(case)
    pair, batch = Pair(part, copy.deepcopy(part)), case.batch()
    drawn = DrawnNetwork(pair).draws(case.seed, range(64))
    cycle = 12  # a multiple of every number of components
    for name, tensors in drawn.items():
        if name.startswith("left.") and not torch.equal(tensors[0::cycle], tensors[:1].expand_as(tensors[0::cycle])):
            other = drawn[name.replace("left.", "right.", 1)]
            assert not torch.equal(tensors, other), f"{name}: both copies draw the same noise"
    with torch.no_grad():
        expected = torch.stack([call_with(by.draw(pair, case.seed, index=i), batch) for i in range(DRAWS)])
    same(case, predicted_draws(case, pair, batch), expected, "the draws of a composed model")


class Pair(nn.Module):
    """Two networks side by side."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.left(*args, **kwargs) + 2 * self.right(*args, **kwargs)


def exported(case: Case) -> None:
    """An exported file predicts what `predict` does, at every call and for another number of rows."""
    if case.form != "tensor" or case.dtype == "bfloat16" or case.batch_dim or case.output.features < 2:
        raise NotApplicable
    model, batch = converted(case), case.batch()
    if not _is_exportable(by.draw(model, 0), batch):
        raise NotApplicable
    with tempfile.TemporaryDirectory() as folder:
        by.export(model, Path(folder) / "model.pt2", batch, samples=2, seed=case.seed)
        program = torch.export.load(Path(folder) / "model.pt2").module()
    for rows in (torch.arange(case.rows), torch.arange(case.rows).repeat(2), torch.arange(case.rows)):
        some = case.rows_of(batch, rows)
        expected = by.predict(model, some, 2, seed=case.seed).log_probs
        same(case, program(some)[0], expected, f"an exported file on {len(rows)} rows", 1e-4)


def _is_exportable(network: nn.Module, batch: Tensor) -> bool:
    rows = torch.cat([batch, batch])
    try:
        torch.export.export(network, (rows,), dynamic_shapes=[{0: torch.export.Dim("rows")}], strict=False)
    except Exception:  # what torch itself can't export is not ours to promise
        return False
    return True


ORACLES: dict[str, Oracle] = {
    oracle.__name__: oracle
    for oracle in (
        predictions,
        invariance,
        changes,
        training_rows,
        gradients,
        zero_noise,
        round_trips,
        unchanged,
        composed,
        exported,
    )
}


# Their parts.


def converted(case: Case) -> nn.Module:
    """The case's network, converted and moved a little, as if it had been trained."""
    model = case.convert(case.network())
    _move_parameters(model, 0)
    return model


@torch.no_grad()
def _move_parameters(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p.dtype))
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.running_mean.add_(0.1 * torch.randn(module.running_mean.shape, generator=generator))
            module.running_var.mul_(1 + torch.rand(module.running_var.shape, generator=generator))


def make_rows_independent(network: nn.Module) -> None:
    """Batch norms as in evaluation, and no dropout: a row's output is its own, and not random."""
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
        elif isinstance(module, _DropoutNd):
            module.p = 0.0


class NotApplicable(Exception):
    """An oracle has nothing to say about a case."""


def _refuse_noise_without_weights(model: nn.Module) -> None:
    """Local noise is on activations; an embedding with a draw for each row draws only the entries it looks up."""
    for layer in bayesian_layers(model).values():
        method = layer.method
        if getattr(method, "estimator", None) == "local":
            raise NotApplicable
        if layer.role == "embedding" and method.factorised and method.draws_per == "row":
            raise NotApplicable


def _option(case: Case, name: str, value: Any = True) -> bool:
    return any(options.get(name) == value for _, _, options in case.methods)


def _state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model, and the global random states."""
    state: dict[str, Any] = {f"tensor {name}": t.clone() for name, t in model.state_dict().items()}
    state |= {
        "torch's random state": torch.get_rng_state(),
        "Python's": random.getstate(),
        "NumPy's": np.random.get_state(),
    }
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "scope"}
        state[f"module {name!r}"] = copy.deepcopy(own), type(module), len(module._forward_hooks)
    return state


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if not _equal(before.get(name), after.get(name))]


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if type(one).__module__ == "fuzz.layers":
        return _equal(vars(one), vars(other))
    return bool(one == other)
