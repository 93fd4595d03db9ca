"""Batches as users have them: tensors, pairs, dicts of keyword arguments, loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .errors import BayesifyError
from .layers.scope import batch_size, first_tensor


def call_with(network: nn.Module, batch: Any) -> Any:
    """Call a network with a batch, by keyword where it is a dict."""
    return network(**batch) if isinstance(batch, Mapping) else network(batch)


def run(network: nn.Module, batch: Any) -> Tensor:
    """A network's output for a batch: a tensor, the `logits` of an output object, or the first of several."""
    output = call_with(network, batch)
    if isinstance(output, Tensor):
        return output
    by_name = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    for found in (by_name, output[0] if isinstance(output, (tuple, list)) else None):
        if isinstance(found, Tensor):
            return found
    raise BayesifyError(
        f"the network gave a {type(output).__name__}, where a tensor, an output with `logits` or a tuple was expected; "
        "predict can be told how to get the output with call=…"
    )


def first_rows(batch: Any, rows: int, batch_dim: int) -> Any:
    """The first rows of every tensor in a batch that has as many as the batch."""
    size = row_count(batch, batch_dim)
    return _slice(batch, 0, min(rows, size), size, batch_dim)


def row_count(batch: Any, batch_dim: int) -> int:
    """How many rows the first tensor of a batch has; 0 where there is none."""
    first = first_tensor(batch)
    return 0 if first is None else batch_size(first, batch_dim)


def repeated(value: Any, copies: int, side_by_side: bool) -> Any:
    """Every row of every tensor so often: its copies side by side, or the whole batch one after another."""
    if not isinstance(value, Tensor):
        return mapped(value, lambda tensor: repeated(tensor, copies, side_by_side))
    if not value.dim():  # one number for all rows
        return value
    return value.repeat_interleave(copies, 0) if side_by_side else torch.cat([value] * copies)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return pack_padded_sequence(change(padded), change(lengths), batch_first=True, enforce_sorted=False)
    return type(value)(mapped(part, change) for part in value) if isinstance(value, (tuple, list)) else value


def batches(data: Any, size: int | None, batch_dim: int = 0) -> Iterable[Any]:
    """A tensor or a dict of tensors, cut to `size` rows, or a loader's batches as they come."""
    if isinstance(data, tuple) and not isinstance(
        data, PackedSequence
    ):  # one (input, target) pair, where a list or a loader holds batches
        data = data[0] if data else ()
    if not isinstance(data, (Tensor, Mapping, PackedSequence)):
        yield from data
        return
    first = first_tensor(data)
    rows = 0 if first is None else batch_size(first, batch_dim)
    if rows == 0:
        shape = None if first is None else tuple(first.shape)
        raise BayesifyError(f"nothing to predict: the input has shape {shape}")
    if size is not None and (not isinstance(size, int) or size < 1):
        raise BayesifyError(f"batch_size={size!r}: expected a whole number >= 1")
    for start in range(0, rows, size or rows):
        yield _slice(data, start, min(size or rows, rows - start), rows, batch_dim)


def input_of(batch: Any) -> Any:
    """The input of a loader's batch: the first of several parts."""
    return batch[0] if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence) else batch


def chosen_rows(batch: Any, index: Tensor, rows: int, batch_dim: int) -> Any:
    """Some rows of every tensor in a batch that has as many as the batch."""
    return _with_rows(batch, rows, batch_dim, lambda tensor, dim: tensor.index_select(dim, index.to(tensor.device)))


def _slice(data: Any, start: int, count: int, rows: int, batch_dim: int) -> Any:
    return _with_rows(data, rows, batch_dim, lambda tensor, dim: tensor.narrow(dim, start, count))


def _with_rows(data: Any, rows: int, batch_dim: int, change: Callable[[Tensor, int], Tensor]) -> Any:
    def changed(tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() > 0 and batch_size(tensor, batch_dim) == rows
        return change(tensor, _row_dim(tensor, batch_dim)) if has_rows else tensor

    return mapped(data, changed)


def _row_dim(tensor: Tensor, batch_dim: int) -> int:
    return min(batch_dim, tensor.dim() - 1)
