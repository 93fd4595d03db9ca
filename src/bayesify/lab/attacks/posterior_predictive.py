"""`PosteriorPredictive`: the posterior predictive as a differentiable function of raw inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bayesify.batches import run as output_of
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.lab.attacks.registry import AttackError
from bayesify.layers import bayesian_layers
from bayesify.layers.base import unwrapped
from bayesify.prediction.samples import methods_of, number_of_draws

Drawing = Literal["frozen", "fresh"]


class PosteriorPredictive(nn.Module):
    """log mean_s p_s(y | x) over S draws, differentiable in x, for attacks on a Bayesian model.

    The network is copied; neither it nor its gradients change. Only one draw's activations are in memory at a time.

    Args:
        model: The network; a plain one counts as one draw.
        prepare: Prepares raw inputs for the network.
        samples: The number of draws S; the default of `by.predict` if None.
        draws: "frozen" uses the same S draws, those of `by.predict`, at every call; "fresh" uses the next S each time
            (expectation over transformation, Athalye et al. 2018).
        seed: The seed of the draws.
        temperature: Logits are divided by this.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.Rank1(4))
    >>> x = torch.rand(2, 4)
    >>> torch.allclose(PosteriorPredictive(model, samples=8)(x), by.predict(model, x, 8).log_probs)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        prepare: Callable[[Tensor], Tensor] = torch.Tensor.float,
        *,
        samples: int | None = None,
        draws: Drawing = "frozen",
        seed: int = 0,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        if draws not in ("frozen", "fresh"):
            raise AttackError(f"draws={draws!r}: expected 'frozen' or 'fresh'")
        self.samples = number_of_draws(methods_of(model), samples) if bayesian_layers(unwrapped(model)) else 1
        self.prepare, self.draws, self.seed, self.temperature = prepare, draws, seed, temperature
        self.calls = 0
        is_bayesian = bool(bayesian_layers(unwrapped(model)))
        self.drawn = DrawnNetwork(model) if is_bayesian else None
        network = copy.deepcopy(unwrapped(model)) if self.drawn is None else self.drawn.detached()
        self.network = network.requires_grad_(False)  # shared parameters would gather gradients
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """The log-probabilities of a batch of raw inputs."""
        first = self.samples * self.calls if self.draws == "fresh" else 0
        self.calls += 1
        found: Tensor = _LogMeanExp.apply(x, self.log_probs, range(first, first + self.samples))
        return found

    def log_probs(self, x: Tensor, index: int) -> Tensor:
        """The log-probabilities of one draw."""
        network = self.network if self.drawn is None else self.drawn.write_draw(self.seed, index)
        return output_of(network, self.prepare(x)).float().div(self.temperature).log_softmax(-1)


class _LogMeanExp(torch.autograd.Function):
    """log mean_s p_s; its gradient Σ_s w_s ∇log p_s, w_s = p_s / Σ_t p_t, needs one draw at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_probs: Callable[[Tensor, int], Tensor], draws: Sequence[int]) -> Tensor:
        log_sum = log_probs(x, draws[0])
        for index in draws[1:]:
            log_sum = torch.logaddexp(log_sum, log_probs(x, index))
        ctx.save_for_backward(x, log_sum)
        ctx.log_probs, ctx.draws = log_probs, draws
        return log_sum - math.log(len(draws))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, log_sum = ctx.saved_tensors
        x = x.detach().requires_grad_()
        total = torch.zeros_like(x)
        for index in ctx.draws:
            with torch.enable_grad():
                each = ctx.log_probs(x, index)
            total += torch.autograd.grad(each, x, grad * (each.detach() - log_sum).exp())[0]
        return total, None, None
