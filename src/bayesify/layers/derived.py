"""Gradients of gradients, and of many gradients at once, for functions whose own backward makes none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_to_be_derived(grad: Tensor) -> bool:
    """Whether a backward pass must be one of operations that torch knows."""
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad)


def derived(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients that are wanted of a function's tensors, as functions of all that they depend on.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> derived(lambda x, y: x.square(), (x, None), (True, False), torch.tensor(1.0))
    [tensor(6., grad_fn=<MulBackward0>), None]
    """
    derive = torch.is_grad_enabled()
    with torch.enable_grad():  # by views: one of them may depend on another, whose gradient that way is not asked for
        tensors = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        y = function(*tensors)
    wanted = [is_wanted and tensor is not None for tensor, is_wanted in zip(tensors, wanted, strict=True)]
    inputs = [tensor for tensor, is_wanted in zip(tensors, wanted, strict=True) if tensor is not None and is_wanted]
    found = iter(torch.autograd.grad(y, inputs, grad, create_graph=derive))
    return [next(found) if is_wanted else None for is_wanted in wanted]
