"""Proof that rows are followed through every layer, and batch statistics anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .batches import batches, mapped, run
from .errors import BayesifyError, RowError
from .layers import BayesianDropout, BayesianLayer, bayesian_layers
from .layers.rows import Rows
from .layers.scope import batch_size, first_tensor
from .skeleton import Skeleton, unwrapped


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
    before = probe.inputs(batch)
    repeats: dict[str, int] = {}
    for row in sorted({0, rows // 2, rows - 1}):
        after = probe.inputs(_with_row_changed(batch, row, rows, scope.batch_dim))
        for name, seen in before.items():
            repeats[name] = _compare(name, layers[name], seen, after[name], row, rows)
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
    count = 0
    try:
        for norm in norms:
            _forget(norm)
        model.train()
        for batch in batches(loader, None):
            run(model, batch)
            count += 1
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, kept in zip(norms, saved, strict=True):
            norm.momentum = momenta[norm]
            if not count:
                norm.load_state_dict(kept, strict=False)
    if not count:
        raise BayesifyError("recalibrate got no batch; the statistics were left as they were")
    return model


class _Probe:
    """The mean network, seen through what comes into its converted layers."""

    def __init__(self, model: nn.Module, layers: dict[str, BayesianLayer]) -> None:
        self.network = Skeleton(model).write(None)
        self.seen: dict[str, Tensor] = {}
        parts = dict(self.network.named_modules())
        for name, layer in layers.items():
            if not isinstance(layer, BayesianDropout):
                parts[name].register_forward_pre_hook(self._watch(name))

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        """The input of every layer that the batch reaches."""
        self.seen = {}
        with torch.no_grad():
            run(self.network, batch)
        return self.seen

    def _watch(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.seen[name] = args[0].clone()

        return hook


def _with_row_changed(batch: Any, row: int, rows: int, batch_dim: int) -> Any:
    """The batch with one row of every tensor that has rows made different."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() <= batch_dim or tensor.shape[batch_dim] != rows:
            return tensor
        tensor = tensor.clone()
        part = tensor.select(batch_dim, row)
        part.copy_(_different(part, tensor))
        return tensor

    return mapped(batch, change)


def _different(part: Tensor, whole: Tensor) -> Tensor:
    if part.dtype == torch.bool:
        return part
    if part.is_floating_point():
        return part + 0.5 * (whole.std() + 1) * torch.randn_like(part)
    low, high = int(whole.min()), int(whole.max())
    return low + (part - low + 1) % (high - low + 1)


def _compare(name: str, layer: BayesianLayer, before: Tensor, after: Tensor, row: int, rows: int) -> int:
    """How often a row stands in a layer's input, having checked that it is just there that it changed."""
    if layer.is_unbatched(before):
        return 0
    batch_dim = layer.scope.batch_dim if layer.features_last and before.dim() > layer.least_dims else 0
    before, after = before.transpose(0, batch_dim), after.transpose(0, batch_dim)
    if before.shape[0] == 1:
        return 0
    followed = Rows.follow(name, before.shape[0], rows, 0 if batch_dim else layer.scope.batch_dim)
    changed = (before != after).flatten(1).any(1)
    expected = followed.owner(before.shape[0], before.device) == row
    wrong = changed & ~expected
    if bool(wrong.any()):
        found = wrong.nonzero().flatten().tolist()
        raise RowError(
            f"layer {name!r} has {before.shape[0]} rows for {rows} of the batch; changing row {row} changed its rows "
            f"{found[:5]}{'…' if len(found) > 5 else ''}, where only {expected.nonzero().flatten().tolist()[:5]} were "
            "expected. Rows are mixed or folded in another order before this layer: leave it out, or give batch_dim"
        )
    return followed.repeat


def _forget(norm: _BatchNorm) -> None:
    norm.reset_running_stats()
    norm.momentum = None
    if isinstance(norm, BayesianLayer):
        for name in ("running_mean", "running_var"):
            if name in norm.posterior._buffers:
                norm.posterior.get_buffer(name).copy_(getattr(norm, name).expand_as(norm.posterior.get_buffer(name)))
