"""BatchEnsemble (Wen et al., 2020): K points of the rank-1 factors."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesify.methods._common import check_number, check_option, near_one, of_components, stacked
from bayesify.methods.base import Draws, Gradients, Method, Perturbation, Site, no_factors, parameter


@dataclass(frozen=True)
class BatchEnsemble(Method):
    """W_k = W ∘ (r_k s_kᵀ) for K members; no prior, no noise.

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.BatchEnsemble(4, bias="component"))
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'in_loc': (4, 3), 'out_loc': (4, 2), 'bias': (3, 2)}

    Factors start at Normal(1, mean_std²), or with `signs` at ±1 with that probability of +1 (from scratch only).
    """

    components: int = 4
    _: KW_ONLY
    mean_std: float = 0.1
    signs: float | None = None
    bias: Literal["shared", "component"] = "shared"

    title = "BatchEnsemble"
    adds = "K input and output scales"
    roles = ("linear", "conv", "recurrent", "attention")
    draws_per = "component"
    covers_base = False
    noisy = False

    def __post_init__(self) -> None:
        check_number(self, "components", 1, integer=True)
        check_number(self, "mean_std", 0)
        check_option(self, "bias", ("shared", "component"))
        if self.signs is not None:
            check_number(self, "signs", 0, 1 + 1e-9)

    def refusal(self, site: Site) -> str | None:
        return super().refusal(site) or no_factors(site, "BatchEnsemble")

    def init(self, site: Site) -> dict[str, Tensor]:
        assert site.in_size is not None and site.out_size is not None
        sizes = {"in_loc": site.in_size, "out_loc": site.out_size}
        tensors: dict[str, Tensor] = {
            name: parameter(near_one(self.components, size, self.mean_std, self.signs)) for name, size in sizes.items()
        }
        if self.bias == "component" and site.bias is not None:
            tensors["bias"] = parameter(site.bias.expand(self.components - 1, *site.bias.shape).clone())
        return tensors

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        means = self.mean(site)
        assert means.in_scale is not None and means.out_scale is not None
        return Perturbation(
            draws.size,
            in_scale=of_components(means.in_scale, draws),
            out_scale=of_components(means.out_scale, draws),
            bias=None if means.bias is None else of_components(means.bias, draws),
        )

    def mean(self, site: Site) -> Perturbation:
        return Perturbation(
            self.components,
            in_scale=site.posterior["in_loc"],
            out_scale=site.posterior["out_loc"],
            bias=stacked(site, "bias") if "bias" in site.posterior else None,
        )

    def kl(self, site: Site) -> Tensor:
        return torch.zeros((), device=site.base["weight"].device)

    def kl_grad(self, sites: list[Site]) -> Gradients:
        return []
