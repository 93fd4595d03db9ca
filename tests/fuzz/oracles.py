"""What must hold for every case. An oracle returns if it does, and raises otherwise.

A `BayesifyError` is a refusal: bayesify says what it can't do. Anything else that is raised is a fault, and so is a
difference. What is expected comes from a network that is built again from the case's description, into which the
tensors of a draw are loaded: no attribute, hook or cache of the converted model can reach it.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from draws import Call, watched_calls
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

import bayesify as by
from bayesify.batches import call_with
from bayesify.conversion.check_rows import TOLERANCE as PASSES
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.layers import bayesian_layers
from bayesify.layers.base import has_scope
from fuzz.case import DTYPES, Case
from fuzz.expected import (
    DRAWS,
    converted,
    differences,
    expected,
    expected_draws,
    make_rows_independent,
    move_parameters,
    other_outputs_of,
    output_of,
    outputs_of,
    predicted_draws,
    reference,
    same,
    set_flags,
    state_of,
    untie,
)

Oracle = Callable[[Case], None]


def predictions(case: Case) -> None:
    """`predict` is a loop over draws, averaged by hand."""
    model, batch = converted(case), case.batch()
    outputs = expected_draws(case, model, batch)
    if case.first:
        predicted_draws(case, model, case.first_batch())
    same(predicted_draws(case, model, batch), outputs, "the draws of predict")
    probs = by.predict(model, batch, DRAWS, seed=case.seed, **case.predict_options).probs
    same(probs, outputs.then(lambda draws: draws.float().softmax(-1).mean(0)), "the probabilities of predict")


def invariance(case: Case) -> None:
    """Predictions do not depend on the size of batches, the order of rows, calls before, or changes in between."""
    model, batch = converted(case), case.batch()
    outputs, dim = expected_draws(case, model, batch), 1 + case.output.row_dim
    first = predicted_draws(case, model, batch)
    if not case.mixes_rows and case.tells_batch_dim:
        for size in (1, 2):
            same(predicted_draws(case, model, batch, size), outputs, f"batches of {size}")
        backwards = case.rows_of(batch, torch.arange(case.rows).flip(0))
        same(predicted_draws(case, model, backwards).flip(dim), outputs, "rows in reverse order")
    assert torch.equal(predicted_draws(case, model, batch), first), "a second call differs"
    with torch.no_grad():
        call_with(model.eval(), batch)
    same(predicted_draws(case, model, batch), outputs, "after a call of the model")


def changes(case: Case) -> None:
    """After training steps, a changed dropout rate or a changed flag, predictions are those of a new model."""
    model, batch = converted(case), case.batch()
    predicted_draws(case, model, batch)
    move_parameters(model, 1)
    other = case.convert(case.network())
    other.load_state_dict(model.state_dict())
    for network in (model, other):
        set_flags(network, True)
        for module in network.modules():
            if isinstance(module, _DropoutNd):
                module.p /= 2
    same(predicted_draws(case, model, batch), expected_draws(case, other, batch, flag=True), "after changes")


def training_rows(case: Case) -> None:
    """A row of a training call is the plain network with that row's draw in its weights; no ordinary one is refused."""
    model = converted(case).train()
    make_rows_independent(model, noise=True)
    try:
        _call_before(case, model)
        if any(options.get("kind") == "random" for _, options in case.blocks):
            _outputs(case, model, case.batch())
        make_rows_independent(model)
        _compare_rows(case, model)
    except by.RowError as refusal:
        assert not case.is_ordinary, f"an ordinary network is refused: {refusal}"
        raise


def evaluation(case: Case) -> None:
    """A call in evaluation is the plain network with one draw in its weights; also the second."""
    if case.around == "siamese":
        raise NotApplicable  # each call of a part is another draw
    case = replace(case, keep_dropout=False)
    model = converted(case).eval()
    if not case.has("keeps_results"):
        _call_before(case, model)
    for _ in range(1 if case.has("keeps_results") else 2):  # a second call may use results of the first, another draw
        _compare_rows(case, model)


def _call_before(case: Case, model: nn.Module) -> None:
    """Call a model with what may hide something from the next call."""
    training = model.training
    if case.first:
        model.train(training != (case.first == "other mode"))
        make_rows_independent(model, noise=True)
        _outputs(case, model, case.first_batch())
        model.train(training)


@torch.no_grad()
def _outputs(case: Case, model: nn.Module, batch: Any) -> Any:
    """What a model returns for a batch; parts of a network are trained by `elbo`, which checks what is around them."""
    if not case.around or not model.training:
        return call_with(model, batch)
    found: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: found.append(output))
    likelihood: Any = SimpleNamespace(log_prob=lambda output, targets: output.flatten(1).sum(1))
    by.elbo(model, batch, torch.zeros(case.rows), n=1000, likelihood=likelihood)
    handle.remove()
    return found[-1]


def _compare_rows(case: Case, model: nn.Module) -> None:
    if _has_noise_without_weights(model):
        return _compare_apart(case, model)
    batch = case.batch()
    with ExitStack() as stack:
        parts = {name: part for name, part in model.named_modules() if has_scope(part)}
        calls = {name: stack.enter_context(watched_calls(part)) for name, part in parts.items()}
        output = _outputs(case, model, batch)
    found = case.main(output)
    assert found.dtype == DTYPES[case.dtype] and found.isfinite().all(), f"a call returned {found}"
    if case.dtype == "bfloat16" and not case.is_ordinary:
        return  # networks of 16 bits are not compared at the first call, so odd ones are not refused
    rows, dim = case.rows, case.output.row_dim
    if model.training and not case.tells_batch_dim:  # what is not refused has draws for what is in the first dimension
        rows, dim = min(case.shape[0], found.shape[0]), 0
    least = 2 * PASSES.get(found.dtype, 0.0)  # of what is not rounding, so much is not refused
    for row in sorted({0, rows // 2, rows - 1}):
        network = reference(case, _with_row(case, model, calls, row)).train(model.training)
        make_rows_independent(network)
        expected_row = output_of(case, network, batch).then(partial(torch.select, dim=dim, index=row))
        same(found.select(dim, row), expected_row, f"row {row} of a call", least)
        if not case.tells_batch_dim:
            continue
        others = zip(case.others(output), other_outputs_of(case, network, batch), strict=True)
        for (other, its_dim), expected_other in others:
            expected_row = expected_other.then(partial(torch.select, dim=its_dim, index=row))
            same(other.select(its_dim, row), expected_row, f"row {row} of another tensor that a call returns", least)


@torch.no_grad()
def _compare_apart(case: Case, model: nn.Module) -> None:
    """With the same random numbers, a row of a call in training does not depend on the others."""
    if not model.training or not case.tells_batch_dim or case.has("jumps"):
        raise NotApplicable  # there is one draw; dimension 0 has the draws; how many numbers are drawn depends on rows
    rows, dim = case.rows, case.output.row_dim
    is_uncompared = case.dtype == "bfloat16" and not case.is_ordinary  # see `_compare_rows`

    def output(index: Tensor) -> Tensor:
        torch.manual_seed(case.seed)
        return case.main(_outputs(case, model, case.rows_of(case.batch(), index)))

    found = output(torch.arange(rows))
    for row in () if is_uncompared else sorted({0, rows - 1}):
        others = torch.arange(1, rows + 1) % rows
        others[row] = row
        expected_row = expected(case, partial(lambda others, row: output(others).select(dim, row), others, row))
        least = 2 * PASSES.get(found.dtype, 0.0)
        same(found.select(dim, row), expected_row, f"row {row} of a call, with other rows beside it,", least)


def _with_row(case: Case, model: nn.Module, calls: dict[str, Call], row: int) -> nn.Module:
    """The plain network with the draws that served a row of a call."""
    network = case.network()
    untie(network)
    network.load_state_dict({name: t for name, t in model.state_dict().items() if ".posterior." not in f".{name}"})
    for name, layer in bayesian_layers(model).items():
        call = next(call for part, call in calls.items() if not part or name.startswith(f"{part}."))
        if any(layer.site_name + suffix not in call.drawn for suffix in layer.sites()):
            continue  # it was not called
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
        output = case.call(network, batch)
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
    def grads_of(add: Callable[[nn.Module], None]) -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(case.seed)
        add(model)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}

    def by_autograd(model: nn.Module) -> None:
        total = by.kl(model) / 10
        if total.requires_grad:
            total.backward()

    for name, grad in grads_of(lambda model: by.add_kl_grad_(model, n=10)).items():
        same(grad, expected(case, partial(lambda name: grads_of(by_autograd)[name], name)), f"add_kl_grad_ of {name}")


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
    with torch.no_grad():
        same(case.call(model, batch), output_of(case, plain, batch), "a training call")
        model.eval(), plain.eval()
        output = output_of(case, plain, batch)
        same(case.call(model, batch), output, "a call in evaluation")
        for index, each in enumerate(predicted_draws(case, model, batch)):
            same(each, output, f"draw {index} of predict")
        for network in (by.draw(model, None), *by.members(model)):
            same(case.call(network, batch), output, "a mean")


def round_trips(case: Case) -> None:
    """Saving and loading, deepcopy, pickle and revert keep the function."""
    model, batch = converted(case), case.batch()
    first = predicted_draws(case, model, batch)
    with tempfile.TemporaryDirectory() as folder:
        by.save(model, Path(folder) / "model.safetensors")
        loaded = by.load(replace(case, seed=case.seed + 1).network(), Path(folder) / "model.safetensors")
    copies = {"load": loaded, "deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    for name, other in copies.items():
        assert torch.equal(predicted_draws(case, other, batch), first), f"{name} changes predictions"
    mean, draws = output_of(case, by.draw(model, None), batch), expected_draws(case, model, batch, draws=3)
    with torch.no_grad():
        reverted = by.revert(copy.deepcopy(model), case.seed, index=2).eval()
        same(case.call(reverted, batch), draws.then(lambda outputs: outputs[2]), "revert to a draw")
        same(case.call(by.revert(model).eval(), batch), mean, "revert to the mean")


def unchanged(case: Case) -> None:
    """`predict`, `draw` and `kl` leave the model, its mode, its attributes and the global random state unchanged."""
    model, batch = converted(case), case.batch()
    for place, module in enumerate(model.modules()):
        module.training = bool(place % 3)
    before = state_of(model)
    by.predict(model, batch, DRAWS, seed=case.seed, **case.predict_options)
    by.draw(model, 1), by.draw(model, None), by.members(model)
    assert not (moved := differences(before, state_of(model))), f"changed: {moved}"


MANY = 60
"""Of so many numbers, and half as many independent ones, a correlation is not close to one by chance."""


def composed(case: Case) -> None:
    """Two copies of a converted network, or two converted apart, have noise of their own and predict as one network."""
    part = converted(case)
    other = case.convert(case.network()) if case.seed % 2 else copy.deepcopy(part)
    pair, batch = Pair(part, other, case.main), case.batch()
    drawn = DrawnNetwork(pair).draws(case.seed, range(64))
    cycle = 12  # a multiple of every number of components
    for name, tensors in drawn.items():
        if name.startswith("left.") and not torch.equal(tensors[0::cycle], tensors[:1].expand_as(tensors[0::cycle])):
            other = drawn[name.replace("left.", "right.", 1)]
            assert not torch.equal(tensors, other), f"{name}: both copies draw the same noise"
            left, right = _noise_of(tensors, cycle), _noise_of(other, cycle)
            is_continuous = len(left.unique(dim=0)) == len(left)  # choices of few copies may agree by chance
            alike = abs(float((left * right).sum())) if left.numel() >= MANY and is_continuous else 0.0
            assert alike < 0.95, f"{name}: the noise of both copies has a correlation of {alike:.2f}"
    networks = [by.draw(pair, case.seed, index=index) for index in range(DRAWS)]
    outputs = outputs_of(replace(case, around="copies"), networks, batch)  # the sum of what both return
    with torch.no_grad():
        found = by.predict(pair, batch, DRAWS, seed=case.seed, likelihood=by.Gaussian(), draws=True).draws
    same(found, outputs, "the draws of a composed model")


def _noise_of(draws: Tensor, cycle: int) -> Tensor:
    """What draws of one component differ by, scaled to length one."""
    some = draws[0::cycle].double()
    noise = some - some.mean(0)
    return noise / noise.norm().clamp_min(1e-30)


def adaptive(case: Case) -> None:
    """A row of an adaptive prediction is the average of as many draws as it says."""
    model, batch, most = converted(case), case.batch(), 24
    options: dict[str, Any] = {"seed": case.seed, "batch_size": 2 if case.tells_batch_dim else None}
    if case.mixes_rows or case.output.kind != "vector":
        raise NotApplicable
    found = by.predict(model, batch, by.Adaptive(max=most, tolerance=0.1), **options, **case.predict_options)
    networks = [by.draw(model, case.seed, index=index) for index in range(int(found.draws_used.max()))]

    def means(outputs: Tensor) -> Tensor:
        probs = outputs.float().softmax(-1)
        return torch.stack([probs[:used, row].mean(0) for row, used in enumerate(found.draws_used.tolist())])

    same(found.probs, outputs_of(case, networks, batch).then(means), "an adaptive prediction")


def threads(case: Case) -> None:
    """The output of a call in evaluation is that of one member, also if several threads call the model at once."""
    if case.has("reads_weights") or case.has("keeps_results") or case.beside_output == "reads" or case.around:
        raise NotApplicable  # `evaluation` says what is wrong with them, and parts have components of their own
    case = replace(case, methods=[[None, "Ensemble", {"components": 3, "jitter": 0.5}]], keep_dropout=False)
    model, batch = converted(case).eval(), case.batch()
    members = [output_of(case, reference(case, network), batch) for network in by.members(model)]
    outputs: list[Tensor | Exception] = []

    @torch.no_grad()
    def call() -> None:
        try:
            outputs.extend(case.call(model, batch) for _ in range(4))
        except Exception as error:  # raised below, in the main thread
            outputs.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        sys.setswitchinterval(interval)
    for output in outputs:
        if isinstance(output, Exception):
            raise output
        nearest = min(members, key=lambda member: float((output - member.value).abs().sum()))
        same(output, nearest, "a call from one of several threads")


class Pair(nn.Module):
    """Two networks side by side."""

    def __init__(self, left: nn.Module, right: nn.Module, main: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.left, self.right, self.main = left, right, main

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.main(self.left(*args, **kwargs)) + 2 * self.main(self.right(*args, **kwargs))


def exported(case: Case) -> None:
    """An exported file predicts what `predict` does, at every call and for another number of rows."""
    if (
        case.form != "tensor"
        or "call" in case.predict_options
        or case.dtype == "bfloat16"
        or case.batch_dim
        or case.output.features < 2
        or case.has("jumps")
    ):
        raise NotApplicable
    model, batch = converted(case), case.batch()
    if not _is_exportable(by.draw(model, 0), batch):
        raise NotApplicable
    with tempfile.TemporaryDirectory() as folder:
        by.export(model, Path(folder) / "model.pt2", batch, samples=2, seed=case.seed)
        program = torch.export.load(Path(folder) / "model.pt2").module()
    for rows in (torch.arange(case.rows), torch.arange(case.rows).repeat(2), torch.arange(case.rows)):
        some = case.rows_of(batch, rows)
        outputs = expected_draws(case, model, some, draws=2)
        mixture = outputs.then(lambda draws: draws.float().log_softmax(-1).logsumexp(0) - math.log(2))
        same(program(some)[0], mixture, f"an exported file on {len(rows)} rows")


def _is_exportable(network: nn.Module, batch: Tensor) -> bool:
    rows = torch.cat([batch, batch])
    try:
        torch.export.export(network, (rows,), dynamic_shapes=[{0: torch.export.Dim("rows")}], strict=False)
    except Exception:  # what torch itself can't export is not ours to promise
        return False
    return True


class NotApplicable(Exception):
    """An oracle has nothing to say about a case."""


def _has_noise_without_weights(model: nn.Module) -> bool:
    """Local noise is on activations; in training, an embedding with a draw for each row draws entries it looks up."""
    methods = [(layer.method, layer.role == "embedding") for layer in bayesian_layers(model).values()]
    return any(
        getattr(method, "estimator", "") == "local"
        or (model.training and is_embedding and method.factorised and method.draws_per == "row")
        for method, is_embedding in methods
    )


def _option(case: Case, name: str, value: Any = True) -> bool:
    return any(options.get(name) == value for _, _, options in case.methods)


ORACLES: dict[str, Oracle] = {
    oracle.__name__: oracle
    for oracle in (
        predictions,
        invariance,
        changes,
        training_rows,
        evaluation,
        gradients,
        zero_noise,
        round_trips,
        unchanged,
        composed,
        adaptive,
        threads,
        exported,
    )
}
