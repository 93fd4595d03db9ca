"""The forms of batches that users have: tensors, pairs, dicts of keyword arguments, loaders."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


def batches(data: Any, size: int | None, batch_dim: int = 0, keys_with_rows: FindKeys | None = None) -> Iterable[Any]:
    """A tensor or a dict of tensors in batches of `size` rows, or a loader's batches unchanged.

    `keys_with_rows` finds out which entries of a dict have rows, where it has several; otherwise their sizes decide.
    """
    if isinstance(data, tuple) and not isinstance(data, PackedSequence):
        data = data[0] if data else ()  # an (input, target) pair; batches come in a list or a loader
    if not isinstance(data, (Tensor, Mapping, PackedSequence)):
        return data  # type: ignore[no-any-return]
    if size is not None:
        check_count("batch_size", size)
    return _parts(data, size, batch_dim, keys_with_rows)


def _parts(data: Any, size: int | None, batch_dim: int, keys_with_rows: FindKeys | None) -> Iterable[Any]:
    counts = [row_count(part, batch_dim) for part in data.values()] if isinstance(data, Mapping) else []
    keys = keys_with_rows(data) if keys_with_rows and size and max(counts, default=0) > size else ()
    rows = row_count(data[keys[0]] if keys else data, batch_dim)
    if rows == 0:
        shape = tuple(getattr(first_tensor(data), "shape", ()))
        raise BayesifyError(f"nothing to predict: the input has shape {shape}")
    if size is None or size >= rows:
        return [data]
    return (chosen_rows(data, part, rows, batch_dim, keys) for part in torch.arange(rows).split(size))


def check_count(name: str, value: Any, *, least: int = 1, of: str = "", what: str = "an integer") -> None:
    """Raise unless a number of rows, draws or examples, an option of a function or class, is an integer >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        given = f"{of}({name}={value!r})" if of else f"{name}={value!r}"
        raise BayesifyError(f"{given}: expected {what} >= {least}")


def input_of(batch: Any) -> Any:
    """The input of a loader's batch: the first of several parts."""
    return batch[0] if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence) else batch


def chosen_rows(batch: Any, index: Tensor, rows: int, batch_dim: int, keys: Sequence[str] = ()) -> Any:
    """Some rows of a batch: of each tensor that has as many rows as the batch, in a dict only under these keys."""

    def chosen(tensor: Tensor) -> Tensor:
        dim = min(batch_dim, tensor.dim() - 1)
        has_rows = tensor.dim() and tensor.shape[dim] == rows
        return tensor.index_select(dim, index.to(tensor.device)) if has_rows else tensor

    if not keys:
        return mapped(batch, chosen)
    return {key: mapped(part, chosen) if key in keys else part for key, part in batch.items()}


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
