"""Does training compute what prediction will? A row of a training batch against the plain network with its weights."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, finfo, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.batches import first_tensor, output_of
from bayesify.conversion.drawn_network import DrawnNetwork, make_plain
from bayesify.conversion.weight_reads import Arguments, call_with_copies
from bayesify.errors import BayesifyError, RowError
from bayesify.layers import BayesianDropout, BayesianLayer, bayesian_layers
from bayesify.layers.base import Tensors, plain_type
from bayesify.layers.call_scope import Call, CloseScope, OpenScope
from bayesify.layers.network_state import TORCH, copy_of, may_store, stored_results, tensors_in, tokens_of
from bayesify.layers.rows import Rows
from bayesify.methods.base import Perturbation
from bayesify.methods.draw_design import seed_torch

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.complex128: 1e-5, torch.complex64: 1e-3}
"""Relative to the largest number of a row; rounding errors are much smaller."""
SMALLEST = 0.02
"""The size that a tensor near zero is taken to have."""
DRAWN = 0.5
"""How far drawn tensors are moved, relative to their size."""
AMPLIFIED = 100
"""A row may differ by this many times the difference that weights rounded ten times more coarsely make."""
OTHER_ROWS = (
    "is not what the plain network with that row's draw gives. After its Bayesian layers the network mixes rows of the "
    "batch, or it computes with the weight of a converted layer itself: leave that layer out. Where rows are mixed, "
    "give the dimension of the rows as convert(…, batch_dim=…), or use a method that draws once for the batch, such as "
    "MeanField(estimator='shared')"
)
Place = tuple[str, str, int]
"""The name of a layer, "input" or "output", and which of its calls in a call of the model."""
Watch = Callable[[str, nn.Module, Tensor, Any], None]
"""Gets the name, the module, the input and the output of a layer's call."""


@dataclass
class _Recorded:
    """The output of a call, and other tensors in it; what its layers got and returned, with their rows."""

    output: Tensor
    others: list[Tensor]
    layers: dict[Place, tuple[Tensor, Rows]]

    def row_of(self, place: Place, row: int) -> Tensor:
        """What a layer got or returned for a row of the batch."""
        values, rows = self.layers[place]
        return values[rows.owner(values.device) == row]

    def equals(self, other: "_Recorded") -> bool:
        """Whether the same was computed."""
        if self.layers.keys() != other.layers.keys() or len(self.others) != len(other.others):
            return False
        own, its = ([each.output, *each.others, *(x for x, _ in each.layers.values())] for each in (self, other))
        return all(map(torch.equal, own, its))


Record = Callable[..., _Recorded]


@contextmanager
def _full_precision() -> Iterator[None]:
    """Without TensorFloat-32, whose rounding looks like a difference after some layers."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@torch.no_grad()
@_full_precision()
def compare_with_drawn(model: nn.Module, batch: Arguments, rows: int, *, in_training: bool = False) -> None:
    """Raise if a call of the model with a draw for each row differs from the plain network with that draw's weights.

    They are compared in evaluation or, if that computes something else, in training, each with the same random numbers.
    Not compared are 16-bit networks, in which rounding may change a decision of the network.
    """
    layers = bayesian_layers(model)
    is_low = any(p.dtype in (torch.float16, torch.bfloat16) for layer in layers.values() for p in layer.parameters())
    drawn_per = {layer.method.draws_per for layer in layers.values() if not isinstance(layer, BayesianDropout)}
    if is_low or drawn_per <= {"batch"}:
        return

    def record(network: nn.Module, in_training: bool = in_training) -> _Recorded:
        seed_torch(0)
        return _recorded(set_modes(network, model) if in_training else network.eval(), layers, batch, rows)

    copied = copy_without_dropout(model, model.parameters())
    drawn = _distinct_draws(copied, rows)
    with giving_draws(copied, drawn, per_row=True):
        by_row = record(copied)
        if in_training and by_row.equals(record(copied, False)):
            return
    for row in sorted({0, 1 % rows, rows - 1}):  # neighbours have different components
        _compare_row(model, by_row, drawn, record, row, rows)


def _distinct_draws(copied: nn.Module, rows: int) -> dict[str, Perturbation]:
    """Each layer's draws for rows, moved so that no two are equal and nothing is zero, which would hide a difference.

    They go by the name of the layer and the suffix of the weight. Layers that avoid a weight for each row get factors.
    """
    call, drawn = Call(torch.arange(rows), rows), {}
    for name, layer in bayesian_layers(copied).items():
        method = layer.method
        is_frugal = method.rows_at_once or getattr(method, "estimator", "") == "local" or layer.role == "embedding"
        if method.rows_at_once:
            layer.method = replace(method, rows_at_once=None)  # type: ignore[type-var]
        for suffix, site in layer.sites().items():
            if method.factorised and method.draws_per == "row" and is_frugal and site.out_size is not None:
                p = Perturbation(rows, out_scale=torch.ones(rows, site.out_size, device=site.device))
            else:
                p = method.draw(site, call.draws(method, site.device))
            drawn[name + suffix] = p.mapped(partial(moved, share=DRAWN), p.size)
    return drawn


def moved(tensor: Tensor, share: float) -> Tensor:
    """A tensor to which up to a share of its size is added, so that a variance stays positive."""
    if not tensor.is_floating_point():
        return tensor
    size = tensor.float().square().mean().sqrt().clamp_min(SMALLEST)
    return tensor + (share * size * torch.rand_like(tensor, dtype=torch.float32)).to(tensor.dtype)


def _rows_of_output(output: Tensor, batch_dim: int, rows: int) -> tuple[int, Rows] | None:
    """The dimension of the output's rows, and which rows of the batch they are; None for one number for all.

    An output with fewer rows than the batch, or not a multiple of them, is taken to begin with the batch's first rows.
    """
    dim = batch_dim if output.dim() > 2 else 0
    if output.dim() <= dim:
        return None
    size = output.shape[dim]
    return dim, Rows.follow("", size, rows, 0 if dim else batch_dim) if size % rows == 0 else Rows(size)


@torch.no_grad()
def note_stored_results(model: nn.Module, batch: Arguments) -> None:
    """Find the attributes in which calls store results of their draw, so that no other draw starts from them."""
    still = copy_of(model, model.parameters())  # in which calls of other threads change nothing
    first = without_hooks(DrawnNetwork(still).write_draw(0))
    if not may_store(first):
        return
    other = DrawnNetwork(still)
    other.freeze_dropout(None)
    # Not a second draw, which may be the same one, such as that of a single component.
    tensors = {name: t * (0.5 + 0.5 * torch.rand_like(t)) for name, t in other.mean().items()}
    second = without_hooks(other.write(tensors))
    before = tokens_of(first)
    call_with_copies(first, batch), call_with_copies(second, batch)
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


def set_modes(network: nn.Module, model: nn.Module) -> nn.Module:
    """Put the user's own modules into the mode they have in the model; norms and dropout compute as in evaluation."""
    for name, module in network.named_modules():
        given, is_torchs = model.get_submodule(name), type(module).__module__.startswith(TORCH)
        module.training = given.training and not is_torchs and not isinstance(given, (BayesianLayer, _NormBase))
    return network


def copy_without_dropout(model: nn.Module, shared: Iterable[Any]) -> nn.Module:
    """A copy of a model of which all noise is in the weights."""
    copied = without_hooks(copy_of(model, shared))
    for layer in bayesian_layers(copied).values():
        if isinstance(layer, BayesianDropout):
            make_plain(layer)
    return copied


@contextmanager
def giving_draws(copied: nn.Module, drawn: Mapping[str, Perturbation], *, per_row: bool) -> Iterator[None]:
    """Let calls of a copy have these draws, by the names of layers and the suffixes of weights."""
    layers = bayesian_layers(copied)
    with ExitStack() as stack:
        for scope in {layer.scope for layer in layers.values()}:
            own = [(name, layer) for name, layer in layers.items() if layer.scope is scope]
            given = {
                layer.site_name + s: drawn[name + s] for name, layer in own for s in layer.sites() if name + s in drawn
            }
            scope.start = torch.zeros(1, dtype=torch.long)
            stack.enter_context(scope.drawing(per_row=per_row, drawn=given))
        yield


def call_watched(
    network: nn.Module, layers: dict[str, BayesianLayer], batch: Arguments, watch: Watch, before: Watch | None = None
) -> Any:
    """Call a network that has these layers, converted or plain, and watch their calls, and their inputs before them."""

    def hook(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watch(name, module, layers[name].as_tensor(*args, **kwargs), output)

    def hook_before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if before is not None:
            before(name, module, layers[name].as_tensor(*args, **kwargs), None)

    hooks = []  # before those of the scope, which may be the layer's own
    for name, layer in layers.items():
        if not isinstance(layer, BayesianDropout):
            module = network.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(partial(hook_before, name), prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(hook, name), prepend=True, with_kwargs=True))
    output = call_with_copies(network, batch)
    for each in hooks:
        each.remove()
    return output


def _recorded(network: nn.Module, layers: dict[str, BayesianLayer], batch: Arguments, rows: int) -> _Recorded:
    found: dict[Place, tuple[Tensor, Rows]] = {}
    calls: Counter[str] = Counter()

    def keep(name: str, place: str, x: Tensor, value: Any) -> None:
        layer, dim = layers[name], layers[name].row_dim(x)
        has_rows = not layer.is_unbatched(x) and isinstance(value, Tensor) and value.dim() > dim
        if has_rows and value.shape[dim] >= rows and value.shape[dim] % rows == 0:
            at = Rows.follow(name, value.shape[dim], rows, 0 if dim else layer.scope.batch_dim)
            found[name, place, calls[name]] = value.transpose(0, dim).clone(), at

    def before(name: str, module: nn.Module, x: Tensor, _: None) -> None:
        keep(name, "input", x, x)  # inputs too, as weights that are dropped hide from the output what comes before them

    def watch(name: str, module: nn.Module, x: Tensor, output: Any) -> None:
        keep(name, "output", x, output[0] if isinstance(output, tuple) else output)
        calls[name] += 1

    output = call_watched(network, layers, batch, watch, before)
    main = main_tensor(output)
    others = [tensor.clone() for tensor in tensors_in(output) if tensor is not main]
    return _Recorded(main.clone(), others, found)


def main_tensor(output: Any) -> Tensor:
    """The tensor that a prediction would use, else the first one; a number where there is none."""
    try:
        return output_of(output)
    except BayesifyError:  # another kind of output, which training may have
        found = first_tensor(output)
        return torch.zeros(()) if found is None else found


def _compare_row(
    model: nn.Module, by_row: _Recorded, drawn: Mapping[str, Perturbation], record: Record, row: int, rows: int
) -> None:
    """Raise where a row differs from the plain network with that row's draw by more than rounding does."""
    own = {name: p.only(row % p.size) for name, p in drawn.items()}
    tensors = DrawnNetwork(model).tensors(lambda name, suffix, site: own.get(name + suffix))

    def called_with(tensors: Tensors) -> _Recorded:
        network = DrawnNetwork(model)
        network.freeze_dropout(None)
        return record(without_hooks(network.write(tensors)))

    alone = called_with(tensors)  # and, to see how much rounding is amplified, with weights rounded more coarsely:
    nearby = called_with({name: t * (1 + 10 * finfo(t.dtype).eps * torch.randn_like(t)) for name, t in tensors.items()})
    if alone.output.shape != by_row.output.shape:
        raise RowError(
            f"the output has shape {tuple(alone.output.shape)} with one draw and {tuple(by_row.output.shape)} with one "
            "for each row of the first tensor. Let the first input be one with rows, or give batch_dim"
        )
    _compare_layers(model, by_row, alone, nearby, row)
    recorded = (by_row, alone, nearby)
    at = _rows_of_output(by_row.output, DrawnNetwork(model).batch_dim, rows)
    if at is not None and not _same_row([each.output for each in recorded], *at, row):
        what = f"row {row} of the output" if by_row.output.numel() > 1 else "the one number that the network returns"
        raise RowError(f"{what} {OTHER_ROWS}")
    for outputs in zip(*(each.others for each in recorded), strict=False):
        places = _places_of_rows(outputs[0], rows)
        if places and not any(_same_row(outputs, *place, row) for place in places):
            raise RowError(f"row {row} of an output of shape {tuple(outputs[0].shape)} {OTHER_ROWS}")


def _compare_layers(model: nn.Module, by_row: _Recorded, alone: _Recorded, nearby: _Recorded, row: int) -> None:
    """Raise where what a layer gets or returns for a row differs from the plain network."""
    for place in [each for each in by_row.layers if each in alone.layers and each in nearby.layers]:
        name, is_same = place[0], _same(*(each.row_of(place, row) for each in (by_row, alone, nearby)))
        if not is_same and place[1] == "input":
            raise RowError(f"the input of layer {name!r} for row {row} {OTHER_ROWS}")
        if not is_same:
            raise RowError(
                f"layer {name!r} ({plain_type(model.get_submodule(name)).__name__}) computes something else for row "
                f"{row} of a training batch than the plain layer with that row's draw as its weights, so training "
                "would fit another function than the one that predicts. Leave it out: convert(model, "
                f"{{{name!r}: None, '*': method}}); if its inputs depend on other rows, also the layers before it"
            )


def _places_of_rows(output: Tensor, rows: int) -> list[tuple[int, Rows]]:
    """The dimensions in which an output besides the main one may have rows."""
    if rows == 1 or output.dim() < 2:
        return [(0, Rows(rows))] if output.dim() and output.shape[0] == rows > 1 else []
    found = [(0, Rows(rows, output.shape[0] // rows))] if output.shape[0] and output.shape[0] % rows == 0 else []
    return found + [(dim, Rows(rows)) for dim in range(1, output.dim()) if output.shape[dim] == rows]


def _same_row(outputs: Sequence[Tensor], dim: int, rows: Rows, row: int) -> bool:
    """Whether a row is that of the plain network, by itself and beside the other rows, place by place."""
    if any(output.shape != outputs[0].shape for output in outputs):
        return True
    outputs = [output.transpose(0, dim) for output in outputs]
    own = rows.owner(outputs[0].device) == (row if rows.batch > 1 else 0)
    size = _size_of_places(outputs[0])
    return _same(*(output[own] for output in outputs)) and _same(*(output[own] / size for output in outputs))


def _size_of_places(output: Tensor) -> Tensor:
    """The largest number of all rows at each place, as others may be much larger, but no less than rounding leaves."""
    if not output.is_floating_point() or not output.numel():
        return torch.ones((), device=output.device)
    size = output.abs().amax(0)
    least = 1e4 * finfo(size.dtype).eps * size.max()
    return size.clamp_min(least).where(size.isfinite() & (least > 0), 1)


def _same(found: Tensor, expected: Tensor, nearby: Tensor) -> bool:
    """Whether the numbers of a row are equal but for rounding."""
    return same(found, expected, nearby, AMPLIFIED, TOLERANCE.get(expected.dtype, 0.05))


def same(found: Tensor, expected: Tensor, nearby: Tensor, amplified: float, least: float) -> bool:
    """Whether numbers are equal but for `least` of the largest, or so many times what coarser rounding makes."""
    if found.shape != expected.shape or nearby.shape != expected.shape:
        return nearby.shape != expected.shape  # shapes that depend on numbers
    if not (expected.is_floating_point() or expected.is_complex()) or found.dtype != expected.dtype:
        return True
    finite = found.isfinite(), expected.isfinite(), nearby.isfinite()
    if not torch.equal(finite[1], finite[2]):
        return True
    if not torch.equal(finite[0], finite[1]):
        return False
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected, nearby = (t[finite[1]].to(wide) for t in (found, expected, nearby))
    if not found.numel():
        return True
    tolerance = torch.maximum(least * expected.abs().max(), amplified * (nearby - expected).abs().max())
    return bool((found - expected).abs().max() <= tolerance)
