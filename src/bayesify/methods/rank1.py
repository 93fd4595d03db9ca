"""Rank-1 Bayesian neural networks (Dusenberry et al., 2020)."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.methods._copies import bias_copies, stacked
from bayesify.methods.base import (
    NOISE,
    Draws,
    Method,
    NoiseKind,
    Perturbation,
    Site,
    check_number,
    dropout_rate_of,
    noise_of,
    parameter,
)
from bayesify.methods.distributions import Kind, MixtureKL, centre, factor, factors_kl, near_one, rho_of, scale_of


@dataclass(frozen=True)
class Rank1(Method):
    """W' = W ∘ (r sᵀ): a mixture of K distributions over the input factor s and the output factor r (eq. 1-2).

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.Rank1(4))
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'in_loc': (4, 3), 'in_rho': (4, 3), 'out_loc': (4, 2), 'out_rho': (4, 2)}

    `factors` says which have a distribution; the other keeps K learned vectors without prior or noise (figure 2).
    Means start at Normal(1, mean_std²), or with `signs` at ±1 with that probability of +1, which suits training from
    scratch and destroys pretrained weights. Scales start at the Gaussian equivalent of a `dropout_rate`. If `mean_std`,
    `dropout_rate` or `prior_std` is None, it is set by the noise of a layer, which `convert` derives from `noise` and
    the number of layers; `mean_std` is 0.6 of it (a Cauchy scale starts at a rate of 1e-6). `clip` bounds the factors
    (10 for Cauchy, else none). If `prior` is not of the posterior's kind, the KL uses `kl_samples` draws.
    """

    components: int = 4
    _: KW_ONLY
    factors: Literal["both", "input", "output"] = "both"
    posterior: Kind = "normal"
    prior: Kind | None = None
    prior_mean: float = 1.0
    noise: float = NOISE
    prior_std: float | None = None
    mean_std: float | None = None
    signs: float | None = None
    dropout_rate: float | None = None
    clip: float | None = None
    bias: Literal["shared", "component"] = "shared"
    divergence: MixtureKL = "average"
    kl_samples: int = 64

    title = "Rank-1 BNN"
    adds = "K distributions over input and output scales"
    roles = ("linear", "conv", "recurrent", "attention")
    draws_per = "row"
    covers_base = False
    needs_factors = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None and self.clip != math.inf:
            check_number(self, "clip", 0, open_low=True)
        check_number(self, "prior_mean", 0 if self.posterior == "lognormal" else -math.inf, open_low=True)
        if self.posterior == "lognormal" and self.signs is not None:
            raise BayesifyError(f"Rank1(signs={self.signs!r}): a lognormal factor is positive; leave signs=None")
        prior = self.prior or self.posterior
        if prior != self.posterior and (self.posterior, prior) != ("normal", "cauchy"):
            raise BayesifyError(
                f"Rank1(posterior={self.posterior!r}, prior={self.prior!r}): their divergence is infinite or "
                "undefined; use the same kind for both, or a Cauchy prior with a normal posterior"
            )
        if self.divergence in ("moment", "pairwise") and {self.posterior, prior} != {"normal"}:
            needed = f"needs a normal posterior and prior, got {self.posterior!r}; use 'average' or 'sum'"
            raise BayesifyError(f"Rank1(divergence={self.divergence!r}): {needed}")

    @property
    def noise_kind(self) -> NoiseKind:  # type: ignore[override]
        return "cauchy" if self.posterior == "cauchy" else "normal"

    def options_for(self, noise: float) -> dict[str, float]:
        rate = 1e-6 if self.posterior == "cauchy" else dropout_rate_of(noise)
        return {"mean_std": 0.6 * noise, "prior_std": noise, "dropout_rate": rate}

    def init(self, site: Site) -> dict[str, Tensor]:
        assert self.mean_std is not None and self.dropout_rate is not None
        tensors: dict[str, Tensor] = {}
        for side, size in (("in", site.in_size), ("out", site.out_size)):
            assert size is not None
            loc = near_one(self.components, size, self.mean_std, self.signs)
            tensors[f"{side}_loc"] = parameter(loc - 1 if self.posterior == "lognormal" else loc)
            if self.factors in ("both", f"{side}put"):
                tensors[f"{side}_rho"] = parameter(rho_of(torch.full_like(loc, noise_of(self.dropout_rate))))
        return tensors | bias_copies(site, self.components, self.bias)

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        component = draws.component(self.components)
        limit = self.clip or (10.0 if self.posterior == "cauchy" else math.inf)
        bias = stacked(site, "bias").index_select(0, component) if "bias" in site.posterior else None
        s = factor(site, "in", component, draws, self.posterior, limit)
        r = factor(site, "out", component, draws, self.posterior, limit)
        return Perturbation(len(component), in_scale=s, out_scale=r, bias=bias)

    def mean(self, site: Site) -> Perturbation:
        scales = {name: scale_of(rho) for name, rho in site.posterior.items() if name.endswith("_rho")}
        s = centre(self.posterior, site.posterior["in_loc"], scales.get("in_rho", 0.0))
        r = centre(self.posterior, site.posterior["out_loc"], scales.get("out_rho", 0.0))
        bias = stacked(site, "bias") if "bias" in site.posterior else None
        return Perturbation(self.components, in_scale=s, out_scale=r, bias=bias)

    def total_kl(self, sites: list[Site]) -> Tensor:
        assert self.prior_std is not None
        kinds = self.posterior, self.prior or self.posterior
        return factors_kl(sites, self.divergence, *kinds, self.prior_mean, self.prior_std, self.kl_samples)
