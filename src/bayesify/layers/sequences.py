"""The inputs of recurrent layers: batch first or second, padded or packed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


@dataclass(frozen=True)
class Sequences:
    """A recurrent layer's input: `x` (rows, time, features) in the order of the rows, which a packing may change.

    `alive` (time, rows, 1) says which steps are of a sequence; None where all are.
    """

    x: Tensor
    alive: Tensor | None
    packed: PackedSequence | None
    batch_first: bool

    @classmethod
    def of(cls, input: Any, batch_first: bool) -> Sequences:
        """An input, unpacked.

        >>> Sequences.of(torch.zeros(5, 2, 3), batch_first=False).x.shape
        torch.Size([2, 5, 3])
        """
        if not isinstance(input, PackedSequence):
            return cls(input if batch_first else input.transpose(0, 1), None, None, batch_first)
        x, lengths = pad_packed_sequence(input, batch_first=True)
        steps = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
        return cls(x, (steps < lengths.to(x.device)).unsqueeze(2), input, batch_first)

    def for_all(self, batch: int) -> Sequences:
        """A single sequence for each row of the batch."""
        if self.x.shape[0] != 1 or self.packed is not None:
            return self
        return replace(self, x=self.x.expand(batch, -1, -1))

    def like_input(self, y: Tensor) -> Any:
        """An output (time, rows, features) in the form of the input."""
        if self.packed is None:
            return y.transpose(0, 1) if self.batch_first else y
        _, sizes, order, back = self.packed
        lengths = (torch.arange(int(sizes[0])).unsqueeze(1) < sizes).sum(1)  # of the longest sequence first
        data = pack_padded_sequence(y if order is None else y.index_select(1, order), lengths).data
        return PackedSequence(data, sizes, order, back)
