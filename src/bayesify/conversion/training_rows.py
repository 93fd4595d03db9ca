"""Does training compute what prediction will? A row of a training batch against the plain network with its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.batches import first_tensor, output_of
from bayesify.conversion.drawn_network import DrawnNetwork, make_plain
from bayesify.errors import BayesifyError, RowError
from bayesify.layers import BayesianDropout, BayesianLayer, bayesian_layers
from bayesify.layers.base import Tensors, plain_type
from bayesify.layers.call_scope import CloseScope, OpenScope, Scope
from bayesify.layers.embedding import BayesianEmbedding
from bayesify.layers.network_state import copy_of, may_store, stored_results, tokens_of
from bayesify.layers.rows import Rows
from bayesify.methods import MeanField
from bayesify.methods.base import Perturbation

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Relative to the largest number of a row; rounding errors are much smaller."""
MOST_NUMBERS = 1 << 25
"""Layers whose method avoids a weight for each row have at most so many numbers in them (128 MB) to be compared."""
AMPLIFIED = 20
"""How many times as much as weights that are rounded otherwise, ten times as coarsely, a row may differ."""
Call = Callable[[nn.Module], Any]
"""Calls a network with the batch."""


@dataclass
class _Recorded:
    """The output of a call; the outputs of its layers in the order of the calls, with their rows; what was drawn."""

    output: Tensor
    layers: dict[str, tuple[Tensor, Rows]] = field(default_factory=dict)
    drawn: dict[str, Perturbation] = field(default_factory=dict)
    """By the name of the layer and the suffix of the weight."""

    def row_of(self, name: str, row: int) -> Tensor:
        """What a layer computed for a row of the batch."""
        output, rows = self.layers[name]
        return output[rows.owner(output.device) == row]


@torch.no_grad()
def compare_with_drawn(model: nn.Module, call: Call, rows: int, *, per_row: bool) -> None:
    """Raise if a call of the model, for each row its own draw, differs from the plain network with that draw's weights.

    Not compared are 16-bit networks, in which rounding may change a decision of the network, networks that are random
    themselves, and layers whose noise is on activations or whose weights of all rows would not fit into memory.
    """
    layers = bayesian_layers(model)
    weights = [t for layer in layers.values() for site in layer.sites().values() for t in site.base.values()]
    is_low = any(t.dtype in (torch.float16, torch.bfloat16) for t in weights)
    if not weights or is_low or torch.is_autocast_enabled(weights[0].device.type):
        return
    draws_by_row = per_row and any(layer.method.draws_per == "row" for layer in layers.values())
    with _full_precision():
        for _ in range(
            1 if draws_by_row else 2
        ):  # with one draw for all rows, a dropped weight could hide a difference
            _compare_draws(model, layers, call, rows, per_row)


def _compare_draws(model: nn.Module, layers: dict[str, BayesianLayer], call: Call, rows: int, per_row: bool) -> None:
    by_row = _called_with_draws(model, layers, call, rows, per_row)
    at = _rows_of_output(by_row.output, next(iter(layers.values())).scope.batch_dim, rows, per_row)
    for row in sorted({0, rows - 1}):
        tensors = _tensors_of_row(layers, by_row.drawn, row)
        alone = _called_alone(model, layers, tensors, call, rows)
        nearby = _called_alone(model, layers, _rounded_otherwise(tensors), call, rows)
        if alone.output.shape != by_row.output.shape:
            raise RowError(
                f"the batch was taken to have {rows} rows, as its first tensor has, but the output has shape "
                f"{tuple(alone.output.shape)} with one draw and {tuple(by_row.output.shape)} with a draw for each row. "
                "Let the first input be one with rows, or give batch_dim"
            )
        _compare(layers, by_row, alone, nearby, at, row)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Without TensorFloat-32, whose rounding looks like a difference after some layers."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _rows_of_output(output: Tensor, batch_dim: int, rows: int, per_row: bool) -> tuple[int, Rows] | None:
    """The dimension of the output's rows, and which rows of the batch they are; None for one number for all.

    Without a draw for each row, all of the output is the first row's. An output with fewer rows than the batch, or not
    a multiple of them, is taken to begin with the batch's first rows.
    """
    dim = batch_dim if output.dim() > 2 else 0
    if output.dim() <= dim or output.numel() <= 1 < rows:
        return None
    size = output.shape[dim]
    if not per_row:
        return dim, Rows(1, size)
    return dim, Rows.follow("", size, rows, 0 if dim else batch_dim) if size % rows == 0 else Rows(size)


@torch.no_grad()
def note_stored_results(model: nn.Module, call: Call) -> None:
    """Find the attributes in which calls store results of their draw, so that no other draw starts from them."""
    first, second = (without_hooks(DrawnNetwork(model).write_draw(seed)) for seed in (0, None))  # a draw, and the mean
    if not may_store(first):
        return
    before = tokens_of(first)
    call(first), call(second)
    after = tokens_of(first)
    changed = [place for place in {**before, **after} if before.get(place) != after.get(place)]
    found = stored_results(model, changed, first, second) if changed else {}
    for hook in model._forward_hooks.values():
        if isinstance(hook, CloseScope):
            hook.scope.results = found | hook.scope.results


def without_hooks(network: nn.Module) -> nn.Module:
    """Remove the user's hooks, which may count or collect calls, from a copy of a network, and its first check."""
    for module in network.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if not isinstance(hook, (OpenScope, CloseScope))]:
                del hooks[key]
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, OpenScope):
                hook.check = None
    return network


def _called_with_draws(
    model: nn.Module, layers: dict[str, BayesianLayer], call: Call, rows: int, per_row: bool
) -> _Recorded:
    """A copy of the model in evaluation, with a draw for each row or for all."""
    copied = without_hooks(copy_of(model, model.parameters()).eval())
    drawn: dict[Scope, dict[str, Perturbation]] = {}
    scopes = {name: layer.scope for name, layer in bayesian_layers(copied).items()}
    _give_weights(copied, rows if per_row else 1)
    with ExitStack() as stack:
        for module in copied.modules():
            for scope in [hook.scope for hook in module._forward_hooks.values() if isinstance(hook, CloseScope)]:
                module.register_forward_hook(_recorder_of_draws(scope, drawn), prepend=True)
                if per_row:
                    stack.enter_context(scope.drawing_per_row())
        recorded = _recorded(copied, layers, call, rows)
    for name, layer in layers.items():
        of_scope = drawn.get(scopes[name], {})
        for suffix in layer.sites():
            if layer.site_name + suffix in of_scope:
                recorded.drawn[name + suffix] = of_scope[layer.site_name + suffix]
    return recorded


def _give_weights(copied: nn.Module, draws: int) -> None:
    """Let all layers draw weights, which can be compared; layers that can't are made plain."""
    for layer in bayesian_layers(copied).values():
        if not _has_a_weight_for_each_row(layer, draws):
            make_plain(layer)
        elif isinstance(layer.method, MeanField):
            estimator = "exemplar" if layer.method.estimator == "local" else layer.method.estimator
            layer.method = replace(layer.method, rows_at_once=None, estimator=estimator)


def _has_a_weight_for_each_row(layer: BayesianLayer, rows: int) -> bool:
    """Whether a row's draw of a layer is a weight, and those of all rows fit into memory.

    It is not for dropout, nor where only looked-up entries are drawn.
    """
    method = layer.method
    is_drawn_by_entry = isinstance(layer, BayesianEmbedding) and method.factorised and method.draws_per == "row"
    is_frugal = isinstance(method, MeanField) and (method.estimator == "local" or method.rows_at_once is not None)
    numbers = rows * sum(t.numel() for site in layer.sites().values() for t in site.base.values())
    return not (isinstance(layer, BayesianDropout) or is_drawn_by_entry or (is_frugal and numbers > MOST_NUMBERS))


def _called_alone(
    model: nn.Module, layers: dict[str, BayesianLayer], tensors: Tensors, call: Call, rows: int
) -> _Recorded:
    """The plain network with the tensors of one row's draw."""
    drawn = DrawnNetwork(model)
    drawn.freeze_dropout(None)
    return _recorded(without_hooks(drawn.write(tensors)), layers, call, rows)


def _recorded(network: nn.Module, layers: dict[str, BayesianLayer], call: Call, rows: int) -> _Recorded:
    found: dict[str, tuple[Tensor, Rows]] = {}

    def recorder(name: str, layer: BayesianLayer) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen, y = layer.as_tensor(*args, **kwargs), output[0] if isinstance(output, tuple) else output
            dim = layer.row_dim(seen)
            batched = not layer.is_unbatched(seen) and isinstance(y, Tensor) and y.dim() > dim
            if batched and y.shape[dim] >= rows and y.shape[dim] % rows == 0:
                at = Rows.follow(name, y.shape[dim], rows, 0 if dim else layer.scope.batch_dim)
                found[name] = y.transpose(0, dim).clone(), at

        return record

    for name, layer in layers.items():
        if not isinstance(layer, BayesianDropout):
            network.get_submodule(name).register_forward_hook(recorder(name, layer), with_kwargs=True)
    output = call(network)
    try:
        main: Tensor | None = output_of(output)
    except BayesifyError:  # another kind of output, which training may have
        main = first_tensor(output)
    return _Recorded(torch.zeros(()) if main is None else main.clone(), found)


def _recorder_of_draws(scope: Scope, drawn: dict[Scope, dict[str, Perturbation]]) -> Callable[..., None]:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        drawn[scope] = dict(scope.call("").drawn)

    return record


def _tensors_of_row(layers: dict[str, BayesianLayer], drawn: dict[str, Perturbation], row: int) -> Tensors:
    """The tensors of the plain network that a row's draw stands for."""
    tensors: Tensors = {}
    for layer_name, layer in layers.items():
        values = {}
        for suffix, site in layer.sites().items():
            p = drawn.get(layer_name + suffix)
            if p is not None:  # otherwise the batch does not reach the layer
                values[suffix] = layer.operation.folded(site.base, p.only(row % p.size))
        prefix = f"{layer_name}." if layer_name else ""
        tensors |= {prefix + name: tensor for name, tensor in layer.assemble(values).items()} if values else {}
    return tensors


def _rounded_otherwise(tensors: Tensors) -> Tensors:
    """The tensors changed by some times their precision."""
    return {name: t * (1 + 10 * torch.finfo(t.dtype).eps * torch.randn_like(t)) for name, t in tensors.items()}


def _compare(
    layers: dict[str, BayesianLayer],
    by_row: _Recorded,
    alone: _Recorded,
    nearby: _Recorded,
    at: tuple[int, Rows] | None,
    row: int,
) -> None:
    """Raise where a row differs by more than rounding does: `nearby` shows how much that is amplified."""
    for name in [name for name in by_row.layers if name in alone.layers and name in nearby.layers]:
        if not _same(*(each.row_of(name, row) for each in (by_row, alone, nearby))):
            raise RowError(
                f"layer {name!r} ({plain_type(layers[name]).__name__}) computes something else for row {row} of a "
                "training batch than the plain layer with that row's draw as its weights, so training would fit "
                f"another function than the one that predicts. Leave it out: convert(model, {{{name!r}: None, '*': "
                "method}); if it only gets inputs that depend on other rows, leave out the layers before it"
            )
    if at is None:
        return
    own = at[1].owner(by_row.output.device) == (row if at[1].batch > 1 else 0)
    if not _same(*(each.output.transpose(0, at[0])[own] for each in (by_row, alone, nearby))):
        raise RowError(
            f"row {row} of the output is not what the plain network with that row's draw gives. After its Bayesian "
            "layers the network mixes rows of the batch, or it computes with the weight of a converted layer itself: "
            "leave that layer out. Where rows are mixed, give the dimension of the rows as convert(…, batch_dim=…), or "
            "use a method that draws once for the batch, such as MeanField(estimator='shared')"
        )


def _same(found: Tensor, expected: Tensor, nearby: Tensor) -> bool:
    """Whether numbers are equal but for rounding; a network that is random itself differs from its like by more."""
    if found.shape != expected.shape or not bool(expected.isfinite().all()) or not found.numel():
        return found.shape == expected.shape
    tolerance = TOLERANCE.get(expected.dtype, 0.05) * expected.abs().max()
    if nearby.shape == expected.shape:
        tolerance = torch.maximum(tolerance, AMPLIFIED * (nearby - expected).abs().max())
    return bool((found - expected).abs().max() <= tolerance)
