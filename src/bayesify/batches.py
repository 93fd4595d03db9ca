"""The forms of batches that users have: tensors, pairs, dicts of keyword arguments, loaders."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

from bayesify.errors import BayesifyError

ROWS_OF_A_DATASET = 256
FindKeys = Callable[[Mapping[str, Any]], Sequence[str]]
Run = Callable[[Mapping[str, Any]], Tensor]


def call_with(network: nn.Module, batch: Any) -> Any:
    """Call a network with a batch, by keyword where it is a dict."""
    return network(**batch) if isinstance(batch, Mapping) else network(batch)


def run(network: nn.Module, batch: Any) -> Tensor:
    """A network's output for a batch: a tensor, the `logits` of an output object, or the first of several with rows."""
    try:
        output = call_with(network, batch)
    except RuntimeError as error:
        first = first_tensor(batch)
        if first is None or first.dtype != torch.uint8:
            raise
        raise BayesifyError(
            f"the network failed on uint8 inputs of shape {tuple(first.shape)}, which look like raw images: they must "
            f"be scaled and normalised, which lab.Run(…).load().predict(images) does by itself. Its error: {error}"
        ) from error
    return output_of(output)


def output_of(output: Any) -> Tensor:
    """The tensor that a network's output has: itself, its `logits`, or the first of several after a loss."""
    if isinstance(output, Tensor):
        return output
    by_name = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    parts = output if isinstance(output, (tuple, list)) else ()
    for found in (by_name, next((part for part in parts if not isinstance(part, Tensor) or part.dim()), None)):
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


def repeated(value: Any, copies: int, rows: int) -> Any:
    """Repeat every row, its copies side by side; tensors without as many rows, such as tables, stay as they are."""
    return mapped(value, lambda t: t.repeat_interleave(copies, 0) if t.dim() and t.shape[0] == rows else t)


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


def in_tensors(data: Any, model: nn.Module, size: int | None, *, unchanged: bool) -> Any:
    """Data, and unless they are to stay unchanged a loader's batches, as tensors that a model takes."""
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    data = as_tensors(data, like, size)
    if unchanged or isinstance(data, (Tensor, Mapping, tuple, list)):
        return data
    return (as_tensors(batch, like, None) for batch in data)


def as_tensors(data: Any, like: Tensor | None, size: int | None) -> Any:
    """Arrays, data frames and nested lists of numbers as tensors, in the precision of `like` and on its device.

    A data set becomes a loader, with batches of `size`; anything else stays as it is.
    """
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=size or ROWS_OF_A_DATASET)
    if hasattr(data, "to_numpy") or _are_numbers(data):
        data = data.to_numpy() if hasattr(data, "to_numpy") else np.asarray(data)
    if isinstance(data, np.ndarray):
        x = torch.from_numpy(np.require(data, requirements=["C", "W"]))  # as torch can take it
        return x if like is None else x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)
    if type(data) in (tuple, list):
        return type(data)(as_tensors(part, like, size) for part in data)
    if type(data) is dict:
        return {key: as_tensors(part, like, size) for key, part in data.items()}
    return data


def _are_numbers(data: Any) -> bool:
    """Whether data are a list of numbers, or of lists of numbers."""
    first = data
    while isinstance(first, list) and first:
        first = first[0]
    return isinstance(data, list) and isinstance(first, (int, float, np.number))


def batches(data: Any, size: int | None, batch_dim: int = 0, find_keys: FindKeys | None = None) -> Iterable[Any]:
    """A tensor or a dict of tensors in batches of `size` rows, or a loader's batches unchanged.

    `find_keys` finds out which entries of a dict have rows, where it has several; otherwise their sizes decide.
    """
    if isinstance(data, tuple) and not isinstance(data, PackedSequence):
        data = _input_of_pair(data, batch_dim)
    if not isinstance(data, (Tensor, Mapping, PackedSequence)):
        return data  # type: ignore[no-any-return]
    if size is not None:
        check_count("batch_size", size)
    return _parts(data, size, batch_dim, find_keys)


def _input_of_pair(data: tuple[Any, ...], batch_dim: int) -> Any:
    """The input of an (input, target) pair; raises for a tuple of batches, such as `x.split(16)`, which looks alike."""
    rows = [row_count(part, batch_dim) for part in data if first_tensor(part) is not None]
    if len(data) > 2 or len(set(rows)) > 1:
        raise BayesifyError(
            f"a tuple of {len(data)} parts with {rows} rows: expected an (input, target) pair, with as many rows in "
            "both; give batches in a list or a loader"
        )
    return data[0] if data else ()


def _parts(data: Any, size: int | None, batch_dim: int, find_keys: FindKeys | None) -> Iterable[Any]:
    counts = [row_count(part, batch_dim) for part in data.values()] if isinstance(data, Mapping) else []
    keys = find_keys(data) if find_keys and size and max(counts, default=0) > size else ()
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


# Which entries of a dict have rows.


def keys_with_rows(data: Mapping[str, Any], batch_dim: int, call: Run) -> tuple[str, ...]:
    """The keys of the entries that have rows, in the order of the data; none if there is only one entry.

    Sizes do not tell, as eight features look like eight rows, so the network is called: entries of one size are tried
    as those with rows, all of them and all but one. If the network takes three rows of them and returns three, they
    have rows. Raises if no reading fits, or if two fit and give different outputs.
    """
    if len(data) < 2:
        return ()
    sizes = {key: row_count(value, batch_dim) for key, value in data.items() if first_tensor(value) is not None}
    tried = [(keys, _tried(data, keys, sizes[keys[0]], batch_dim, call)) for keys in _readings(sizes)]
    found = [(keys, output) for keys, output in tried if isinstance(output, Tensor)]
    if not found:
        shapes = {key: tuple(first_tensor(data[key]).shape) for key in sizes}  # type: ignore[union-attr]
        problem = next((output for _, output in tried if output), "another number of rows")
        raise BayesifyError(
            f"can't tell which of the inputs {shapes} have rows ({batch_dim=}): given some rows of any of them, the "
            f"network does not return as many. Its error for the first reading: {problem}. Give batches in a loader, "
            "or leave out batch_size"
        )
    keys, output = found[0]
    for other, different in found[1:]:
        if output.shape != different.shape or not torch.allclose(output, different, 1e-4, 0, equal_nan=True):
            doubtful = sorted(set(keys) ^ set(other))
            raise BayesifyError(
                f"the input {doubtful[0]!r} may have a row for each of {sizes[keys[0]]} rows or be the same for all: "
                "the network accepts both and gives different outputs. Give batches in a loader, leave out batch_size, "
                "or pass what is the same for all yourself, by call=lambda network, batch: network(…)"
            )
    return keys


def _readings(sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """The keys that may be those with rows: for each size all of that size, and all but one."""
    for size in dict.fromkeys(sizes.values()):
        keys = tuple(key for key, other in sizes.items() if other == size)
        yield keys
        yield from (tuple(other for other in keys if other != key) for key in keys if len(keys) > 1)


def _tried(data: Mapping[str, Any], keys: tuple[str, ...], size: int, batch_dim: int, call: Run) -> Tensor | str:
    """The output for three rows, or two if there are three, or why these keys can't be those with rows."""
    if size == 0:
        return "there are no rows"
    count = 2 if size == 3 else 3
    try:
        output = call(chosen_rows(data, torch.arange(count) % size, size, batch_dim, keys))
    except Exception as error:  # whatever a network raises for inputs that do not fit together
        return f"{type(error).__name__}: {error}"
    dim = batch_dim if output.dim() > 2 else 0
    return output if output.dim() > dim and output.shape[dim] == count else ""
