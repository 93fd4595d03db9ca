"""Parts of networks that are easy to get wrong: third-party layers, caches, data-dependent shapes, mixed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Third-party layers with a nonlinearity inside.


class LeakyLinear(nn.Module):
    """leaky_relu(x @ w): a matrix (in, out) of its own, and an activation."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(in_size, out_size) / in_size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x @ self.w, 0.2)


class PositiveLinear(nn.Linear):
    """Uses only the positive part of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.clamp_min(0), self.bias)


class ReluLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class ReluConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


# Ways to connect layers.


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Branches(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * torch.sigmoid(self.right(x))


class Twice(nn.Module):
    """A shared layer: called twice in one call of the network."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Recurrent(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Cell(nn.Module):
    """A recurrent cell, called for one step after the other."""

    def __init__(self, cell: nn.Module, batch_dim: int) -> None:
        super().__init__()
        self.cell, self.batch_dim = cell, batch_dim

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x.unbind(1 - self.batch_dim):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1 - self.batch_dim)


class TiedEmbedding(nn.Module):
    """An embedding whose weight is also that of the layer that scores the words."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, size), nn.Linear(size, words)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class SelfAttention(nn.Module):
    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


class Positions(nn.Module):
    """Adds learned positions to a sequence, looked up as one row for all or as one row for each position."""

    def __init__(self, steps: int, size: int, batch_dim: int, one_row: bool) -> None:
        super().__init__()
        self.table, self.batch_dim, self.one_row = nn.Embedding(steps, size), batch_dim, one_row

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1 - self.batch_dim])
        if self.one_row:
            return x + self.table(ids.unsqueeze(self.batch_dim))
        return x + self.table(ids).unsqueeze(self.batch_dim)


# Reshapes.


class Reshape(nn.Module):
    """A reshape of each row, (rows, …) to (rows, *shape), and a permutation of all dimensions."""

    def __init__(self, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.shape, self.order = shape, order

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), *self.shape)
        return x if self.order is None else x.permute(self.order)


class Permute(nn.Module):
    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


class Folded(nn.Module):
    """Folds the second dimension (tokens, or windows of a map) into the batch around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Pool(nn.Module):
    """A sequence's mean, maximum or last step."""

    def __init__(self, dim: int, how: str) -> None:
        super().__init__()
        self.dim, self.how = dim, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "last":
            return x.select(self.dim, -1)
        return x.mean(self.dim) if self.how == "mean" else x.amax(self.dim)


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


# Data-dependent shapes and control flow.


class Experts(nn.Module):
    """Two experts; the first feature decides which of them gets a row."""

    def __init__(self, size: int, how: str) -> None:
        super().__init__()
        self.experts, self.how = nn.ModuleList([nn.Linear(size, size), nn.Linear(size, size)]), how

    def forward(self, x: Tensor) -> Tensor:
        expert, output = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for number, layer in enumerate(self.experts):
            if self.how == "rows":
                rows = (expert == number).nonzero().flatten()
                if len(rows):
                    output[rows] = layer(x[rows]).to(output.dtype)
            elif self.how == "mask":
                output[expert == number] = layer(x[expert == number]).to(output.dtype)
            else:
                output = output + layer(x) * (expert == number).unsqueeze(1)
        return output


class Unique(nn.Module):
    """A layer that runs on each distinct rounded value once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, size)

    def forward(self, x: Tensor) -> Tensor:
        values, places = (x[:, 0].detach() * 2).round().unique(return_inverse=True)
        return x + self.layer(values.unsqueeze(1))[places]


class Halts(nn.Module):
    """A loop whose length the data decides."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        going, output = torch.ones(len(x), dtype=torch.bool), x
        for _ in range(3):
            output = torch.where(going.unsqueeze(1), torch.tanh(self.layer(output)), output)
            going = going & (output[:, 0] > 0)
            if not bool(going.any()):
                break
        return output


class ThroughNumpy(nn.Module):
    """Leaves torch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * torch.from_numpy(x.detach().double().numpy().clip(-1, 1)).to(x.dtype)


# What is computed in one mode only.


class InOneMode(nn.Module):
    """Adds what a part computes, in training only or in evaluation only."""

    def __init__(self, inner: nn.Module, mode: str) -> None:
        super().__init__()
        self.inner, self.mode = inner, mode

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if self.training == (self.mode == "training") else x


class MixesInTraining(nn.Module):
    """Mixes rows in training: with the next row, or as two views of each that are put behind each other."""

    def __init__(self, size: int, how: str, batch_dim: int) -> None:
        super().__init__()
        self.layer, self.how, self.batch_dim = nn.Linear(size, size), how, batch_dim

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.layer(x)
        if self.how == "next row":
            return self.layer((x + x.roll(1, self.batch_dim)) / 2)
        one, other = self.layer(torch.cat([x, 1.1 * x], self.batch_dim)).chunk(2, self.batch_dim)
        return (one + other) / 2


class ReadsInOneMode(nn.Module):
    """A layer whose weight is also read, but in training only or in evaluation only."""

    def __init__(self, size: int, mode: str) -> None:
        super().__init__()
        self.layer, self.mode = nn.Linear(size, size), mode

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y / (1 + self.layer.weight.norm()) if self.training == (self.mode == "training") else y


class Noise(nn.Module):
    """Adds noise in training: its own for each row, always the same for a place, or of torch's random state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.std, self.kind = 0.3, kind

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.std == 0.0:
            return x
        generator = torch.Generator().manual_seed(0) if self.kind == "fixed" else None
        return x + self.std * torch.randn(x.shape, generator=generator).to(x)


# Networks that keep what they computed, and that read their own weights.


class Cached(nn.Module):
    """Keeps, in evaluation, what depends on its weights alone: in an attribute, a buffer, a dict or an object."""

    def __init__(self, size: int, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(size, size), where
        self.register_buffer("kept", None, persistent=False)
        self.cache: dict[int, Tensor] = {}
        self.box = Box()
        self.merged: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        kept = None if self.training else self._kept(x)
        if kept is None:
            kept = self.layer.weight * 2 + 1
            if not self.training:
                self._keep(x, kept.detach())
        return self.layer(x) + x @ kept

    def _kept(self, x: Tensor) -> Tensor | None:
        places: dict[str, Any] = {"attribute": self.merged, "buffer": self.kept, "dict": self.cache.get(x.dim())}
        return places.get(self.where, self.box.value)

    def _keep(self, x: Tensor, kept: Tensor) -> None:
        if self.where == "attribute":
            self.merged = kept
        elif self.where == "buffer":
            self.kept = kept
        elif self.where == "dict":
            self.cache[x.dim()] = kept
        else:
            self.box.value = kept


class Box:
    """An object that is no module."""

    def __init__(self) -> None:
        self.value: Tensor | None = None


class ClassEmbeddings(nn.Module):
    """Scores against class embeddings that a layer computes from a table: in evaluation once."""

    def __init__(self, size: int, classes: int, keeps: bool) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(classes, size)), nn.Linear(size, size)
        self.keeps, self.classes = keeps, None

    def forward(self, x: Tensor) -> Tensor:
        classes = self.classes if self.keeps and not self.training else None
        if classes is None:
            classes = self.layer(self.table)
            self.classes = classes.detach() if self.keeps and not self.training else None
        return x @ classes.mT


class ReadsWeight(nn.Module):
    """A layer that is called, and whose weight is also read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / (1 + self.layer.weight.norm())


class Counts(nn.Module):
    """Counts its calls in a buffer and in an attribute, without any effect on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 1
        return x


class Flag(nn.Module):
    """Something else once a flag is set: twice the input, or the rows' mean taken off."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.flag, self.mixes = False, mixes

    def forward(self, x: Tensor) -> Tensor:
        if not self.flag:
            return x
        return x - x.mean(0, keepdim=True) if self.mixes else x * 2


class MixesRows(nn.Module):
    """Mixes the rows of the batch: by their mean, by turning them round, or only above some number of rows."""

    def __init__(self, how: str, batch_dim: int) -> None:
        super().__init__()
        self.how, self.batch_dim = how, batch_dim

    def forward(self, x: Tensor) -> Tensor:
        dim = self.batch_dim
        if self.how == "above" and x.shape[dim] <= 4:
            return x
        return x.roll(1, dim) if self.how == "roll" else x - 0.5 * x.mean(dim, keepdim=True)
