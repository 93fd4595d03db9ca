"""Dropout modules that a network already has, kept active in evaluation.

One draw is one function of a row: its mask is shared by all rows, so that a row's output depends neither on the other
rows, nor on their number, nor on its place among them. The rate is always the module's own `p`.
"""

import math
import threading
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from bayesify.batches import first_tensor, row_count
from bayesify.errors import BayesifyError, RowError
from bayesify.layers.base import BayesianLayer, layer_type
from bayesify.methods.base import Draws, Method, Site
from bayesify.methods.draw_design import DrawDesign, dropout_period

Shape = tuple[int, ...]


class BayesianDropout(BayesianLayer, nn.Dropout):
    """`nn.Dropout` that in evaluation drops with one mask for the whole batch: one draw is one function."""

    plain: ClassVar[type[nn.Module]] = nn.Dropout
    role = "dropout"

    @property
    def method(self) -> Method:
        """MC dropout with the rate that the module has now."""
        return cast(Method, replace(self.__dict__["method"], p=rate_of(self)))

    @method.setter
    def method(self, method: Method) -> None:
        self.__dict__["method"] = method

    @classmethod
    def sites_of(cls, layer: nn.Module) -> dict[str, Site]:
        """No sites: it has no tensor to draw."""
        return {}

    def forward(self, input: Tensor) -> Tensor:
        """In training the ordinary mask for every element; in evaluation a draw, the same if it is called twice."""
        if self.training:
            return cast(Tensor, self.plain.forward(self, input))
        call = self.scope.call(self.site_name)
        shape = mask_shape(self.plain, input, self.scope.batch_dim, call.rows, self.site_name)
        name = (self.site_name, shape)
        if name not in call.drawn:
            call.drawn[name] = draw_mask(rate_of(self), shape, Draws(call.position[:1].to(input.device)))
        return multiply(input, call.drawn[name], self.inplace)


BayesianDropout1d = layer_type(nn.Dropout1d, BayesianDropout)
BayesianDropout2d = layer_type(nn.Dropout2d, BayesianDropout)
BayesianDropout3d = layer_type(nn.Dropout3d, BayesianDropout)


class FrozenDropout(nn.Module):
    """One draw of a dropout module: for inputs of one shape always the same mask."""

    def __init__(self, layer: BayesianDropout, design: DrawDesign, index: int, noise_name: str) -> None:
        super().__init__()
        self.kind, self.name = layer.plain, layer.site_name
        self.design, self.index, self.noise_name = design, index, noise_name
        self.p, self.inplace, self.batch_dim = rate_of(layer), layer.inplace, layer.scope.batch_dim
        self.constants: dict[Shape, Tensor] | None = None
        """Unless None, the masks made so far, by shape, which an exported graph has as constants."""

    def forward(self, input: Tensor) -> Tensor:
        """The input times the mask for its shape."""
        rows = None if torch.compiler.is_compiling() else _calls.rows[-1]
        shape = mask_shape(self.kind, input, self.batch_dim, rows, self.name)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return multiply(input, self._constant(shape), self.inplace)
        position = torch.zeros(1, dtype=torch.long, device=input.device)
        draws = self.design.draws(range(self.index, self.index + 1), position, self.noise_name)
        mask = draw_mask(self.p, shape, draws)
        if self.constants is not None:
            self.constants[shape] = mask
        return multiply(input, mask, self.inplace)

    def _constant(self, shape: Shape) -> Tensor:
        """A mask that was made before; a generator in a graph would make another one at each call."""
        if self.constants is None:
            raise BayesifyError(
                f"dropout {self.name!r}: a traced graph would draw another mask at each call; use by.export(model, …), "
                "which writes the masks of each draw as constants"
            )
        if not all(isinstance(size, int) for size in shape) or shape not in self.constants:
            raise BayesifyError(
                f"dropout {self.name!r}: its mask of shape {shape} depends on a size that is not fixed in the exported "
                "graph, so it can't be a constant. Only the batch may vary: is its dimension given as "
                "convert(…, batch_dim=…)?"
            )
        return self.constants[shape]


def rate_of(layer: BayesianDropout) -> float:
    """The module's own dropout rate."""
    if not 0 <= layer.p < 1:
        raise BayesifyError(f"layer {layer.site_name!r} is a dropout with p={layer.p}: expected 0 <= p < 1")
    return float(layer.p)


def draw_mask(p: float, shape: Shape, draws: Draws) -> Tensor:
    """One mask: 0 with probability p, else 1 / (1 - p)."""
    return ((draws.uniform((math.prod(shape),), dropout_period(p)) >= p).float() / (1 - p)).reshape(shape)


def multiply(x: Tensor, mask: Tensor, inplace: bool) -> Tensor:
    """An input times a mask."""
    return x.mul_(mask.to(x)) if inplace else x * mask.to(x)


def mask_shape(kind: type[nn.Module], x: Tensor, batch_dim: int, rows: int | None, name: str) -> Shape:
    """The shape of the mask that all rows share: 1 in the rows' dimension.

    `nn.Dropout` drops elements of a row, `nn.Dropout1d` to `3d` whole channels of inputs (N, C, …). Rows are where
    layers have them: in dimension `batch_dim` of sequences of features, in dimension 0 of matrices, such as pooled
    sequences, and of images. Rows that are folded into another dimension with tokens or windows share one mask. Raises
    a RowError where the model's `rows`, if known, can't be told apart from what a row consists of.
    """
    if kind is not nn.Dropout:
        return _channel_mask_shape(kind, x, rows, name)
    if x.dim() < 2:
        _require_no_rows(kind, x, rows, name)
        return tuple(x.shape)
    dim = min(batch_dim, x.dim() - 1) if x.dim() > 2 else 0
    _require_rows_at(dim, x, rows, name, others={0, 1, dim} - {dim} if x.dim() > 2 else set())
    return (*x.shape[:dim], 1, *x.shape[dim + 1 :])


def _channel_mask_shape(kind: type[nn.Module], x: Tensor, rows: int | None, name: str) -> Shape:
    dims = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}[kind]  # type: ignore[index]
    if x.dim() == dims or (kind is nn.Dropout2d and (x.dim() == 2 or x.dim() > dims)):  # torch takes it for (N, C, …)
        _require_rows_at(0, x, rows, name, others={1} if x.dim() > 2 else set())
        return (1, x.shape[1], *[1] * (x.dim() - 2))
    if x.dim() == dims - 1 and kind is not nn.Dropout2d:  # one input (C, …) without a batch
        _require_no_rows(kind, x, rows, name)
        return (x.shape[0], *[1] * (x.dim() - 1))
    raise RowError(
        f"{kind.__name__} {name!r} got an input of shape {tuple(x.shape)}, which may have rows or not: expected (N, C, "
        f"…) with {dims} dimensions. Use nn.Dropout1d for (N, C, L), or nn.Dropout to drop single elements"
    )


def _require_rows_at(dim: int, x: Tensor, rows: int | None, name: str, others: set[int]) -> None:
    """Raise if the batch seems to be in another dimension, whose rows would then get a mask each."""
    if rows is None or rows < 2 or x.shape[dim] == rows:
        return
    found = next((other for other in sorted(others) if x.shape[other] == rows), None)
    if found is not None:
        raise RowError(
            f"dropout {name!r} got an input of shape {tuple(x.shape)} while the model got {rows} rows: they seem to be "
            f"in dimension {found}, not {dim}, and would get different masks. Give the batch's dimension as "
            f"convert(…, batch_dim={found}), or keep the batch in dimension {dim} there. If dimension {found} has "
            f"{rows} entries by chance, use another batch size"
        )


def _require_no_rows(kind: type[nn.Module], x: Tensor, rows: int | None, name: str) -> None:
    """Raise if an input without a batch dimension may consist of the model's rows."""
    if rows is not None and rows > 1 and x.dim() and x.shape[0] % rows == 0:
        raise RowError(
            f"{kind.__name__} {name!r} got an input of shape {tuple(x.shape)} while the model got {rows} rows: these "
            f"may be {x.shape[0]} rows, or features of one input without a batch. Give it a batch dimension and "
            "features, such as (N, 1)"
        )


class _Calls(threading.local):
    """The calls of networks that are under way in a thread: for each, its number of rows, if it has any."""

    def __init__(self) -> None:
        self.rows: list[int | None] = [None]


_calls = _Calls()


class _RowCounter:
    """Hooks that note the number of rows while a network is called; a single vector of numbers has none."""

    def __init__(self, batch_dim: int) -> None:
        self.batch_dim = batch_dim

    def open(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            first = first_tensor((args, kwargs))
            has_rows = first is not None and (first.dim() > 1 or not first.is_floating_point())
            _calls.rows.append(row_count(first, self.batch_dim) if has_rows else None)

    def close(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(_calls.rows) > 1 and not torch.compiler.is_compiling():
            _calls.rows.pop()


def count_rows(network: nn.Module, batch_dim: int) -> None:
    """Let the frozen dropout modules of a network know how many rows it is called with."""
    hooks = network._forward_pre_hooks.values()
    if not any(isinstance(getattr(hook, "__self__", None), _RowCounter) for hook in hooks):
        counter = _RowCounter(batch_dim)
        network.register_forward_pre_hook(counter.open, prepend=True, with_kwargs=True)
        network.register_forward_hook(counter.close, always_call=True)
