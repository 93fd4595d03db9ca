"""Stop training if the loss is NaN or infinite, and find the layer where that began."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bayesify.errors import BayesifyError


class NotFiniteError(BayesifyError):
    """A loss that is NaN or infinite."""


def require_finite(loss: Tensor, network: nn.Module, x: Tensor, step: int) -> None:
    """Raise unless the loss is finite, naming the step and the first layer with a non-finite tensor or output."""
    if bool(torch.isfinite(loss.detach()).all()):
        return
    raise NotFiniteError(
        f"the loss is {float(loss.detach())} at step {step}: {_cause(network, x)}. The last checkpoint is kept. Lower "
        "training.lr or training.posterior_lr, set training.clip, or use training.precision=32-true"
    )


def _cause(network: nn.Module, x: Tensor) -> str:
    if not torch.isfinite(x).all():
        return "the inputs are not finite"
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return f"{name} is not finite"
    return _first_layer(network, x) or "the likelihood or the KL is not finite, but every layer's output is"


def _first_layer(network: nn.Module, x: Tensor) -> str | None:
    """The first layer whose output is not finite, found by running the network again."""
    found: list[str] = []

    def check_output(name: str, output: object) -> None:
        if isinstance(output, Tensor) and not torch.isfinite(output).all():
            found.append(name)

    leaves = [(name, module) for name, module in network.named_modules() if not list(module.children())]
    hooks = [
        module.register_forward_hook(lambda _module, _args, output, name=name: check_output(name, output))
        for name, module in leaves
    ]
    try:
        with torch.no_grad():
            network(x)
    finally:
        for hook in hooks:
            hook.remove()
    return f"layer {found[0]!r} is the first whose output is not finite" if found else None
