"""Implicit Bayesian neural networks (Trinh et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from bayesify.methods._common import check_flag, check_number, check_option, joint_factors, near_one, smallest_scale
from bayesify.methods.base import Draws, Method, Perturbation, Site, no_factors, parameter
from bayesify.methods.distributions import (
    MIXTURE_KLS,
    MixtureKL,
    distribution,
    mixture_kl,
    prior,
    rho_of,
    sample,
    scale_of,
)


@dataclass(frozen=True)
class IBNN(Method):
    """f = U(z ∘ x) + b: a mixture of K Gaussians over each input node (eq. 1, 19); U and b are points.

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.IBNN(4))
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'in_loc': (4, 3), 'in_rho': (4, 3)}

    Means start at Normal(1, mean_std²) (from scratch the paper has 0.5 or 0.75), scales at |Normal(0.05, 0.02²)|.
    `bias_noise` multiplies the bias by one scalar per component and draw, with its own posterior and KL.
    """

    components: int = 4
    _: KW_ONLY
    prior_std: float = 0.1
    mean_std: float = 0.1
    scale_mean: float = 0.05
    scale_std: float = 0.02
    bias_noise: bool = False
    divergence: MixtureKL = "moment"

    title = "implicit BNN"
    adds = "K Gaussians over input scales"
    roles = ("linear", "conv", "recurrent", "attention")
    draws_per = "row"
    covers_base = False

    def __post_init__(self) -> None:
        check_number(self, "components", 1, integer=True)
        check_number(self, "prior_std", 0, open_low=True)
        check_number(self, "mean_std", 0)
        check_number(self, "scale_mean", 0, open_low=True)
        check_number(self, "scale_std", 0)
        check_option(self, "divergence", MIXTURE_KLS)
        check_flag(self, "bias_noise")

    def refusal(self, site: Site) -> str | None:
        return super().refusal(site) or no_factors(site, "IBNN")

    def init(self, site: Site) -> dict[str, Tensor]:
        assert site.in_size is not None
        tensors = self._first("in", site.in_size)
        if self.bias_noise and site.bias is not None:
            tensors |= self._first("bias", 1)
        return tensors

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        bias = None
        if "bias_loc" in site.posterior and site.bias is not None:
            bias = self._sample(site, "bias", draws) * site.bias
        return Perturbation(draws.size, in_scale=self._sample(site, "in", draws), bias=bias)

    def mean(self, site: Site) -> Perturbation:
        bias = None
        if "bias_loc" in site.posterior and site.bias is not None:
            bias = site.posterior["bias_loc"] * site.bias
        return Perturbation(self.components, in_scale=site.posterior["in_loc"], bias=bias)

    def smallest_noise(self, posterior: Mapping[str, Tensor]) -> float | None:
        return smallest_scale(posterior)

    def kl(self, site: Site) -> Tensor:
        return self.total_kl([site])

    def total_kl(self, sites: list[Site]) -> Tensor:
        loc, scale = joint_factors(sites)
        p = prior("normal", 1.0, self.prior_std, loc)
        return mixture_kl(self.divergence, distribution("normal", loc, scale), p)

    def _first(self, side: str, size: int) -> dict[str, Tensor]:
        scale = (self.scale_mean + self.scale_std * torch.randn(self.components, size)).abs()
        loc = near_one(self.components, size, self.mean_std)
        return {f"{side}_loc": parameter(loc), f"{side}_rho": parameter(rho_of(scale))}

    def _sample(self, site: Site, side: str, draws: Draws) -> Tensor:
        component = draws.component(self.components)
        loc, rho = (site.posterior[f"{side}_{name}"].index_select(0, component) for name in ("loc", "rho"))
        return sample("normal", loc, scale_of(rho), draws)
