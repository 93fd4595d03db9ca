"""The forms of batches that users have: tensors, pairs, dicts of keyword arguments, loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bayesify.errors import BayesifyError

FindKeys = Callable[[Mapping[str, Any]], Sequence[str]]


def call_with(network: nn.Module, batch: Any) -> Any:
    """Call a network with a batch, by keyword where it is a dict."""
    return network(**batch) if isinstance(batch, Mapping) else network(batch)


def run(network: nn.Module, batch: Any) -> Tensor:
    """A network's output for a batch: a tensor, the `logits` of an output object, or the first of several."""
    try:
        output = call_with(network, batch)
    except RuntimeError as error:
        first = first_tensor(batch)
        if first is None or first.dtype != torch.uint8:
            raise
        raise BayesifyError(
            f"the network failed on uint8 inputs of shape {tuple(first.shape)}, which look like raw images: give it "
            "what it was trained on, scaled and normalised (lab.Run(…).load().predict(images) prepares raw inputs). "
            f"Its error: {error}"
        ) from error
    return output_of(output)


def output_of(output: Any) -> Tensor:
    """The tensor that a network's output has: itself, its `logits`, or the first of several."""
    if isinstance(output, Tensor):
        return output
    by_name = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    for found in (by_name, output[0] if isinstance(output, (tuple, list)) else None):
        if isinstance(found, Tensor):
            return found
    raise BayesifyError(
        f"the network returned a {type(output).__name__}; expected a tensor, an output with `logits` or a tuple. Tell "
        "predict how to get the output with call=…"
    )


def row_count(batch: Any, batch_dim: int) -> int:
    """How many rows the first tensor of a batch has; 0 where there is none."""
    first = first_tensor(batch)
    return 0 if first is None else first.shape[min(batch_dim, first.dim() - 1)]


def repeated(value: Any, copies: int, side_by_side: bool) -> Any:
    """Repeat every row of every tensor: its copies side by side, or the whole batch several times."""
    if not isinstance(value, Tensor):
        return mapped(value, lambda tensor: repeated(tensor, copies, side_by_side))
    if not value.dim():  # one number for all rows
        return value
    return value.repeat_interleave(copies, 0) if side_by_side else torch.cat([value] * copies)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with a function applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return pack_padded_sequence(change(padded), change(lengths), batch_first=True, enforce_sorted=False)
    if not isinstance(value, (tuple, list)):
        return value
    parts = [mapped(part, change) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # a named tuple takes each apart


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of a batch."""
    found: list[Tensor] = []
    mapped(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def batches(data: Any, size: int | None, batch_dim: int = 0, keys_with_rows: FindKeys | None = None) -> Iterable[Any]:
    """A tensor or a dict of tensors in batches of `size` rows, or a loader's batches unchanged.

    `keys_with_rows` finds out which entries of a dict have rows, where it has several; otherwise their sizes decide.
    """
    if isinstance(data, tuple) and not isinstance(data, PackedSequence):
        data = data[0] if data else ()  # an (input, target) pair; batches come in a list or a loader
    if not isinstance(data, (Tensor, Mapping, PackedSequence)):
        return data  # type: ignore[no-any-return]
    _check_size(size)
    given: Any = data
    keys = keys_with_rows(given) if keys_with_rows and size and _may_split(given, size, batch_dim) else ()
    rows = row_count(given[keys[0]] if keys else given, batch_dim)
    if rows == 0:
        raise BayesifyError(f"nothing to predict: the input has shape {_shape(first_tensor(data))}")
    return [data] if size is None or size >= rows else _split(data, size, rows, batch_dim, keys)


def _may_split(data: Any, size: int, batch_dim: int) -> bool:
    """Whether a dict has more than `size` rows, whichever of its entries have them."""
    return isinstance(data, Mapping) and max((row_count(part, batch_dim) for part in data.values()), default=0) > size


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _check_size(size: Any) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise BayesifyError(f"batch_size={size!r}: expected an integer >= 1")


def _split(data: Any, size: int, rows: int, batch_dim: int, keys: Sequence[str]) -> Iterator[Any]:
    for start in range(0, rows, size):
        some = partial(_narrowed, start=start, count=min(size, rows - start))
        yield _with_rows(data, rows, batch_dim, keys, some)


def _narrowed(tensor: Tensor, dim: int, start: int, count: int) -> Tensor:
    return tensor.narrow(dim, start, count).contiguous()  # a network may view it


def input_of(batch: Any) -> Any:
    """The input of a loader's batch: the first of several parts."""
    return batch[0] if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence) else batch


def chosen_rows(batch: Any, index: Tensor, rows: int, batch_dim: int, keys: Sequence[str] = ()) -> Any:
    """Some rows of a batch: of each tensor that has as many rows as the batch, in a dict only under these keys."""
    return _with_rows(batch, rows, batch_dim, keys, lambda t, dim: t.index_select(dim, index.to(t.device)))


def _with_rows(
    data: Any, rows: int, batch_dim: int, keys: Sequence[str], change: Callable[[Tensor, int], Tensor]
) -> Any:
    def changed(tensor: Tensor) -> Tensor:
        dim = min(batch_dim, tensor.dim() - 1)
        return change(tensor, dim) if tensor.dim() and tensor.shape[dim] == rows else tensor

    if not keys:
        return mapped(data, changed)
    return {key: mapped(part, changed) if key in keys else part for key, part in data.items()}


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor with a dimension in nested containers; for packed sequences, one entry per sequence."""
    if isinstance(value, Tensor):
        return value if value.dim() else None
    if isinstance(value, PackedSequence):  # as many entries as it has sequences
        return value.data.flatten()[: int(value.batch_sizes[0])]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    for part in value if isinstance(value, (tuple, list)) else ():
        found = first_tensor(part)
        if found is not None:
            return found
    return None
