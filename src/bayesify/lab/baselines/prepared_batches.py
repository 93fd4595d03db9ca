"""`PreparedBatches`: prepared batches of examples, on the network's device and in its precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bayesify.batches import run as output_of
from bayesify.lab.data import Examples, Inputs, loader
from bayesify.lab.data.examples import Batch


@dataclass(frozen=True)
class PreparedBatches:
    """Prepared batches (x, y) of examples; laplace-torch reads the number of rows from `dataset`."""

    network: nn.Module
    inputs: Inputs
    dataset: Examples
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        like = next(self.network.parameters())
        for raw, y in loader(self.dataset, self.batch_size):
            x = self.inputs.prepare(raw.to(like.device)).to(like.dtype)
            yield x, y.to(like) if y.is_floating_point() else y.to(like.device)

    def with_batch_size(self, batch_size: int) -> PreparedBatches:
        """The same rows in batches of another size."""
        return replace(self, batch_size=batch_size)


@torch.no_grad()
def outputs_and_targets(network: nn.Module, batches: PreparedBatches) -> Batch:
    """The outputs of a network in evaluation mode for all rows, and their targets."""
    network.eval()
    pairs: list[tuple[Tensor, Tensor]] = [(output_of(network, x), y) for x, y in batches]
    return torch.cat([output for output, _ in pairs]), torch.cat([y for _, y in pairs])
