"""Find the layer where a loss, a gradient or a prediction stopped being finite, and the likely cause."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.batches import first_tensor, run, tensors_of
from bayesify.errors import BayesifyError
from bayesify.layers import bayesian_layers
from bayesify.layers.base import unwrapped

REMOVE = "Remove or replace such rows of the data"


class NotFiniteError(BayesifyError):
    """A loss, gradient, posterior or prediction is NaN or infinite."""


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
    where = "in the loss itself: see its targets" if loss else "the preparation of inputs, or the scaling of outputs"
    nothing = f"every parameter, layer output and layer's KL is finite, so the cause is {where}"
    return next(_causes(unwrapped(model), x), nothing)


def find_nan(values: Any) -> str:
    """Where the inputs or targets of a batch have NaN, or else infinity, and what to do; empty if they have none."""
    for what, is_what in {"NaN": torch.isnan, "infinite numbers": torch.isinf}.items():
        for tensor in tensors_of(values):
            if len(places := is_what(tensor).nonzero()):
                at = tuple(places[0].tolist())
                return f"the batch has {len(places)} {what}, the first at {at} of shape {tuple(tensor.shape)}. {REMOVE}"
    return ""


def _causes(model: nn.Module, x: Any) -> Iterator[str]:
    """What is not finite, in the order in which it is computed."""
    if not all(map(_is_finite, tensors_of(x))):
        yield f"the inputs are not finite. {REMOVE}"
    statistics = [named for named in model.named_buffers() if "running_" in named[0]]  # masks may be infinite
    for name, tensor in [*model.named_parameters(), *statistics]:
        if not _is_finite(tensor):
            yield f"{name} is not finite. An earlier step was too large: lower the learning rate, or clip gradients"
    for name, layer in bayesian_layers(model).items():
        sites = list(layer.sites().values())
        with torch.no_grad():
            finite = not sites or _is_finite(layer.method.total_kl(sites))
        if not finite:
            yield (
                f"layer {name!r} has an infinite or undefined KL: its {_widest(layer)}. Lower the learning rate, "
                "in particular of the posterior, or clip gradients"
            )
    if x is not None:
        yield from _bad_outputs(model, x)
    for name, p in reversed(list(model.named_parameters())):  # backward passes go from the last layer to the first
        if p.grad is not None and not _is_finite(p.grad):
            yield f"the gradient of {name} is not finite. Lower the learning rate, or clip gradients"


def _widest(layer: nn.Module) -> str:
    """The tensor of a layer, or of its posterior, with the largest value, and its range."""
    ranges = {name: p.detach().aminmax() for name, p in layer.named_parameters()}
    name = max(ranges, key=lambda each: float(ranges[each].max.abs().maximum(ranges[each].min.abs())))
    return f"{name} is between {float(ranges[name].min):.4g} and {float(ranges[name].max):.4g}"


def _bad_outputs(model: nn.Module, x: Any) -> list[str]:
    """The layers whose outputs are not finite, found by running the network again."""
    found: list[str] = []

    def look(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        value = first_tensor(output)
        if value is not None and not _is_finite(value):
            found.append(
                f"layer {name!r} is the first whose output is not finite{_overflow(first_tensor(args), value)}"
            )

    leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
    watched = leaves | bayesian_layers(model)
    hooks = [module.register_forward_hook(partial(look, name)) for name, module in watched.items()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a call in training changes batch statistics
    try:
        with torch.no_grad():
            run(model, x)
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return found


def _overflow(given: Tensor | None, value: Tensor) -> str:
    """Whether finite inputs became too large for the type of the output, and what to do."""
    if given is None or not given.is_floating_point() or not _is_finite(given):
        return ""
    largest = float(given.detach().abs().max()) if given.numel() else 0.0
    advice = "use bfloat16 or float32" if value.dtype == torch.float16 else "lower the learning rate, or clip gradients"
    kind, most = str(value.dtype).removeprefix("torch."), torch.finfo(value.dtype).max
    return f": its inputs reach {largest:.3g}, and the largest {kind} is {most:.3g}. Here, {advice}"


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
