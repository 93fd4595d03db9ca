"""Stop training before a NaN or infinite number reaches a checkpoint, and say where it began."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bayesify as by
from bayesify.conversion.explain_not_finite import NotFiniteError, explain_not_finite
from bayesify.layers import bayesian_layers

ADVICE = (
    "The last checkpoint is kept. In a recipe, lower training.lr or training.posterior_lr, set training.clip=1, or use "
    "training.precision=32-true"
)


def require_finite_loss(loss: Tensor, network: nn.Module, x: Tensor, step: int) -> None:
    """Raise unless the loss is finite, in all processes if it is not in one."""
    finite = torch.isfinite(loss.detach()).all()
    everywhere = finite.float()
    if dist.is_available() and dist.is_initialized():  # otherwise the others would wait for this process's gradients
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if not finite:
        cause = explain_not_finite(network, x, loss=True)
        raise NotFiniteError(f"the loss is {float(loss.detach())} at step {step}: {cause}. {ADVICE}")
    if not everywhere:
        raise NotFiniteError(f"the loss of another process is not finite at step {step}. {ADVICE}")


def require_finite_gradients(network: nn.Module, step: int) -> None:
    """Raise unless all gradients are finite."""
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    largest = torch.nn.utils.get_total_norm(gradients, float("inf"))
    if not bool(torch.isfinite(largest)):
        raise NotFiniteError(
            f"a gradient is {float(largest)} at step {step}, though the loss is finite: {explain_not_finite(network)}. "
            f"{ADVICE}"
        )


def require_finite_state(module: nn.Module, network: nn.Module, step: int) -> None:
    """Raise unless all trained parameters and the KL are finite: another state must not replace a checkpoint."""
    trained = [p.detach() for p in module.parameters() if p.requires_grad]
    finite = all(bool(torch.isfinite(p).all()) for p in trained)
    if finite and bayesian_layers(network):
        with torch.no_grad():
            finite = bool(torch.isfinite(by.kl(network)))
    if not finite:
        raise NotFiniteError(f"after step {step} the network is not finite: {explain_not_finite(network)}. {ADVICE}")


def require_finite_prediction(nll: Tensor, network: nn.Module, x: Tensor, step: int) -> None:
    """Raise if the likelihood of a prediction is NaN."""
    if bool(nll.detach().isnan()):
        cause = explain_not_finite(network, x)
        raise NotFiniteError(f"predictions in validation are not finite after step {step}: {cause}. {ADVICE}")
