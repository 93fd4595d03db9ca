"""The mean-field Gaussian of BayesAdapter (Deng et al., 2020), with four estimators of its likelihood term."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import BayesifyError
from ..family import Draws, Elementwise, Family, Gradients, Grain, Perturbation, Site, parameter, precise
from ..noise import is_eager
from .common import scaled, trainable
from .options import check_number, check_option

Estimator = Literal["exemplar", "shared", "flipout", "local"]


@dataclass(frozen=True)
class MeanField(Family):
    """w = μ + exp(ψ) ε for weights and biases; μ is the base tensor, the prior Normal(0, prior_std²).

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.MeanField())
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'weight_log_std': (2, 3), 'bias_log_std': (2,)}

    `estimator` says how training rows share noise: "exemplar" draws weights for each row (eq. 8), "shared" one for the
    batch (eq. 7), "flipout" one times random signs per row, "local" draws the pre-activations. λ = 1/(prior_std² N).
    The weights that "exemplar" draws for a batch are held in memory; with `rows_at_once`, those of Linear and Conv
    layers are held for so many rows of one layer at a time, and made again for the gradient.
    """

    _: KW_ONLY
    prior_std: float = math.sqrt(0.1)
    estimator: Estimator = "exemplar"
    init_log_std: tuple[float, float] = (-6.0, -5.0)
    rows_at_once: int | None = None

    roles = ("linear", "conv", "recurrent", "attention", "norm")
    elements = ("weight", "bias")

    def __post_init__(self) -> None:
        check_number(self, "prior_std", 0, open_low=True)
        check_option(self, "estimator", ("exemplar", "shared", "flipout", "local"))
        if self.rows_at_once is not None:
            check_number(self, "rows_at_once", 1, whole=True)
            if self.estimator != "exemplar":
                raise BayesifyError(
                    f"MeanField(rows_at_once={self.rows_at_once}, estimator={self.estimator!r}): only 'exemplar' draws "
                    "weights for each row; leave rows_at_once out"
                )
        given = self.init_log_std
        pair = tuple(given) if isinstance(given, (tuple, list)) else ()
        object.__setattr__(self, "init_log_std", pair or given)
        if len(pair) != 2 or not all(isinstance(end, (int, float)) for end in pair) or not pair[0] <= pair[1]:
            raise BayesifyError(f"MeanField(init_log_std={self.init_log_std!r}): expected (low, high), low <= high")

    @property
    def grain(self) -> Grain:  # type: ignore[override]
        return "batch" if self.estimator == "shared" else "row"

    def refusal(self, site: Site) -> str | None:
        if self.estimator == "local" and site.recurs:
            return (
                f"{site.kind} uses one draw of its weights at every step, and estimator='local' would draw its outputs "
                "anew at each; use 'exemplar', 'flipout' or 'shared' there"
            )
        return super().refusal(site)

    def init(self, site: Site) -> dict[str, Tensor]:
        low, high = self.init_log_std
        return {
            f"{name}_log_std": parameter(low + (high - low) * torch.rand(tensor.shape))
            for name, tensor in site.base.items()
        }

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        if draws.size > 1 and not draws.generators and site.in_size is not None:
            if self.estimator == "flipout":
                return self._flipout(site, draws)
            if self.estimator == "local":
                return self._local(site, draws)
        weight = Elementwise(_reparameterise, (site.base["weight"], site.posterior["weight_log_std"]), draws, "normal")
        return Perturbation(draws.size, weight=weight, bias=self._bias(site, draws))

    def mean(self, site: Site) -> Perturbation:
        return Perturbation(1)

    def kl(self, site: Site) -> Tensor:
        return torch.stack([self._kl(site, name) for name in site.base]).sum()

    def kl_grad(self, sites: list[Site]) -> Gradients:
        """∇μ = μ/σ₀², ∇ψ = exp(2ψ)/σ₀² - 1 (eq. 5), for all layers in a few fused calls."""
        variance = self.prior_std**2
        of_means = scaled([t for site in sites for t in site.base.values()], 1 / variance)
        log_stds = [t for site in sites for t in site.posterior.values() if trainable(t)]
        if not log_stds:
            return of_means
        with torch.no_grad():
            directions = torch._foreach_mul(log_stds, 2.0)
            torch._foreach_exp_(directions)
            torch._foreach_sub_(directions, variance)
        return of_means + [(t, each, 1 / variance) for t, each in zip(log_stds, directions, strict=True)]

    def _bias(self, site: Site, draws: Draws) -> Tensor | None:
        if site.bias is None:
            return None
        noise = draws.normal(tuple(site.bias.shape))
        return _reparameterise(site.bias, site.posterior["bias_log_std"], noise)

    def _flipout(self, site: Site, draws: Draws) -> Perturbation:
        """W + (a bᵀ) ∘ ΔW with random signs a, b per row: the mean is counted once."""
        assert site.in_size is not None and site.out_size is not None
        shared = Draws(draws.position[:1])
        out_sign = _signs(draws, site.out_size)
        weight = shared.normal(tuple(site.base["weight"].shape)) * site.posterior["weight_log_std"].exp()
        bias = None
        if site.bias is not None:
            bias = shared.normal(tuple(site.bias.shape)) * site.posterior["bias_log_std"].exp() * out_sign
        change = Perturbation(
            draws.size, in_scale=_signs(draws, site.in_size), out_scale=out_sign, weight=weight, bias=bias
        )
        return Perturbation(draws.size, plus=change)

    def _local(self, site: Site, draws: Draws) -> Perturbation:
        variances = {name: (2 * site.posterior[f"{name}_log_std"]).exp().unsqueeze(0) for name in site.base}
        return Perturbation(draws.size, variance=Perturbation(draws.size, **variances))  # type: ignore[arg-type]

    def _kl(self, site: Site, name: str) -> Tensor:
        mean, log_std = precise(site.base[name]), site.posterior[f"{name}_log_std"]
        squares = ((2 * log_std).exp() + mean.square()) / (2 * self.prior_std**2)
        return (math.log(self.prior_std) - log_std + squares - 0.5).sum()


def _reparameterise(mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """μ + exp(ψ) ε; where it can be, in ε's memory: fresh memory takes longer than both operations."""
    if not is_eager() or not mean.dtype == log_std.dtype == noise.dtype:
        return mean + log_std.exp() * noise
    if not torch.is_grad_enabled():
        return torch.addcmul(mean, log_std.exp(), noise, out=noise)
    value: Tensor = _Reparameterised.apply(mean, log_std, noise)
    return value


class _Reparameterised(torch.autograd.Function):
    """w = μ + exp(ψ) ε, whose gradient by ψ is that by w times w - μ: neither exp(ψ) nor ε is kept for it."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
        ctx.mark_dirty(noise)
        value = noise.mul_(log_std.exp()).add_(mean)
        ctx.save_for_backward(mean, value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, value = ctx.saved_tensors
        of_log_std = _summed(grad * (value - mean), mean) if ctx.needs_input_grad[1] else None
        return _summed(grad, mean) if ctx.needs_input_grad[0] else None, of_log_std, None


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """The sum over draws, which is no sum where there is one."""
    return grad.reshape(like.shape) if grad.numel() == like.numel() else grad.sum_to_size(like.shape)


def _signs(draws: Draws, size: int) -> Tensor:
    positive = draws.coarse((size,)) >= 0.5
    return positive.to(torch.float32).mul_(2).sub_(1)
