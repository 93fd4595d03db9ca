"""Implicit Bayesian neural networks (Trinh et al., 2020)."""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from bayesify.methods.base import NOISE, Draws, Method, Perturbation, Site, parameter
from bayesify.methods.distributions import MixtureKL, factor, factors_kl, near_one, rho_of


@dataclass(frozen=True)
class IBNN(Method):
    """f = U(z ∘ x) + b: a mixture of K Gaussians over each input node (eq. 1, 19); U and b are points.

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.IBNN(4))
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'in_loc': (4, 3), 'in_rho': (4, 3)}

    Means start at Normal(1, mean_std²) (from scratch the paper has 0.5 or 0.75), scales at |Normal(scale_mean,
    scale_std²)| (0.05 and 0.02 in the paper). If `mean_std`, `scale_mean` or `prior_std` is None, it is the noise of a
    layer, which `convert` derives from `noise` and the number of layers; a `scale_std` of None is a tenth of
    `scale_mean`.
    `bias_noise` multiplies the bias by one scalar per component and draw, with its own posterior and KL.
    The KL is that of `mixture_kl` in distributions.py, by default of the components' mean (eq. 22-24).
    """

    components: int = 4
    _: KW_ONLY
    noise: float = NOISE
    prior_std: float | None = None
    mean_std: float | None = None
    scale_mean: float | None = None
    scale_std: float | None = None
    bias_noise: bool = False
    divergence: MixtureKL = "moment"

    title = "implicit BNN"
    adds = "K Gaussians over input scales"
    roles = ("linear", "conv", "recurrent", "attention")
    draws_per = "row"
    covers_base = False
    needs_factors = True

    def options_for(self, noise: float) -> dict[str, float]:
        scale = noise if self.scale_mean is None else self.scale_mean
        return {"mean_std": noise, "prior_std": noise, "scale_mean": scale, "scale_std": 0.1 * scale}

    def init(self, site: Site) -> dict[str, Tensor]:
        assert site.in_size is not None
        assert self.mean_std is not None and self.scale_mean is not None and self.scale_std is not None
        tensors: dict[str, Tensor] = {}
        for name, size in (("in", site.in_size), ("bias", 1 if self.bias_noise and site.bias is not None else 0)):
            if size:
                scale = (self.scale_mean + self.scale_std * torch.randn(self.components, size)).abs()
                tensors[f"{name}_loc"] = parameter(near_one(self.components, size, self.mean_std))
                tensors[f"{name}_rho"] = parameter(rho_of(scale))
        return tensors

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        component = draws.component(self.components)
        bias = None
        if "bias_loc" in site.posterior and site.bias is not None:
            bias = factor(site, "bias", component, draws, "normal") * site.bias
        return Perturbation(draws.size, in_scale=factor(site, "in", component, draws, "normal"), bias=bias)

    def mean(self, site: Site) -> Perturbation:
        bias = None
        if "bias_loc" in site.posterior and site.bias is not None:
            bias = site.posterior["bias_loc"] * site.bias
        return Perturbation(self.components, in_scale=site.posterior["in_loc"], bias=bias)

    def total_kl(self, sites: list[Site]) -> Tensor:
        assert self.prior_std is not None
        return factors_kl(sites, self.divergence, "normal", "normal", 1.0, self.prior_std)
