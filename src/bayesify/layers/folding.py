"""The factors of K components folded into the weights of many convolutions of one shape: a few operations for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..family import Perturbation
from ..noise import is_eager
from .together import kernels_in

if TYPE_CHECKING:
    from .kernel import Kernel

MOST_FOLDED = 1 << 18
"""More numbers in a layer's weights are folded by themselves: to stack them would take longer than the operations."""


def folded_with_others(conv: Kernel, p: Perturbation) -> Tensor | None:
    """The weights (K, out, in, …) of a call's draws p, made for all layers that are like this one; None if alone."""
    folded, drawn = conv.scope.folded, conv.scope.drawn
    if drawn.get(conv.site_name) is not p or p.size * conv.weight.numel() > MOST_FOLDED or not is_eager():
        return None
    key = _key(conv)
    if key not in folded and conv.scope.root is not None:
        alike = [peer for peer in kernels_in(conv.scope.root) if _are_alike(peer, conv)]
        draws = [drawn[peer.site_name] for peer in alike]
        parts = [peer.weight for peer in alike], [each.in_scale for each in draws], [each.out_scale for each in draws]
        folded |= dict(zip(map(_key, alike), folded_weights(*parts), strict=True))  # type: ignore[arg-type]
    return folded.get(key)


def _key(conv: Kernel) -> tuple[str, object]:
    """Its name, and what must be as it was when the weights were made: whether for a gradient, and of what."""
    return conv.site_name, (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), conv.weight._version)


def _are_alike(peer: Kernel, conv: Kernel) -> bool:
    """Whether their factors are drawn and can be folded together."""
    p, own = conv.scope.drawn.get(peer.site_name), conv.scope.drawn[conv.site_name]
    if p is None or peer.scope is not conv.scope or type(peer) is not type(conv) or p.size != own.size:
        return False
    weights = [(each.weight.shape, each.weight.dtype, each.weight.device) for each in (peer, conv)]
    return weights[0] == weights[1] and _modes(p) == _modes(own) is not None


def _modes(p: Perturbation) -> tuple[bool, bool] | None:
    """In what mode factors were drawn; None if they are not both there."""
    if not isinstance(p.in_scale, Tensor) or p.out_scale is None:
        return None
    return p.in_scale.requires_grad, p.in_scale.is_inference()


def folded_weights(weights: Sequence[Tensor], ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """For weights (out, in, …) with factors (K, in) and (K, out), of each the K weights (K, out, in, …).

    >>> two, one = torch.tensor([[2.0]]), torch.tensor([[1.0]])
    >>> folded_weights([two[..., None], one[..., None]], [two, one], [one, two])
    (tensor([[[[4.]]]]), tensor([[[[2.]]]]))
    """
    folded: tuple[Tensor, ...] = _Folded.apply(len(weights), *weights, *ins, *outs)
    return folded


class _Folded(torch.autograd.Function):
    """A layer whose weights are not used gets no gradient, rather than one of zeros."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.count = count
        ctx.save_for_backward(*tensors)
        weights, ins, outs = _stacked(tensors, range(count), count)
        folded = weights * (outs * ins).unsqueeze(4)
        return folded.reshape(*folded.shape[:2], *tensors[0].shape).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [place for place, grad in enumerate(grads) if grad is not None]
        found: list[Tensor | None] = [None] * (3 * ctx.count)
        if used:
            weights, ins, outs = _stacked(ctx.saved_tensors, used, ctx.count)
            grad = torch.stack([each.reshape(*each.shape[:3], -1) for each in grads if each is not None])
            of_factors = (grad * weights).sum(4)
            parts = (
                (grad * (outs * ins).unsqueeze(4)).sum(1),
                (of_factors * outs).sum(2),
                (of_factors * ins).sum(3),
            )
            for kind, part in enumerate(parts):
                for place, each in zip(used, part, strict=True):
                    which = kind * ctx.count + place
                    found[which] = each.reshape(ctx.saved_tensors[which].shape)
        return None, *found


def _stacked(tensors: Sequence[Tensor], places: Sequence[int], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights (n, 1, out, in, …), and factors (n, K, 1, in) and (n, K, out, 1), of n layers."""
    weights, ins, outs = (torch.stack([tensors[kind * count + place] for place in places]) for kind in range(3))
    return weights.reshape(*weights.shape[:3], -1).unsqueeze(1), ins.unsqueeze(2), outs.unsqueeze(3)
