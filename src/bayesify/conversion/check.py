"""`check`: do draws reach the output, and do every layer's rows get the draws of the right rows of the batch?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesify.batches import first_tensor, mapped, row_count
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.conversion.training_rows import compare_with_drawn, note_stored_results, without_hooks
from bayesify.errors import BayesifyError, RowError
from bayesify.layers import BayesianDropout, BayesianLayer, bayesian_layers
from bayesify.layers.base import unwrapped
from bayesify.layers.network_state import copy_of
from bayesify.layers.rows import Rows


def check(model: nn.Module, batch: Any) -> dict[str, int]:
    """Change single rows of a batch and require that in every layer exactly the expected rows change.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.Rank1(4))
    >>> by.check(model, torch.randn(6, 4))
    {'0': 1, '2': 1}

    Args:
        model: A converted network.
        batch: A batch of at least two rows, as the network takes it.

    Returns:
        For each layer, how many of its rows belong to one row of the batch; 0 where all rows share one.

    Raises:
        RowError: A layer would give a row another row's draw.
        BayesifyError: A draw of a layer would not reach the output.
    """
    model = unwrapped(model)
    layers = bayesian_layers(model)
    if not layers:
        raise BayesifyError("the model has no Bayesian layer to check: use by.convert(model, method) first")
    with _values_kept(model), _random_state_kept(model):
        repeats = _check(model, layers, arguments_of(batch))
    if not repeats and not all(isinstance(layer, BayesianDropout) for layer in layers.values()):
        raise BayesifyError(
            "the batch reaches no Bayesian layer, so all draws are the same function (is an adapter merged?)"
        )
    return repeats


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What `check` does, with the arguments of a call of the model, before the call.

    In training of a method that draws for rows, it is all of `check`; otherwise a call is compared with the plain
    network that has its draw. Where modules or inputs are wrapped (by functional_call, vmap, tracing) nothing is
    checked.
    """
    layers, training = bayesian_layers(model), model.training
    scopes = {layer.scope for layer in layers.values()}
    first = first_tensor((args, kwargs))
    if first is None or not _can_be_copied(model, first):
        return
    rows = row_count(first, next(iter(scopes)).batch_dim)
    # Later batches of several processes differ in size, and a network may wait for all processes.
    is_last = torch.distributed.is_available() and torch.distributed.is_initialized()
    for scope in scopes:  # also for the calls of the check itself
        scope.check_from |= {False: inf, True: inf if is_last else 2 * rows} if training else {False: inf}
    try:
        with _values_kept(model), _random_state_kept(model):
            _check_call(model, layers, (args, kwargs), rows)
    except BayesifyError:
        for scope in scopes:
            scope.check_from[training] = 1
        raise
    except Exception as error:  # whatever the network raises; if the call itself succeeds, that is worth a warning
        for scope in scopes:
            scope.check_failed = f"{type(error).__name__}: {error}"


def _check_call(model: nn.Module, layers: dict[str, BayesianLayer], batch: Arguments, rows: int) -> None:
    drawn = {name: layer for name, layer in layers.items() if not isinstance(layer, BayesianDropout)}
    by_row = {name: layer for name, layer in drawn.items() if layer.method.draws_per != "batch"}
    if rows > 0:
        note_stored_results(model, lambda network: _call(network, batch))
    if rows > 1 and model.training and by_row:
        _check(model, by_row, batch)
    elif rows > 0:
        compare_with_drawn(model, lambda network: _call(network, batch), rows, per_row=model.training)


@contextmanager
def _values_kept(model: nn.Module) -> Iterator[None]:
    """Restore parameters that the network's own forward changes in place, unless they are too many to be copied."""
    parameters = [p for p in model.parameters() if not p.is_inference()]
    values = [p.detach().clone() for p in parameters] if sum(p.numel() for p in parameters) <= MOST_COPIED else []
    versions = [p._version for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, version, value in zip(parameters, versions, values, strict=False):
                if p._version != version:
                    p.copy_(value)


MOST_COPIED = 50_000_000
"""Models with more parameters than this are not copied to restore what their forward changes."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a call."""


def arguments_of(batch: Any) -> Arguments:
    """How a network is called with a batch: by name where it is a dict."""
    return ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})


def _call(network: nn.Module, arguments: Arguments) -> Any:
    """Call a network with copies of the tensors, as it may change them in place."""
    args, kwargs = mapped(arguments, Tensor.clone)
    return network(*args, **kwargs)


@contextmanager
def _random_state_kept(model: nn.Module) -> Iterator[None]:
    with torch.random.fork_rng(devices={p.device for p in model.parameters() if p.is_cuda}):
        yield


def _can_be_copied(model: nn.Module, first: Tensor) -> bool:
    """Whether a model and its input are ordinary ones: not on the meta device, nor wrapped by a transform of torch."""
    is_tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if is_tracing or first.is_nested or type(first) is not Tensor:
        return False
    if any(type(p) is not nn.Parameter or p.is_meta for p in model.parameters()):
        return False
    try:
        first.data_ptr()
    except RuntimeError:  # vmap and its like wrap tensors
        return False
    return not first.is_meta


def _check(model: nn.Module, layers: dict[str, BayesianLayer], batch: Arguments) -> dict[str, int]:
    """How many rows of each layer belong to a row of the batch; empty where the batch reaches no layer."""
    scope = next(iter(layers.values())).scope
    rows = row_count(batch, scope.batch_dim)
    if rows < 2:
        raise BayesifyError(f"check needs a batch of at least 2 rows to tell them apart, got {rows}")
    probe = _Probe(model, layers)
    inputs = probe.inputs(batch)
    _refuse_bypassed(probe.network, batch, [name for name in probe.layers if name not in inputs])
    followed = {name: _followed(layers[name], seen, rows) for name, seen in inputs.items()}
    moved: set[str] = set()
    for row in sorted({0, rows // 2, rows - 1}):
        after = probe.inputs(_with_row_changed(batch, row, rows, scope.batch_dim), is_changed=True)
        for name, seen in inputs.items():
            changed = _changed_rows(layers[name], name, seen, after.get(name), row)
            moved |= {name} if bool(changed.any()) else set()
            _compare(name, followed[name], changed, row)
    still = inputs.keys() - moved  # as layers behind an activation that is zero for the changed rows are
    after = probe.inputs(_with_rows_moved(batch, rows, scope.batch_dim), is_changed=True) if still else {}
    for name in still & after.keys():
        pair = (_by_row(layers[name], inputs[name]), _by_row(layers[name], after[name]))
        _refuse_rows_of_their_own(name, followed[name], *pair)
    repeats = {name: found.repeat if found else 0 for name, found in followed.items()}
    _refuse_repeated(model, batch, [name for name, repeat in repeats.items() if not repeat])
    if repeats:
        compare_with_drawn(model, lambda network: _call(network, batch), rows, per_row=True)
    return repeats


class _Probe:
    """The mean network, with hooks that record the inputs of its converted layers."""

    def __init__(self, model: nn.Module, layers: dict[str, BayesianLayer]) -> None:
        self.network = without_hooks(DrawnNetwork(model).write_draw(None))
        self.seen: dict[str, Tensor] = {}
        self.layers = {name: layer for name, layer in layers.items() if not isinstance(layer, BayesianDropout)}
        for name, layer in self.layers.items():
            self.network.get_submodule(name).register_forward_pre_hook(self._watch(name, layer), with_kwargs=True)

    def inputs(self, batch: Arguments, *, is_changed: bool = False) -> dict[str, Tensor]:
        """The input of every layer that the batch reaches; a network that is random gets the same numbers each time."""
        self.seen = {}
        torch.manual_seed(0)
        with torch.no_grad():
            _call(self.network, batch)
        seen, self.seen = self.seen, {}
        bad = next((name for name, x in seen.items() if bool(x.isnan().any())), None)
        if bad is not None and not is_changed:
            raise BayesifyError(
                f"layer {bad!r} gets NaN from the network itself, so its rows can't be told apart; find out where "
                "they come from, or check another batch"
            )
        return seen

    def _watch(self, name: str, layer: BayesianLayer) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.seen[name] = layer.as_tensor(*args, **kwargs).clone()

        return hook


class _Reads(TorchFunctionMode):
    """Which of some tensors are computed with."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.tensors, self.read = {id(tensor) for tensor in tensors}, set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (Tensor, tuple, list)):  # and not a shape or a dtype
            values = [*args, *(kwargs or {}).values()]
            values += [part for value in values if isinstance(value, (tuple, list)) for part in value]
            self.read |= self.tensors & {id(value) for value in values}
        return result


@torch.no_grad()
def bypassed_layers(network: nn.Module, batch: Arguments, names: Iterable[str]) -> list[str]:
    """The layers of a plain network that are not called, although their weights are read.

    Another module reads the weights directly, so in training no draw would reach the output.
    """
    network = copy_of(network, shared=network.parameters()).eval()
    modules, called = {name: network.get_submodule(name) for name in names}, set()
    for module in modules.values():
        module.register_forward_pre_hook(lambda module, args: called.add(module))
    with _Reads(p for module in modules.values() for p in module.parameters(recurse=False)) as reads:
        _call(network, batch)
    by_calls = {id(p) for module in called for p in module.parameters(recurse=False)}
    read = reads.read - by_calls
    return [name for name, module in modules.items() if read & {id(p) for p in module.parameters(recurse=False)}]


def _refuse_bypassed(network: nn.Module, batch: Arguments, names: list[str]) -> None:
    found = bypassed_layers(network, batch, names) if names else []
    if found:
        shown = ", ".join(map(repr, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise BayesifyError(
            f"layer {shown}: not called, although its weight is read. Another module reads the weight "
            "itself, so training would not draw it. Leave such layers out: convert(model, method, example=batch) does, "
            f"or by name: convert(model, {{{found[0]!r}: None, '*': method}})"
        )


def _refuse_repeated(model: nn.Module, batch: Arguments, names: list[str]) -> None:
    """Raise if the network fails when layers that get one row for all return one row for each of the batch."""
    if not names:
        return
    copied = without_hooks(copy_of(model, model.parameters()).eval())
    try:
        with ExitStack() as stack, torch.no_grad():
            for scope in {layer.scope for layer in bayesian_layers(copied).values()}:
                stack.enter_context(scope.drawing_per_row())
            _call(copied, batch)
    except (BayesifyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the network raises, with the likely reason for it
        raise RowError(
            f"layer {', '.join(map(repr, names[:3]))} gets one row for all; in training it returns one for each row of "
            f"the batch, and the network then fails with {type(error).__name__}: {error}. Perhaps it repeats that row "
            f"for the batch itself. Leave the layer out: convert(model, {{{names[0]!r}: None, '*': method}})"
        ) from error


def _with_row_changed(batch: Any, row: int, rows: int, batch_dim: int) -> Any:
    """The batch with another row's values in one row of each tensor, which are valid and fit together.

    If all rows are equal, numbers get noise instead.
    """
    found: list[Tensor] = []
    _with_rows(batch, rows, batch_dim, lambda tensor: found.append(tensor.movedim(batch_dim, 0)) or tensor)  # type: ignore[func-returns-value]
    others = [(row + step) % rows for step in range(1, rows)]
    source = next((other for other in others if any(not torch.equal(t[row], t[other]) for t in found)), None)

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        part = tensor.select(batch_dim, row)
        if source is not None:
            part.copy_(tensor.select(batch_dim, source))
        elif part.is_floating_point():
            part.add_(torch.randn_like(part))
        return tensor

    return _with_rows(batch, rows, batch_dim, change)


def _with_rows_moved(batch: Any, rows: int, batch_dim: int) -> Any:
    """The batch with each row in the place of the next."""
    return _with_rows(batch, rows, batch_dim, lambda tensor: tensor.roll(1, batch_dim))


def _with_rows(batch: Any, rows: int, batch_dim: int, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor changed that has rows."""
    return mapped(batch, lambda t: change(t) if t.dim() > batch_dim and t.shape[batch_dim] == rows else t)


def _by_row(layer: BayesianLayer, seen: Tensor) -> Tensor:
    """A layer's input with its rows first; an input without a batch is one row for all."""
    if layer.is_unbatched(seen):
        return seen.unsqueeze(0)
    return seen.transpose(0, layer.row_dim(seen))


def _followed(layer: BayesianLayer, seen: Tensor, rows: int) -> Rows | None:
    """Which rows of the batch the layer's rows belong to; None where one row serves all."""
    if layer.is_unbatched(seen) or seen.shape[layer.row_dim(seen)] == 1:
        return None
    dim = layer.row_dim(seen)
    return Rows.follow(layer.site_name, seen.shape[dim], rows, 0 if dim else layer.scope.batch_dim)


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Which rows differ by more than rounding, over the steps that both tensors have."""
    steps = tuple(slice(min(sizes)) for sizes in zip(before.shape, after.shape, strict=True))
    before, after = before[steps], after[steps]
    if before.numel() == 0:
        return torch.zeros(len(before), dtype=torch.bool, device=before.device)
    if not before.is_floating_point():
        return (before != after).reshape(len(before), -1).any(1)
    least = 1e-6 * before.abs().amax(0, keepdim=True)  # of each place by itself: others may be much larger
    same = ((before - after).abs() <= least + 1e-5 * before.abs()) | (before == after)
    return (~same).reshape(len(before), -1).any(1)


def _changed_rows(layer: BayesianLayer, name: str, before: Tensor, after: Tensor | None, row: int) -> Tensor:
    """Which rows of a layer change with a row of the batch; raises if their number does: content chooses them."""
    old = _by_row(layer, before)
    new = old[:0] if after is None else _by_row(layer, after)
    if len(new) != len(old):
        raise RowError(
            f"layer {name!r} got {len(old)} rows, and {len(new)} after row {row} of the batch was changed: it gets "
            "rows by what they contain, as experts do, so they can't be followed. Leave it out, or use a method that "
            "draws once for the batch, such as MeanField(estimator='shared')"
        )
    return _changed(old, new)


def _refuse_rows_of_their_own(name: str, followed: Rows | None, seen: Tensor, moved: Tensor) -> None:
    """Raise for a layer whose rows differ, though they stay where they are when the batch's rows move."""
    differ = followed is not None and bool(_changed(seen, seen[:1].expand_as(seen)).any())
    if differ and seen.shape == moved.shape and not bool(_changed(seen, moved).any()):
        raise RowError(
            f"layer {name!r} has {len(seen)} rows that no row of the batch changes, such as positions or a "
            "table for all; they would get draws meant for rows. Leave the layer out, or give it one row: (1, …)"
        )


def _compare(name: str, followed: Rows | None, changed: Tensor, row: int) -> None:
    """Require that only those of the layer's rows changed that belong to the changed row of the batch."""
    if followed is None:
        return
    expected = followed.owner(changed.device) == row
    wrong = (changed & ~expected).nonzero().flatten().tolist()
    if wrong:
        raise RowError(
            f"layer {name!r} has {len(changed)} rows for {followed.batch} of the batch; changing row {row} changed its "
            f"rows {wrong[:5]}{'…' if len(wrong) > 5 else ''}, where only {expected.nonzero().flatten().tolist()[:5]} "
            "were expected. Rows are mixed or reordered before this layer: leave it out, or give "
            "batch_dim"
        )
