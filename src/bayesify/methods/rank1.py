"""Rank-1 Bayesian neural networks (Dusenberry et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.methods._common import check_number, check_option, joint_factors, near_one, smallest_scale, stacked
from bayesify.methods.base import Draws, Method, Perturbation, Site, no_factors, parameter
from bayesify.methods.distributions import (
    KINDS,
    MIXTURE_KLS,
    Kind,
    MixtureKL,
    centre,
    distribution,
    mixture_kl,
    prior,
    rho_of,
    sample,
    scale_of,
    scale_of_dropout,
)


@dataclass(frozen=True)
class Rank1(Method):
    """W' = W ∘ (r sᵀ): a mixture of K distributions over the input factor s and the output factor r (eq. 1-2).

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.Rank1(4))
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'in_loc': (4, 3), 'in_rho': (4, 3), 'out_loc': (4, 2), 'out_rho': (4, 2)}

    `factors` says which have a distribution; the other keeps K learned vectors without prior or noise (figure 2).
    Means start at Normal(1, mean_std²), or with `signs` at ±1 with that probability of +1, which suits training from
    scratch and destroys pretrained weights. Scales start at the Gaussian equivalent of a `dropout_rate`. `clip` bounds
    the factors (10 for Cauchy, else none). If `prior` is not of the posterior's kind, the KL uses `kl_samples` draws.
    """

    components: int = 4
    _: KW_ONLY
    factors: Literal["both", "input", "output"] = "both"
    posterior: Kind = "normal"
    prior: Kind | None = None
    prior_mean: float = 1.0
    prior_std: float = 0.1
    mean_std: float = 0.1
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

    def __post_init__(self) -> None:
        check_number(self, "components", 1, integer=True)
        check_number(self, "prior_std", 0, open_low=True)
        check_number(self, "mean_std", 0)
        check_number(self, "kl_samples", 1, integer=True)
        check_option(self, "factors", ("both", "input", "output"))
        check_option(self, "posterior", KINDS)
        check_option(self, "bias", ("shared", "component"))
        check_option(self, "divergence", MIXTURE_KLS)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.signs is not None:
            check_number(self, "signs", 0, 1 + 1e-9)
        if self.dropout_rate is not None:
            check_number(self, "dropout_rate", 0, 1, open_low=True)
        if self.clip != float("inf") and self.clip is not None:
            check_number(self, "clip", 0, open_low=True)
        check_number(self, "prior_mean", 0 if self.posterior == "lognormal" else -float("inf"), open_low=True)
        if self.posterior == "lognormal" and self.signs is not None:
            raise BayesifyError(f"Rank1(signs={self.signs!r}): a lognormal factor is positive; leave signs=None")
        self._check_divergence()

    def _check_divergence(self) -> None:
        prior = self.prior or self.posterior
        if self.prior is not None:
            check_option(self, "prior", KINDS)
        if prior != self.posterior and (self.posterior, prior) != ("normal", "cauchy"):
            raise BayesifyError(
                f"Rank1(posterior={self.posterior!r}, prior={self.prior!r}): their divergence is infinite or "
                "undefined; use the same kind for both, or a Cauchy prior with a normal posterior"
            )
        if self.divergence in ("moment", "pairwise") and {self.posterior, prior} != {"normal"}:
            raise BayesifyError(
                f"Rank1(divergence={self.divergence!r}): needs a normal posterior and prior, got "
                f"{self.posterior!r}; use 'average' or 'sum'"
            )

    def refusal(self, site: Site) -> str | None:
        return super().refusal(site) or no_factors(site, "Rank1")

    def init(self, site: Site) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for side, size in (("in", site.in_size), ("out", site.out_size)):
            assert size is not None
            tensors[f"{side}_loc"] = parameter(self._first_loc(size))
            if self._is_random(side):
                scale = torch.full((self.components, size), scale_of_dropout(self._rate))
                tensors[f"{side}_rho"] = parameter(rho_of(scale))
        if self.bias == "component" and site.bias is not None:
            tensors["bias"] = parameter(site.bias.expand(self.components - 1, *site.bias.shape).clone())
        return tensors

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        component = draws.component(self.components)
        return Perturbation(
            len(component),
            in_scale=self._factor(site, "in", component, draws),
            out_scale=self._factor(site, "out", component, draws),
            bias=stacked(site, "bias").index_select(0, component) if "bias" in site.posterior else None,
        )

    def mean(self, site: Site) -> Perturbation:
        return Perturbation(
            self.components,
            in_scale=self._centre(site, "in"),
            out_scale=self._centre(site, "out"),
            bias=stacked(site, "bias") if "bias" in site.posterior else None,
        )

    def smallest_noise(self, posterior: Mapping[str, Tensor]) -> float | None:
        return smallest_scale(posterior)

    def kl(self, site: Site) -> Tensor:
        return self.total_kl([site])

    def total_kl(self, sites: list[Site]) -> Tensor:
        loc, scale = joint_factors(sites)
        p = prior(self.prior or self.posterior, self.prior_mean, self.prior_std, loc)
        return mixture_kl(self.divergence, distribution(self.posterior, loc, scale), p, self.kl_samples)

    @property
    def _rate(self) -> float:
        return self.dropout_rate or (1e-6 if self.posterior == "cauchy" else 1e-3)

    def _is_random(self, side: str) -> bool:
        return self.factors == "both" or self.factors == f"{side}put"

    def _first_loc(self, size: int) -> Tensor:
        loc = near_one(self.components, size, self.mean_std, self.signs)
        return loc - 1 if self.posterior == "lognormal" else loc

    def _factor(self, site: Site, side: str, component: Tensor, draws: Draws) -> Tensor:
        """One factor of each draw: sampled from its component, or the component's point if `factors` leaves it out."""
        loc = site.posterior[f"{side}_loc"].index_select(0, component)
        if f"{side}_rho" not in site.posterior:
            return self._point(loc)
        scale = scale_of(site.posterior[f"{side}_rho"].index_select(0, component))
        value = sample(self.posterior, loc, scale, draws)
        limit = self.clip or (10.0 if self.posterior == "cauchy" else float("inf"))
        return value if limit == float("inf") else value.clamp(-limit, limit)

    def _centre(self, site: Site, side: str) -> Tensor:
        loc = site.posterior[f"{side}_loc"]
        if not self._is_random(side):
            return self._point(loc)
        return centre(self.posterior, loc, scale_of(site.posterior[f"{side}_rho"]))

    def _point(self, loc: Tensor) -> Tensor:
        return loc.exp() if self.posterior == "lognormal" else loc
