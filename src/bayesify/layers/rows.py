"""Which draw serves which row of a layer's input, where the layer may see a multiple of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RowError


@dataclass(frozen=True)
class Rows:
    """The rows of a layer's input: `batch` rows of the model's, each `repeat` times.

    Repeats stand next to each other (tokens or windows folded into a batch-first batch) or, with `tiled`, one after all
    rows (folded from a batch that is the second dimension).
    """

    batch: int
    repeat: int = 1
    tiled: bool = False

    @classmethod
    def follow(cls, name: str, seen: int, batch: int, batch_dim: int) -> Rows:
        """The rows of a layer that sees `seen` rows while the model sees `batch`."""
        if seen % batch:
            raise RowError(
                f"layer {name!r} saw {seen} rows while the model saw {batch}, so its rows can't be followed. Give the "
                f"batch's dimension as convert(…, batch_dim=…) if it isn't {batch_dim}, or leave the layer out: "
                f"convert(model, {{{name!r}: None, '*': family}})"
            )
        return cls(batch, seen // batch, tiled=batch_dim > 0)

    def owner(self, layer_rows: int, device: torch.device) -> Tensor:
        """The model's row of each of the layer's rows.

        >>> Rows(2, 3).owner(6, torch.device("cpu"))
        tensor([0, 0, 0, 1, 1, 1])
        """
        index = torch.arange(layer_rows, device=device)
        return index % self.batch if self.tiled else index // self.repeat

    def spread(self, draws: Tensor) -> Tensor:
        """The draw of each of the layer's rows, from (G, …); unchanged where they are one to one."""
        if draws.shape[0] in (1, self.batch * self.repeat):
            return draws
        owner = self.owner(self.batch * self.repeat, draws.device)
        return draws.index_select(0, owner % draws.shape[0])

    def takes_turns(self, draws: int) -> bool:
        """Whether each of so many draws serves as many rows as the others, so that nothing need be spread."""
        return self.batch % draws == 0

    def by_turns(self, x: Tensor, draws: int) -> Tensor:
        """x (rows, …, features) seen as (…, draws, …, features), for draws that take turns or are one for each row."""
        if draws == self.batch * self.repeat:
            return x.reshape(1, draws, -1, x.shape[-1])
        return x.reshape(self.batch * (self.repeat if self.tiled else 1) // draws, draws, -1, x.shape[-1])

    def arrange(self, x: Tensor, draws: int) -> Tensor:
        """The rows in an order, padded, such that row j is served by draw j modulo `draws`."""
        if self.repeat > 1:
            shape = (self.repeat, self.batch) if self.tiled else (self.batch, self.repeat)
            x = x.reshape(*shape, *x.shape[1:])
            x = x if self.tiled else x.transpose(0, 1)
        missing = -self.batch % draws
        if missing:
            dim = 1 if self.repeat > 1 else 0
            x = torch.cat([x, x.narrow(dim, 0, 1).expand(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)
        return x.flatten(0, 1) if self.repeat > 1 else x

    def restore(self, y: Tensor, draws: int) -> Tensor:
        """Undo `arrange`."""
        padded = self.batch + -self.batch % draws
        if self.repeat == 1:
            return y[: self.batch] if padded > self.batch else y
        y = y.reshape(self.repeat, padded, *y.shape[1:])[:, : self.batch]
        return (y if self.tiled else y.transpose(0, 1)).flatten(0, 1)

    def in_turn(self, x: Tensor, size: int) -> tuple[Tensor, ...]:
        """The layer's rows of so many of the batch's at a time, each one's next to each other."""
        if self.tiled:
            x = x.reshape(self.repeat, self.batch, *x.shape[1:]).transpose(0, 1).flatten(0, 1)
        parts: tuple[Tensor, ...] = x.split(size * self.repeat)
        return parts

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Undo `in_turn`."""
        y = torch.cat(parts)
        return y.reshape(self.batch, self.repeat, *y.shape[1:]).transpose(0, 1).flatten(0, 1) if self.tiled else y

    def apart(self, x: Tensor, draws: int) -> list[Tensor]:
        """The rows of each of at most `batch` draws."""
        if self.tiled:
            by_row = x.reshape(self.repeat, self.batch, *x.shape[1:])
            return [by_row[:, draw::draws].flatten(0, 1) for draw in range(draws)]
        by_row = x.reshape(self.batch, self.repeat, *x.shape[1:])
        return [by_row[draw::draws].flatten(0, 1) for draw in range(draws)]

    def together(self, parts: list[Tensor], draws: int) -> Tensor:
        """Undo `apart`."""
        dim = 1 if self.tiled else 0
        shape = (self.repeat, -1) if self.tiled else (-1, self.repeat)
        joined = torch.cat([part.reshape(*shape, *part.shape[1:]) for part in parts], dim)
        device = joined.device
        order = torch.cat([torch.arange(draw, self.batch, draws, device=device) for draw in range(draws)])
        return joined.index_select(dim, torch.argsort(order)).flatten(0, 1)
