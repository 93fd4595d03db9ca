"""The tensors of many small layers drawn as one, element by element: a few operations in place of a few for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..family import Draws, Elementwise, Perturbation, Site
from .together import are_alike, kernels_in

if TYPE_CHECKING:
    from .kernel import Kernel

MOST_ELEMENTS = 1 << 14
"""A weight of more elements is drawn by itself: to put it beside others would take longer than its operations."""


def elements_together(kernel: Kernel, root: nn.Module, draws: Draws) -> dict[Kernel, Perturbation] | None:
    """One draw of a kernel and of all others whose elements can be drawn with its own; None if it is drawn alone."""
    form = _parts(kernel)[0].form
    each = [_parts(peer) for peer in kernels_in(root) if peer.draws_elements and are_alike(peer, kernel)]
    parts = [part for its_parts in each if all(part.form == form for part in its_parts) for part in its_parts]
    if kernel.site_name not in {part.kernel.site_name for part in parts}:
        return None
    used = _Used([True] * len(parts))
    added = {name: _beside(used, [part.added[name] for part in parts], parts) for name in parts[0].added}
    flat = _beside(used, [part.base for part in parts], parts)
    wide = kernel.family.draw(Site({"weight": flat}, added), draws)
    assert isinstance(wide.weight, Elementwise)
    drawn = _Apart.apply(used, [part.base.shape for part in parts], wide.weight.all(tuple(flat.shape)))
    tensors: dict[Kernel, dict[str, Tensor]] = {}
    for part, tensor in zip(parts, drawn, strict=True):
        tensors.setdefault(part.kernel, {})[part.name] = tensor
    return {peer: Perturbation(1, **values) for peer, values in tensors.items()}  # type: ignore[arg-type]


@dataclass
class _Used:
    """Which tensors have a gradient; where that is to be derived again, each of them may have one by another way."""

    each: list[bool]
    again: bool = False


@dataclass(frozen=True)
class _Part:
    """A tensor of a kernel, and what the posterior has for it, named as if it were a weight."""

    kernel: Kernel
    name: str
    base: Tensor
    added: dict[str, Tensor]

    @property
    def form(self) -> tuple[object, ...]:
        """What must be equal for tensors to stand side by side."""
        leading = [(name, t.dtype, t.shape[: t.dim() - self.base.dim()]) for name, t in self.added.items()]
        return self.base.dtype, *leading


def _parts(kernel: Kernel) -> list[_Part]:
    base, added = kernel.base(), kernel.added()
    return [
        _Part(
            kernel,
            name,
            base[name],
            {f"weight{key.removeprefix(name)}": t for key, t in added.items() if key.startswith(name)},
        )
        for name in kernel.family.elements
        if name in base
    ]


def _beside(used: _Used, tensors: list[Tensor], parts: list[_Part]) -> Tensor:
    """Tensors (…, *shape) of parts of these shapes as one (…, n)."""
    joined: Tensor = _Beside.apply(used, [part.base.shape for part in parts], *tensors)
    return joined


class _Beside(torch.autograd.Function):
    """A tensor that is not `used` gets no gradient, as if it were alone, rather than one of zeros."""

    @staticmethod
    def forward(ctx: Any, used: _Used, shapes: list[torch.Size], *tensors: Tensor) -> Tensor:
        ctx.used, ctx.shapes = used, [tensor.shape for tensor in tensors]
        leading = tensors[0].shape[: tensors[0].dim() - len(shapes[0])]
        flat = [tensor.reshape(*leading, shape.numel()) for tensor, shape in zip(tensors, shapes, strict=True)]
        ctx.sizes = [each.shape[-1] for each in flat]
        return torch.cat(flat, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        each = zip(grad.split(ctx.sizes, -1), ctx.shapes, ctx.used.each, strict=True)
        return None, None, *(part.reshape(shape) if is_used else None for part, shape, is_used in each)


class _Apart(torch.autograd.Function):
    """Tensors (1, *shape) that stand side by side in one (1, n); which of them have a gradient is kept in `used`."""

    @staticmethod
    def forward(ctx: Any, used: _Used, shapes: list[torch.Size], flat: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.used, ctx.sizes = used, [shape.numel() for shape in shapes]
        parts = flat.split(ctx.sizes, -1)
        return tuple(part.view(1, *shape) for part, shape in zip(parts, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.used.again = ctx.used.again or torch.is_grad_enabled()
        ctx.used.each = [ctx.used.again or grad is not None for grad in grads]
        like = next((grad for grad in grads if grad is not None), None)
        if like is None:
            return None, None, None
        pairs = zip(grads, ctx.sizes, strict=True)
        return None, None, torch.cat([like.new_zeros(1, n) if g is None else g.reshape(1, n) for g, n in pairs], -1)
