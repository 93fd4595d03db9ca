"""Find the layer where a loss, a gradient or a prediction stopped being finite, and the likely cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayesify.batches import first_tensor, mapped, run
from bayesify.errors import BayesifyError
from bayesify.layers import bayesian_layers
from bayesify.layers.base import unwrapped


class NotFiniteError(BayesifyError):
    """A loss, gradient, posterior or prediction that is NaN or infinite."""


def explain_not_finite(model: nn.Module, x: Any = None, *, loss: bool = False) -> str:
    """Name the first thing in a model that is NaN or infinite, and the likely cause.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Linear(4, 3)), by.MeanField())
    >>> _ = nn.init.constant_(model[0].posterior.weight_log_std, 100.0)
    >>> explain_not_finite(model)
    "layer '0' has an infinite or undefined KL: its posterior.weight_log_std is between 100 and 100. Lower the \
learning rate, in particular of the posterior, or clip gradients"

    Args:
        model: A network, converted or plain.
        x: A batch of inputs; without it, only parameters, gradients and the KL are examined.
        loss: Whether it is a loss that is not finite, rather than a prediction.

    Returns:
        A sentence without a full stop. It says so if everything that was examined is finite.
    """
    model = unwrapped(model)
    return (
        _bad_input(x)
        or _bad_tensor(model)
        or _bad_kl(model)
        or (None if x is None else _bad_output(model, x))
        or _bad_gradient(model)
        or "every parameter, layer output and layer's KL is finite, so the cause is "
        + ("in the loss itself: see its targets" if loss else "the preparation of inputs, or the scaling of outputs")
    )


def _bad_input(x: Any) -> str | None:
    found: list[bool] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(_is_finite(tensor))
        return tensor

    mapped(x, look)
    return None if all(found) else "the inputs are not finite. Remove or replace such rows of the data"


def _bad_tensor(model: nn.Module) -> str | None:
    for name, tensor in [*model.named_parameters(), *_running_statistics(model)]:
        if not _is_finite(tensor):
            return f"{name} is not finite. An earlier step was too large: lower the learning rate, or clip gradients"
    return None


def _running_statistics(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Those of batch norms; other buffers, such as masks, may be infinite."""
    return [(name, buffer) for name, buffer in model.named_buffers() if "running_" in name]


def _bad_kl(model: nn.Module) -> str | None:
    for name, layer in bayesian_layers(model).items():
        sites = list(layer.sites().values())
        with torch.no_grad():
            finite = not sites or _is_finite(layer.method.total_kl(sites))
        if not finite:
            return (
                f"layer {name!r} has an infinite or undefined KL: its {_widest(layer)}. Lower the learning rate, "
                "in particular of the posterior, or clip gradients"
            )
    return None


def _widest(layer: nn.Module) -> str:
    """The tensor of a layer, or of its posterior, with the largest value, and its range."""
    ranges = {name: p.detach().aminmax() for name, p in layer.named_parameters()}
    name = max(ranges, key=lambda each: float(ranges[each].max.abs().maximum(ranges[each].min.abs())))
    return f"{name} is between {float(ranges[name].min):.4g} and {float(ranges[name].max):.4g}"


def _bad_output(model: nn.Module, x: Any) -> str | None:
    """The first layer whose output is not finite, found by running the network again."""
    found: list[str] = []

    def check(name: str, args: tuple[Any, ...], output: Any) -> None:
        given, value = first_tensor(args), first_tensor(output)
        if not found and value is not None and not _is_finite(value):
            found.append(_explain_output(name, given, value))

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    leaves += [(name, layer) for name, layer in bayesian_layers(model).items()]
    hooks = [
        module.register_forward_hook(lambda _module, args, output, name=name: check(name, args, output))
        for name, module in leaves
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a call in training changes batch statistics
    try:
        with torch.no_grad():
            run(model, x)
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return found[0] if found else None


def _explain_output(name: str, given: Tensor | None, value: Tensor) -> str:
    """Which layer it was, and whether its numbers are too large for their type."""
    kind = str(value.dtype).removeprefix("torch.")
    if given is None or not given.is_floating_point() or not _is_finite(given):
        return f"layer {name!r} is the first whose output is not finite"
    largest = float(given.detach().abs().max()) if given.numel() else 0.0
    advice = "use bfloat16 or float32" if value.dtype == torch.float16 else "lower the learning rate, or clip gradients"
    return (
        f"layer {name!r} is the first whose output is not finite: its inputs reach {largest:.3g}, and {kind} ends at "
        f"{torch.finfo(value.dtype).max:.3g}. Here, {advice}"
    )


def _bad_gradient(model: nn.Module) -> str | None:
    for name, p in reversed(list(model.named_parameters())):  # backward passes go from the last layer to the first
        if p.grad is not None and not _is_finite(p.grad):
            return f"the gradient of {name} is not finite. Lower the learning rate, or clip gradients"
    return None


def _is_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor.detach()).all())
