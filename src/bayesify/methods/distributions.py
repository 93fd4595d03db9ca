"""The factor posteriors and priors, and the divergences between them, on torch.distributions."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import Cauchy, Distribution, LogNormal, Normal, kl_divergence
from torch.nn import functional as F

from bayesify.methods.base import Draws, Site

Kind = Literal["normal", "cauchy", "lognormal"]
MixtureKL = Literal["average", "sum", "moment", "pairwise"]
SMALLEST_SCALE = 1e-7


def scale_of(rho: Tensor) -> Tensor:
    """softplus(ρ) + 1e-7, positive for every ρ."""
    return F.softplus(rho) + SMALLEST_SCALE


def rho_of(scale: Tensor) -> Tensor:
    """The ρ with `scale_of(ρ) = scale`.

    >>> scale_of(rho_of(torch.tensor([0.03])))
    tensor([0.0300])
    """
    scale = (scale - SMALLEST_SCALE).clamp_min(1e-12)
    return scale + torch.log(-torch.expm1(-scale))


def near_one(components: int, size: int, std: float, signs: float | None = None) -> Tensor:
    """K vectors around 1: Normal(1, std²), or random signs with probability `signs` of +1."""
    if signs is None:
        return 1 + std * torch.randn(components, size)
    return torch.where(torch.rand(components, size) < signs, 1.0, -1.0)


def distribution(kind: Kind, loc: Tensor, scale: Tensor) -> Distribution:
    """The distribution of a kind; a log-normal's loc and scale are those of its logarithm."""
    make = {"normal": Normal, "cauchy": Cauchy, "lognormal": LogNormal}[kind]
    return make(loc, scale, validate_args=False)


def prior(kind: Kind, mean: float, scale: float, like: Tensor) -> Distribution:
    """The prior at location `mean`: for a log-normal, at log-location log(mean)."""
    loc = math.log(mean) if kind == "lognormal" else mean
    return distribution(kind, like.new_full((), loc), like.new_full((), scale))


def sample(kind: Kind, loc: Tensor, scale: Tensor, draws: Draws) -> Tensor:
    """One reparameterised sample per draw; loc and scale have a leading G."""
    shape = tuple(loc.shape[1:])
    if kind == "cauchy":
        return loc + scale * draws.cauchy(shape)
    value = torch.addcmul(loc, scale, draws.normal(shape).to(scale.dtype))
    return value.exp() if kind == "lognormal" else value


def centre(kind: Kind, loc: Tensor, scale: Tensor | float) -> Tensor:
    """The mean of each distribution; the location where a Cauchy has none."""
    return (loc + scale**2 / 2).exp() if kind == "lognormal" else loc


def factor(site: Site, side: str, component: Tensor, draws: Draws, kind: Kind, limit: float = math.inf) -> Tensor:
    """A factor of each draw: a sample of its component, clipped to ±limit, or a point where it has no scale."""
    loc = site.posterior[f"{side}_loc"].index_select(0, component)
    if f"{side}_rho" not in site.posterior:
        return centre(kind, loc, 0.0)
    value = sample(kind, loc, scale_of(site.posterior[f"{side}_rho"].index_select(0, component)), draws)
    return value if limit == math.inf else value.clamp(-limit, limit)


def kl(posterior: Distribution, prior: Distribution, samples: int = 64) -> Tensor:
    """KL(posterior ‖ prior) element by element: closed form where torch has one, else by `samples` draws.

    Cauchy‖Cauchy is log(((γ₁+γ₂)² + (x₁-x₂)²) / (4γ₁γ₂)).
    """
    try:
        return kl_divergence(posterior, prior)
    except NotImplementedError:
        value = posterior.rsample(torch.Size([samples]))
        return (posterior.log_prob(value) - prior.log_prob(value)).mean(0)


def mixture_kl(how: MixtureKL, posterior: Distribution, prior: Distribution, samples: int = 64) -> Tensor:
    """A divergence of an equal mixture of K components (the leading dimension) from a prior, summed over elements.

    `average` is the convexity bound (1/K) Σ KL_k; `sum` is K times it; `moment` is the KL of the mean of the
    components, Normal(mean_k μ_k, Σ_k σ_k² / K²) (iBNN, eq. 22-24); `pairwise` is the average minus a bound on the
    entropy that the mixture gains from the distances between its components.
    """
    if how == "moment":
        loc, scale = posterior.loc, posterior.scale  # type: ignore[attr-defined]
        std = scale.square().sum(0).sqrt() / len(scale)
        return kl(Normal(loc.mean(0), std, validate_args=False), prior).sum()
    each = kl(posterior, prior, samples).flatten(1).sum(1)
    if how == "pairwise":
        return each.mean() + _overlap(posterior)
    return each.sum() if how == "sum" else each.mean()


def factors_kl(
    sites: list[Site], how: MixtureKL, kind: Kind, prior_kind: Kind, mean: float, std: float, samples: int = 64
) -> Tensor:
    """The `mixture_kl` of all layers' factors together (K, ΣD): a draw has one component in all layers."""
    names = [(site, name.removesuffix("_rho")) for site in sites for name in site.posterior if name.endswith("_rho")]
    device = names[0][0].posterior[f"{names[0][1]}_rho"].device
    loc = torch.cat([site.posterior[f"{name}_loc"].to(device) for site, name in names], -1)
    rho = torch.cat([site.posterior[f"{name}_rho"].to(device) for site, name in names], -1)
    return mixture_kl(how, distribution(kind, loc, scale_of(rho)), prior(prior_kind, mean, std, loc), samples)


def _overlap(posterior: Distribution) -> Tensor:
    """(1/K) Σ_i log (1/K) Σ_j exp(-B_ij) ≤ 0, with Bhattacharyya distances B_ij between normal components.

    B = Σ Δ² / (4(v_i + v_j)) + ½ log((v_i + v_j) / (2 sqrt(v_i v_j))); it bounds the mixture's entropy from below.
    """
    loc, variance = posterior.loc.flatten(1), posterior.scale.square().flatten(1)  # type: ignore[attr-defined]
    both = variance.unsqueeze(0) + variance.unsqueeze(1)
    quadratic = (loc.unsqueeze(0) - loc.unsqueeze(1)).square() / (4 * both)
    logs = variance.log()
    spread = 0.5 * (both.log() - math.log(2) - 0.5 * (logs.unsqueeze(0) + logs.unsqueeze(1)))
    distance = (quadratic + spread).sum(2)
    return (torch.logsumexp(-distance, 1) - math.log(loc.shape[0])).mean()


def entropy(log_probs: Tensor, probs: Tensor | None = None) -> Tensor:
    """The entropy of categorical distributions: -Σ p log p over the last dimension, where 0 log 0 = 0.

    >>> entropy(torch.tensor([0.0, -torch.inf]))
    tensor(0.)
    """
    probs = log_probs.exp() if probs is None else probs
    return 0 - (probs * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)
