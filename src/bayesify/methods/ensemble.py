"""The explicit ensemble as one model: K copies of every tensor, batch statistics included."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesify.methods._common import (
    check_number,
    check_option,
    initial_copies,
    l2_grad,
    of_components,
    stacked,
    sum_of_squares,
)
from bayesify.methods.base import Draws, Gradients, Method, Perturbation, Site


@dataclass(frozen=True)
class Ensemble(Method):
    """K members that share nothing; a row keeps its member through all layers.

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.BatchNorm1d(6), by.Ensemble(4))
    >>> {name: tuple(t.shape) for name, t in model.posterior.state_dict().items()}
    {'weight': (3, 6), 'bias': (3, 6), 'running_mean': (3, 6), 'running_var': (3, 6)}

    Copies start from the base tensor with a `jitter`, or with `init_copies="random"` from the layer's own reset.
    """

    components: int = 4
    _: KW_ONLY
    init_copies: Literal["jitter", "random"] = "jitter"
    jitter: float = 0.05
    prior_std: float = 1.0

    title = "explicit ensemble"
    adds = "K copies of everything"
    draws_per = "component"
    roles = ("linear", "conv", "recurrent", "attention", "norm", "embedding", "custom")
    noisy = False

    def __post_init__(self) -> None:
        check_number(self, "components", 1, integer=True)
        check_number(self, "jitter", 0)
        check_number(self, "prior_std", 0, open_low=True)
        check_option(self, "init_copies", ("jitter", "random"))

    def refusal(self, site: Site) -> str | None:
        return None if site.statistics else super().refusal(site)

    def init(self, site: Site) -> dict[str, Tensor]:
        tensors = initial_copies(site, self.components, self.init_copies, self.jitter) if site.base else {}
        for name, statistic in site.statistics.items():
            tensors[name] = statistic.detach().expand(self.components - 1, *statistic.shape).clone()
        return tensors

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        return self._members(site, draws)

    def mean(self, site: Site) -> Perturbation:
        return self._members(site, Draws(torch.arange(self.components, device=site.device)))

    def kl(self, site: Site) -> Tensor:
        """Σ_k (τ/2K)‖M_k‖² with τ = 1/prior_std²."""
        norms = [sum_of_squares(stacked(site, name)).mean() for name in site.base]
        total = torch.stack(norms).sum() if norms else torch.zeros((), device=site.device)
        return total / (2 * self.prior_std**2)

    def kl_grad(self, sites: list[Site]) -> Gradients:
        """(τ/K) M_k for every copy."""
        tensors = [t for site in sites for t in (*site.base.values(), *site.posterior.values())]
        return l2_grad(tensors, 1 / (self.components * self.prior_std**2))

    def _members(self, site: Site, draws: Draws) -> Perturbation:
        parts = {name: of_components(stacked(site, name), draws) for name in (*site.base, *site.statistics)}
        statistics = {name: parts.pop(name) for name in site.statistics}
        component = draws.component(self.components) if statistics else None
        return Perturbation(draws.size, statistics=statistics or None, component=component, **parts)  # type: ignore[arg-type]
