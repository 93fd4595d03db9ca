"""Which row of the batch, and so which draw, a row of a layer's input belongs to; components: `call_scope`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.errors import RowCountError


@dataclass(frozen=True)
class Rows:
    """The rows of a layer's input: the `batch` rows of the model's input, each `repeat` times.

    The repeats of a row are adjacent (tokens or windows folded into a batch-first batch) or, with `tiled`, the batch
    repeats as a whole (the batch was the second dimension). Draw g of G serves the rows g, g + G, … of the batch.
    """

    batch: int
    repeat: int = 1
    tiled: bool = False

    @classmethod
    def follow(cls, name: str, seen: int, batch: int, batch_dim: int) -> Rows:
        """The rows of a layer that gets `seen` rows while the model gets `batch`."""
        if seen % batch:
            raise RowCountError(
                f"layer {name!r} got {seen} rows while the model got {batch}, so they can't be matched. Give the "
                f"batch's dimension as convert(…, batch_dim=…) if it isn't {batch_dim}, or leave the layer out: "
                f"convert(model, {{{name!r}: None, '*': method}})"
            )
        return cls(batch, seen // batch, tiled=batch_dim > 0)

    def owner(self, device: torch.device) -> Tensor:
        """The row of the batch that each of the layer's rows belongs to."""
        index = torch.arange(self.batch * self.repeat, device=device)
        return index % self.batch if self.tiled else index // self.repeat

    def select(self, draws: Tensor) -> Tensor:
        """The draw of each of the layer's rows, from (G, …)."""
        return draws.index_select(0, self.owner(draws.device) % draws.shape[0])

    def spread(self, draws: Tensor, x: Tensor, features_last: bool) -> Tensor:
        """The draw of each of the layer's rows, from (G, features), shaped and cast to broadcast with x."""
        if draws.shape[0] not in (1, self.batch * self.repeat):
            draws = self.select(draws)
        middle = [1] * (x.dim() - draws.dim())
        shape = (draws.shape[0], *middle, *draws.shape[1:]) if features_last else (*draws.shape, *middle)
        return draws.reshape(shape).to(x.dtype)

    def split_repeats(self, x: Tensor) -> Tensor:
        """The layer's rows as (batch, repeat, …)."""
        if self.tiled:
            return x.reshape(self.repeat, self.batch, *x.shape[1:]).transpose(0, 1)
        return x.reshape(self.batch, self.repeat, *x.shape[1:])

    def merge_repeats(self, y: Tensor) -> Tensor:
        """The layer's rows from rows whose repeats are adjacent."""
        return y.unflatten(0, (self.batch, self.repeat)).transpose(0, 1).flatten(0, 1) if self.tiled else y

    def order_by_draw(self, x: Tensor, draws: int) -> Tensor:
        """The rows reordered and padded so that row j uses draw j modulo `draws`."""
        x, missing = self.split_repeats(x).transpose(0, 1), -self.batch % draws
        if missing:
            x = torch.cat([x, x[:, :1].expand(-1, missing, *x.shape[2:])], 1)
        return x.flatten(0, 1)

    def undo_order(self, y: Tensor) -> Tensor:
        """Undo `order_by_draw`."""
        y = y.reshape(self.repeat, len(y) // self.repeat, *y.shape[1:])[:, : self.batch]
        return (y if self.tiled else y.transpose(0, 1)).flatten(0, 1)
