"""Batches as users have them: tensors, pairs, dicts of keyword arguments, loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from .errors import BayesifyError


def run(network: nn.Module, batch: Any) -> Tensor:
    """A network's output for a batch: a tensor, the `logits` of an output object, or the first of several."""
    output = network(**batch) if isinstance(batch, dict) else network(batch)
    if isinstance(output, Tensor):
        return output
    for found in (getattr(output, "logits", None), output[0] if isinstance(output, (tuple, list)) else None):
        if isinstance(found, Tensor):
            return found
    raise BayesifyError(f"the network gave a {type(output).__name__}; say how to get its output with call=…")


def first_rows(batch: Any, rows: int) -> Any:
    """The first rows of every tensor in a batch."""
    return mapped(batch, lambda tensor: tensor[:rows] if tensor.dim() else tensor)


def repeated(value: Any, copies: int, side_by_side: bool) -> Any:
    """Every row of every tensor so often: its copies side by side, or the whole batch one after another."""
    if not isinstance(value, Tensor):
        return mapped(value, lambda tensor: repeated(tensor, copies, side_by_side))
    return value.repeat_interleave(copies, 0) if side_by_side else value.repeat(copies, *[1] * (value.dim() - 1))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    return type(value)(mapped(part, change) for part in value) if isinstance(value, (tuple, list)) else value


def batches(data: Any, batch_size: int | None) -> Iterable[Any]:
    """The inputs of a tensor, cut to `batch_size`, or of a loader's batches."""
    if isinstance(data, Tensor):
        if data.dim() == 0 or data.shape[0] == 0:
            raise BayesifyError(f"nothing to predict: the input has shape {tuple(data.shape)}")
        yield from data.split(batch_size or data.shape[0])
    elif isinstance(data, dict):
        yield data
    else:
        for batch in data:
            yield batch[0] if isinstance(batch, (tuple, list)) else batch
