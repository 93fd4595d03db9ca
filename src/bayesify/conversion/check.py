"""`check`: do draws reach the output, and do every layer's rows get the draws of the right rows of the batch?"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from bayesify.batches import chosen_rows, first_tensor, mapped, row_count, tensors_of
from bayesify.conversion.check_one_draw import MOST_COPIED, compare_one_draw
from bayesify.conversion.check_rows import (
    call_watched,
    compare_with_drawn,
    copy_without_dropout,
    giving_draws,
    main_tensor,
    note_stored_results,
    set_modes,
    without_hooks,
)
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.conversion.explain_not_finite import find_nan
from bayesify.conversion.untrained_posterior import note_start, require_posterior_in
from bayesify.conversion.weight_reads import Arguments, arguments_of, call_with_copies
from bayesify.errors import BayesifyError, RowError
from bayesify.layers import BayesianDropout, BayesianLayer, bayesian_layers
from bayesify.layers.base import unwrapped
from bayesify.layers.call_scope import Scope
from bayesify.layers.rows import Rows
from bayesify.methods.draw_design import seed_torch

LOW = (torch.float16, torch.bfloat16)
OF_EQUAL_IDS = 10
"""In so many first calls, the one after a batch of equal ids is checked again."""
Inputs = dict[str, tuple[Tensor, Rows | None]]
"""The input of each layer with its rows first, and their rows of the batch; None where one row serves all."""


def check(model: nn.Module, batch: Any, *, optimizer: Optimizer | Iterable[Optimizer] | None = None) -> dict[str, int]:
    """Change all rows of a batch but one, and require that no layer's input for that row changes.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.Rank1(4))
    >>> by.check(model, torch.randn(6, 4))
    {'0': 1, '2': 1}

    Args:
        model: A converted network.
        batch: A batch of at least two rows, as the network takes it.
        optimizer: An optimizer, or several, that must have every trained tensor of the posterior, as one that was made
            before `convert` has not.

    Returns:
        For each layer, how many of its rows belong to one row of the batch; 0 where all rows share one.

    Raises:
        RowError: A layer would give a row another row's draw.
        BayesifyError: A draw of a layer would not reach the output, or the optimizer does not train the posterior.
    """
    model = unwrapped(model)
    layers = bayesian_layers(model)
    if not layers:
        raise BayesifyError("the model has no Bayesian layer to check: use by.convert(model, method) first")
    if optimizer is not None:
        require_posterior_in(optimizer, model)
    with _kept_unchanged(model):
        arguments = _ordinary(arguments_of(batch), next(iter(layers.values())).scope.batch_dim)
        compare_one_draw(model, arguments)
        repeats = _check(model, layers, arguments)
    if not repeats and not all(isinstance(layer, BayesianDropout) for layer in layers.values()):
        raise BayesifyError("the batch reaches no Bayesian layer, so all draws are the same (is an adapter merged?)")
    return repeats


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What `check` does, with the arguments of a call of the model, before the call.

    In training of a method that draws for rows, it is all of `check`; otherwise one draw is compared with the plain
    network. Nothing is checked where modules or inputs are wrapped (by functional_call, vmap, tracing).
    """
    layers, training = bayesian_layers(model), model.training
    scopes = {layer.scope for layer in layers.values()}
    first, batch_dim = first_tensor((args, kwargs)), next(iter(scopes)).batch_dim
    rows = 0 if first is None else row_count(first, batch_dim)
    if first is None or rows == 0 or not _can_be_copied(model, first):
        return
    if not _set_next_checks(scopes, training, first.numel(), _may_hide((args, kwargs), batch_dim)):
        return
    note_start(model)
    is_low = any(p.dtype in LOW for p in model.parameters())
    is_autocast = torch.is_autocast_enabled(first.device.type) and not is_low
    try:
        with _kept_unchanged(model), torch.autocast(first.device.type, enabled=False):
            _check_call(model, layers, _ordinary((args, kwargs), batch_dim, to_float32=is_autocast), rows)
    except BayesifyError:
        for scope in scopes:
            scope.check_from[training] = 1
        raise
    except Exception as error:  # whatever the network raises; if the call itself succeeds, that is worth a warning
        for scope in scopes:
            scope.check_failed = ". ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def _set_next_checks(scopes: set[Scope], training: bool, numbers: int, is_hidden: bool) -> bool:
    """Set from how many numbers in a batch calls are checked next; whether this one is to be."""
    # Later batches of several processes differ in size, and a network may wait for all processes.
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if training and is_distributed and all(scope.check_from[True] == inf for scope in scopes):
        return False
    for scope in scopes:
        if not training or is_distributed:
            scope.check_from[training] = inf
        elif not is_hidden or scope.training_calls >= OF_EQUAL_IDS:
            scope.check_from[True] = max(scope.check_from[True], numbers + 1)
    return True


def _may_hide(batch: Any, batch_dim: int) -> bool:
    """Whether all rows or numbers are equal ids, as in padding, which may hide what is computed and can't be moved."""
    tensors = tensors_of(batch)
    if any(t.is_floating_point() or t.is_complex() for t in tensors):
        return False
    return _has_equal_rows(batch, batch_dim) or not any((t != t.flatten()[:1]).any() for t in tensors)


def _has_equal_rows(batch: Any, batch_dim: int) -> bool:
    """Whether there are several rows, and all are equal."""
    if (rows := row_count(batch, batch_dim)) < 2:
        return False
    rolled = chosen_rows(batch, torch.arange(rows).roll(1), rows, batch_dim)
    return all(map(torch.equal, tensors_of(batch), tensors_of(rolled)))


def _check_call(model: nn.Module, layers: dict[str, BayesianLayer], batch: Arguments, rows: int) -> None:
    note_stored_results(model, batch)
    compare_one_draw(model, batch)
    if rows > 1 and len(_drawn(layers)) < len(layers):
        _check_kept_dropout(model, batch, rows)
    by_row = {name: layer for name, layer in _drawn(layers).items() if layer.method.draws_per != "batch"}
    if rows > 1 and model.training and by_row:
        _check(model, by_row, batch)


@torch.no_grad()
def _check_kept_dropout(model: nn.Module, batch: Arguments, rows: int) -> None:
    """Raise if a draw of kept dropout gives a row another output when the rows are in another order."""
    drawn = DrawnNetwork(model)
    reverse = chosen_rows(batch, torch.arange(rows).flip(0), rows, drawn.batch_dim)
    for seed in (None, 0):  # without dropout rows may depend on each other, which is not its fault
        network = without_hooks(drawn.write_draw(seed))
        one, other = (main_tensor(call_with_copies(network, part)) for part in (batch, reverse))
        dim = drawn.batch_dim if one.dim() > 2 else 0
        if one.dim() <= dim or one.shape[dim] != rows or other.shape != one.shape:
            return
        differs = bool(_changed(one.transpose(0, dim), other.flip(dim).transpose(0, dim)).any())
        if differs and seed is None:
            return
        if differs:
            raise RowError(
                "keep_dropout: a row's output changes with the order of the rows, as rows are folded into a dimension "
                "in which each place has a mask of its own. Keep the batch in a dimension of its own where dropout is"
            )


@contextmanager
def _kept_unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the random state, and parameters that forward changes in place unless they are too many to be copied."""
    parameters = [p for p in model.parameters() if not p.is_inference()]
    values = [p.detach().clone() for p in parameters] if sum(p.numel() for p in parameters) <= MOST_COPIED else []
    versions = [p._version for p in parameters]
    with torch.random.fork_rng(devices={p.device for p in parameters if p.is_cuda}):
        try:
            yield
        finally:
            with torch.no_grad():
                for p, version, value in zip(parameters, versions, values, strict=False):
                    if p._version != version:
                        p.copy_(value)


def _can_be_copied(model: nn.Module, first: Tensor) -> bool:
    """Whether a model and its input are ordinary ones: not on the meta device, nor wrapped by a transform of torch."""
    is_tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if is_tracing or first.is_nested or first.is_meta or not _is_ordinary(first):
        return False
    try:
        first.data_ptr()
    except RuntimeError:  # vmap and its like wrap tensors
        return False
    parameters = [*model.parameters()]  # in functional calls, tensors
    is_given = all(isinstance(p, nn.Parameter) and not is_lazy(p) for p in parameters)
    return is_given and all(_is_ordinary(p) and not p.is_meta for p in parameters)


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor has numbers of its own; subclasses may add to it, as images with annotations do."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _ordinary(batch: Arguments, batch_dim: int, *, to_float32: bool = False) -> Arguments:
    """Inputs without what subclasses add, in float32 if in 16 bits for autocast, which is off.

    What would hide something that is computed gets noise: numbers that are all zero, and rows that are all equal.
    """
    has_equal_rows = _has_equal_rows(batch, batch_dim)

    def ordinary(tensor: Tensor) -> Tensor:
        tensor = tensor.as_subclass(Tensor) if _is_ordinary(tensor) else tensor
        if tensor.is_floating_point() and tensor.numel() and (has_equal_rows or not bool(tensor.any())):
            tensor = tensor + 0.1 * tensor.abs().max().clamp_min(1) * torch.randn_like(tensor)
        return tensor.float() if to_float32 and tensor.dtype in LOW else tensor

    made: Arguments = mapped(batch, ordinary)
    return made


def _drawn(layers: dict[str, BayesianLayer]) -> dict[str, BayesianLayer]:
    return {name: layer for name, layer in layers.items() if not isinstance(layer, BayesianDropout)}


def _check(model: nn.Module, layers: dict[str, BayesianLayer], batch: Arguments) -> dict[str, int]:
    """How many rows of each layer belong to a row of the batch; empty where the batch reaches no layer."""
    layers, rows = _drawn(layers), row_count(batch, next(iter(layers.values())).scope.batch_dim)
    if rows < 2:
        raise BayesifyError(f"check needs a batch of at least 2 rows to tell them apart, got {rows}")
    if not layers:  # kept dropout alone
        return {}
    network = without_hooks(DrawnNetwork(model).write_draw(None))
    inputs = _followed(network, layers, batch, rows)
    repeats = {name: followed.repeat if followed else 0 for name, (_, followed) in inputs.items()}
    _refuse_repeated(model, batch, [name for name, repeat in repeats.items() if not repeat])
    compare = partial(compare_with_drawn, model, batch, rows)
    if repeats:
        compare()
    if any(module.training for module in set_modes(network, model).modules()):
        try:
            _followed(network, layers, batch, rows)
            compare(in_training=True)
        except RowError as error:
            warnings.warn(
                f"in training mode, the network computes something else than in evaluation: {error}. Ignore this if "
                "it normalises with the statistics of the batch or mixes rows on purpose",
                stacklevel=2,
            )
    return repeats


def _followed(network: nn.Module, layers: dict[str, BayesianLayer], batch: Arguments, rows: int) -> Inputs:
    """The inputs of a plain network's layers, and their rows of the batch; raises where these can't be told."""
    batch_dim = next(iter(layers.values())).scope.batch_dim
    inputs = _inputs(network, layers, batch, rows)
    fixed = set() if _has_equal_rows(batch, batch_dim) else set(inputs)  # so far
    for row in sorted({0, rows // 2, rows - 1}):
        next_rows = torch.arange(1, rows + 1) % rows
        next_rows[row] = row  # all other rows get the values of the next, which are valid and fit together
        after = _inputs(network, layers, chosen_rows(batch, next_rows, rows, batch_dim))
        fixed -= {name for name in inputs if _require_row_kept(name, inputs[name], after.get(name), row)}
    for name in sorted(fixed, key=list(inputs).index):
        x, followed = inputs[name]
        # Rows that the batch changes by too little to be seen one by one may differ by all of these together.
        if followed is not None and bool(_changed(x, x[:1].expand_as(x), times=len(x)).any()):
            raise RowError(
                f"layer {name!r} has {len(x)} rows that no row of the batch changes, such as positions or a "
                "table for all; they would get draws meant for rows. Leave the layer out, or give it one row: (1, …)"
            )
    return inputs


def _inputs(network: nn.Module, layers: dict[str, BayesianLayer], batch: Arguments, rows: int = 1) -> Inputs:
    """The inputs of the layers that the batch reaches; a network that is random gets the same numbers each time."""
    found: Inputs = {}

    def watch(name: str, layer: nn.Module, x: Tensor, output: Any) -> None:
        layer = layers[name]
        dim = layer.row_dim(x)
        if bool(x.isnan().any()):
            cause = find_nan(batch) or "it comes from the network itself; find its cause, or check another batch"
            raise BayesifyError(f"layer {name!r} gets NaN: {cause}")
        if layer.is_unbatched(x) or x.shape[dim] == 1:
            found[name] = x.unsqueeze(0).clone(), None
        else:
            followed = Rows.follow(layer.site_name, x.shape[dim], rows, 0 if dim else layer.scope.batch_dim)
            found[name] = x.transpose(0, dim).clone(), followed

    seed_torch(0)
    with torch.no_grad():
        call_watched(network, layers, batch, watch)
    return found


def _require_row_kept(
    name: str, before: tuple[Tensor, Rows | None], after: tuple[Tensor, Rows | None] | None, row: int
) -> bool:
    """Whether a layer's input changed with all other rows of the batch; raises if what belongs to this row did."""
    count, new_count = len(before[0]), len(after[0]) if after else 0
    if after is None or new_count != count:
        raise RowError(
            f"layer {name!r} got {count} rows, and {new_count} after all rows of the batch but row {row} were changed: "
            "which rows it gets depends on their contents, as in a mixture of experts, or on earlier calls, whose "
            "results the network keeps, so they can't be followed. Leave it out, or use a method that draws once for "
            "the batch, such as MeanField(estimator='shared')"
        )
    changed, followed = _changed(before[0], after[0]), before[1]
    if followed is not None:
        wrong = (changed & (followed.owner(changed.device) == row)).nonzero().flatten().tolist()
        if wrong:
            raise RowError(
                f"layer {name!r} gets {count} rows for a batch of {followed.batch}. Its rows {wrong[:5]}"
                f"{'…' * (len(wrong) > 5)} should belong to row {row} of the batch, but changed with the other rows. "
                "Rows are mixed or reordered before this layer: leave it out, or give batch_dim"
            )
    return bool(changed.any())


def _changed(before: Tensor, after: Tensor, times: int = 1) -> Tensor:
    """Which rows differ by more than rounding, or so many times that, over the steps that both tensors have."""
    steps = tuple(slice(min(sizes)) for sizes in zip(before.shape, after.shape, strict=True))
    before, after = before[steps], after[steps]
    if before.numel() == 0:
        return torch.zeros(len(before), dtype=torch.bool, device=before.device)
    differs = before != after
    if before.is_floating_point():
        least = 1e-6 * before.abs().amax(0, keepdim=True)  # of each place by itself: others may be much larger
        differs &= ~((before - after).abs() <= times * (least + 1e-5 * before.abs()))
    return differs.reshape(len(before), -1).any(1)


def _refuse_repeated(model: nn.Module, batch: Arguments, names: list[str]) -> None:
    """Raise if the network fails when layers that get one row for all return one row for each of the batch."""
    if not names:
        return
    try:
        copied = copy_without_dropout(model, model.parameters()).eval()
        with giving_draws(copied, {}, per_row=True), torch.no_grad():
            call_with_copies(copied, batch)
    except (BayesifyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the network raises, with the likely reason for it
        raise RowError(
            f"layer {', '.join(map(repr, names[:3]))} gets one row for all; in training it returns one for each row of "
            f"the batch, and the network then fails with {type(error).__name__}: {error}. Perhaps it repeats that row "
            f"for the batch itself. Leave the layer out: convert(model, {{{names[0]!r}: None, '*': method}})"
        ) from error
