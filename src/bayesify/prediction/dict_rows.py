"""Which entries of a dict of inputs have a row for each row of the batch, found by calling the network.

The size of an entry does not tell: eight features look like eight rows.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bayesify.batches import chosen_rows, first_tensor, row_count
from bayesify.errors import BayesifyError

Run = Callable[[Mapping[str, Any]], Tensor]


def keys_with_rows(data: Mapping[str, Any], batch_dim: int, run: Run) -> tuple[str, ...]:
    """The keys of the entries that have rows, in the order of the data; none where there is but one entry.

    Entries of one size are tried as those with rows: all of them, and all but one. If the network takes three rows of
    them and returns three, they have rows. `run` calls the network. Raises if no reading fits, or if two fit and give
    different outputs.
    """
    if len(data) < 2:
        return ()
    sizes = {key: row_count(value, batch_dim) for key, value in data.items() if first_tensor(value) is not None}
    tried = [(keys, _output(data, keys, sizes[keys[0]], batch_dim, run)) for keys in _readings(sizes)]
    found = [(keys, output) for keys, output in tried if isinstance(output, Tensor)]
    if not found:
        shapes = {key: tuple(first_tensor(data[key]).shape) for key in sizes}  # type: ignore[union-attr]
        problem = next((output for _, output in tried if output), "another number of rows")
        raise BayesifyError(
            f"the inputs {shapes} have no rows that the network takes some of and returns as many (batch_dim="
            f"{batch_dim}). Its error for the first reading: {problem}. Give batches in a loader, or leave out "
            "batch_size"
        )
    keys, output = found[0]
    for other, different in found[1:]:
        if output.shape != different.shape or not torch.allclose(output, different, 1e-4, 0, equal_nan=True):
            doubtful = sorted(set(keys) ^ set(other))
            raise BayesifyError(
                f"the input {doubtful[0]!r} may have a row for each of {sizes[keys[0]]} rows or be the same for all: "
                "the network takes both and gives different outputs. Give batches in a loader, leave out batch_size, "
                "or bind what is the same for all by call=lambda network, batch: network(…)"
            )
    return keys


def _readings(sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """The keys that may be those with rows: for each size all of that size, and all but one."""
    for size in dict.fromkeys(sizes.values()):
        keys = tuple(key for key, other in sizes.items() if other == size)
        yield keys
        yield from (tuple(other for other in keys if other != key) for key in keys if len(keys) > 1)


def _output(data: Mapping[str, Any], keys: tuple[str, ...], size: int, batch_dim: int, run: Run) -> Tensor | str:
    """The output for three rows, or two if there are three, or why these keys can't be those with rows."""
    if size == 0:
        return "there are no rows"
    count = 2 if size == 3 else 3
    try:
        output = run(chosen_rows(data, torch.arange(count) % size, size, batch_dim, keys))
    except Exception as error:  # whatever a network raises for inputs that do not fit together
        return f"{type(error).__name__}: {error}"
    dim = batch_dim if output.dim() > 2 else 0
    return output if output.dim() > dim and output.shape[dim] == count else ""
