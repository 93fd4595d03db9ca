"""Proof that rows are followed through every layer, and batch statistics anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .batches import batches, call_with, input_of, mapped
from .errors import BayesifyError, RowError
from .layers import BayesianDropout, BayesianLayer, bayesian_layers
from .layers.rows import Rows
from .layers.scope import Scope, batch_size, first_tensor
from .selection import unwrapped
from .skeleton import Skeleton


def check(model: nn.Module, batch: Any) -> dict[str, int]:
    """Change single rows of a batch and require that in every layer exactly the expected rows change.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.Rank1(4))
    >>> by.check(model, torch.randn(6, 4))
    {'0': 1, '2': 1}

    Returns how many of its rows each layer has for a row of the batch (0 where all rows share one). Raises `RowError`
    where a layer would give a row another row's draw.
    """
    layers = bayesian_layers(unwrapped(model))
    if not layers:
        raise BayesifyError("the model has no Bayesian layer to check: use by.convert(model, family) first")
    scope = next(iter(layers.values())).scope
    first = first_tensor(batch)
    rows = 0 if first is None else batch_size(first, scope.batch_dim)
    if rows < 2:
        raise BayesifyError(f"check needs a batch of at least 2 rows to tell them apart, got {rows}")
    probe = _Probe(model, layers)
    inputs = probe.inputs(batch)
    probe.refuse_unheard(batch, [name for name in probe.parts if name not in inputs])
    if probe.parts and not inputs:
        raise BayesifyError(
            "the batch reaches no Bayesian layer, so all draws are one function (is an adapter merged?)"
        )
    before = {name: _by_row(layers[name], seen) for name, seen in inputs.items()}
    followed = {name: _followed(layers[name], seen, rows) for name, seen in inputs.items()}
    repeats = {name: found.repeat if found else 0 for name, found in followed.items()}
    moved: set[str] = set()
    for row in sorted({0, rows // 2, rows - 1}):
        after = probe.inputs(_with_row_changed(batch, row, rows, scope.batch_dim))
        for name, seen in before.items():
            changed = _changed(seen, _by_row(layers[name], after[name]))
            moved |= {name} if bool(changed.any()) else set()
            if (rows_of := followed[name]) is not None:
                _compare(name, rows_of, changed, row)
    for name, seen in before.items():
        if repeats[name] and name not in moved and bool(_changed(seen, seen[:1].expand_as(seen)).any()):
            raise RowError(
                f"layer {name!r} has {len(seen)} rows that no row of the batch changes, such as positions or a "
                "table for all; they would be given the draws of rows. Leave the layer out, or give it one row: (1, …)"
            )
    _refuse_repeated(model, batch, scope, [name for name, repeat in repeats.items() if not repeat])
    return repeats


@torch.no_grad()
def recalibrate(model: nn.Module, loader: Iterable[Any]) -> nn.Module:
    """Estimate the statistics of all batch norms anew, as the average over a loader's batches under training draws.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), by.IBNN(4))
    >>> model = by.recalibrate(model, [torch.randn(16, 4) for _ in range(3)])
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.running_mean is not None]
    if not norms:
        return model
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    saved = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    count, done = 0, False
    try:
        for norm in norms:
            _forget(norm)
        model.train()
        for batch in batches(loader, None):
            _refuse_too_few_rows(norms, input_of(batch))
            call_with(model, input_of(batch))
            count += 1
        done = True
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, kept in zip(norms, saved, strict=True):
            norm.momentum = momenta[norm]
            if not (done and count):
                norm.load_state_dict(kept, strict=False)
    if not count:
        raise BayesifyError("recalibrate got no batch; the statistics were left as they were")
    return model


class _Probe:
    """The mean network, seen through what comes into its converted layers."""

    def __init__(self, model: nn.Module, layers: dict[str, BayesianLayer]) -> None:
        self.network = Skeleton(model).write(None)
        self.seen: dict[str, Tensor] = {}
        self.layers = {name: layer for name, layer in layers.items() if not isinstance(layer, BayesianDropout)}
        modules = dict(self.network.named_modules())
        self.parts = {name: modules[name] for name in self.layers}
        for name, layer in self.layers.items():
            self.parts[name].register_forward_pre_hook(self._watch(name, layer), with_kwargs=True)

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        """The input of every layer that the batch reaches."""
        self.seen = {}
        with torch.no_grad():
            call_with(self.network, batch)
        bad = next((name for name, seen in self.seen.items() if bool(seen.isnan().any())), None)
        if bad is not None:
            raise BayesifyError(
                f"layer {bad!r} is given NaN by the network itself, so its rows can't be told apart; find out where "
                "they come from, or check another batch"
            )
        return self.seen

    @torch.no_grad()
    def refuse_unheard(self, batch: Any, names: list[str]) -> None:
        """Raise where layers that were not called count: their weights are read by others, past their draws."""
        unheard = [name for name in names if self._counts(batch, name)]
        if unheard:
            shown = ", ".join(map(repr, unheard[:3])) + (f" and {len(unheard) - 3} more" if len(unheard) > 3 else "")
            raise BayesifyError(
                f"layer {shown}: not called, yet its weight changes the output. A module around it reads the weight "
                "itself, so training would not draw it. Leave it out by its name or a pattern: "
                f"convert(model, {{{unheard[0]!r}: None, '*': family}})"
            )

    def _counts(self, batch: Any, name: str) -> bool:
        """Whether other numbers in a layer's tensors make another output."""
        before = first_tensor(call_with(self.network, batch))
        tensors = self.parts[name]._parameters
        for own, p in tensors.items():
            tensors[own] = None if p is None else nn.Parameter(1.5 * p + 0.1, requires_grad=False)
        after = first_tensor(call_with(self.network, batch))
        return before is not None and after is not None and not torch.equal(before, after)

    def _watch(self, name: str, layer: BayesianLayer) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.seen[name] = layer.as_tensor(*args, **kwargs).clone()

        return hook


def _refuse_repeated(model: nn.Module, batch: Any, scope: Scope, names: list[str]) -> None:
    """Raise where the network can't go on with a row for each of the batch from layers that it gives one for all."""
    if not names:
        return
    modes, before = {module: module.training for module in model.modules()}, scope.by_rows
    try:
        scope.by_rows = True
        with torch.no_grad():
            call_with(model.eval(), batch)
    except (BayesifyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RowError(
            f"layer {', '.join(map(repr, names[:3]))} is given one row for all; in training it gives each row of the "
            f"batch its own, and the network then fails with {type(error).__name__}: {error}. Perhaps it repeats that "
            f"row for the batch. Leave the layer out: convert(model, {{{names[0]!r}: None, '*': family}})"
        ) from error
    finally:
        scope.by_rows = before
        for module, mode in modes.items():
            module.training = mode


def _with_row_changed(batch: Any, row: int, rows: int, batch_dim: int) -> Any:
    """The batch with one row of every tensor that has rows made different."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() <= batch_dim or tensor.shape[batch_dim] != rows:
            return tensor
        tensor = tensor.clone()
        part = tensor.select(batch_dim, row)
        part.copy_(_different(part, tensor.movedim(batch_dim, 0)))
        return tensor

    return mapped(batch, change)


def _different(part: Tensor, rows: Tensor) -> Tensor:
    """Another row: numbers with noise; of ids, which a network may want in some order, one that the batch has."""
    if part.dtype == torch.bool:
        return part
    if part.is_floating_point():
        return part + 0.5 * (rows.std() + 1) * torch.randn_like(part)
    others = (rows != part).reshape(len(rows), -1).any(1).nonzero().flatten()
    if len(others):
        return rows[others[0]]
    low, high = int(rows.min()), int(rows.max())
    return low + (part - low + 1) % (high - low + 1)


def _by_row(layer: BayesianLayer, seen: Tensor) -> Tensor:
    """A layer's input with its rows first; without a batch it is one row for all."""
    if layer.is_unbatched(seen):
        return seen.unsqueeze(0)
    return seen.transpose(0, layer.row_dim(seen))


def _followed(layer: BayesianLayer, seen: Tensor, rows: int) -> Rows | None:
    """How the layer follows the rows of its input; None where one serves all."""
    if layer.is_unbatched(seen) or seen.shape[layer.row_dim(seen)] == 1:
        return None
    return layer.follow(seen.shape[layer.row_dim(seen)], rows, layer.row_dim(seen))


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Which rows differ, in the steps that both have, by more than another order of summing would make them."""
    steps = tuple(slice(min(sizes)) for sizes in zip(before.shape, after.shape, strict=True))
    least = 1e-6 * float(before.abs().max()) if before.numel() else 0.0
    same = torch.isclose(before[steps], after[steps], rtol=1e-5, atol=least)
    return (~same).reshape(len(before), -1).any(1)


def _compare(name: str, followed: Rows, changed: Tensor, row: int) -> None:
    """Require that only the rows changed that are followed from the row that did."""
    expected = followed.owner(len(changed), changed.device) == row
    wrong = (changed & ~expected).nonzero().flatten().tolist()
    if wrong:
        raise RowError(
            f"layer {name!r} has {len(changed)} rows for {followed.batch} of the batch; changing row {row} changed its "
            f"rows {wrong[:5]}{'…' if len(wrong) > 5 else ''}, where only {expected.nonzero().flatten().tolist()[:5]} "
            "were expected. Rows are mixed or folded in another order before this layer: leave it out, or give "
            "batch_dim"
        )


def _refuse_too_few_rows(norms: list[_BatchNorm], batch: Any) -> None:
    """Members with their own statistics must all be in every batch, or their averages would be of different ones."""
    own = [norm.family.components for norm in norms if isinstance(norm, BayesianLayer) and _own_statistics(norm)]
    first = first_tensor(batch)
    if own and first is not None and first.shape[0] < max(own):
        raise BayesifyError(f"recalibrate got {first.shape[0]} rows for {max(own)} members; use larger batches")


def _own_statistics(norm: BayesianLayer) -> list[str]:
    return [name for name in ("running_mean", "running_var") if name in norm.posterior._buffers]


def _forget(norm: _BatchNorm) -> None:
    norm.reset_running_stats()
    norm.momentum = None
    if isinstance(norm, BayesianLayer):
        for name in _own_statistics(norm):
            norm.posterior.get_buffer(name).copy_(getattr(norm, name).expand_as(norm.posterior.get_buffer(name)))
