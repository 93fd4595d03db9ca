"""The explicit ensemble as one model: K copies of every tensor, batch statistics included."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesify.methods._copies import initial_copies, stacked
from bayesify.methods.base import Method, Perturbation, Site


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

    def refusal(self, site: Site) -> str | None:
        return None if site.statistics else super().refusal(site)

    def init(self, site: Site) -> dict[str, Tensor]:
        tensors = initial_copies(site, self.components, self.init_copies, self.jitter) if site.base else {}
        for name, statistic in site.statistics.items():
            tensors[name] = statistic.detach().expand(self.components - 1, *statistic.shape).clone()
        return tensors

    def mean(self, site: Site) -> Perturbation:
        copies = {name: stacked(site, name) for name in (*site.base, *site.statistics)}
        statistics = {name: copies.pop(name) for name in site.statistics}
        component = torch.arange(self.components, device=site.device) if statistics else None
        return Perturbation(self.components, statistics=statistics or None, component=component, **copies)  # type: ignore[arg-type]

    def l2_terms(self, site: Site) -> list[tuple[Tensor, float]]:
        """Σ_k (τ/2K)‖M_k‖² with τ = 1/prior_std²."""
        factor = 1 / (self.components * self.prior_std**2)
        return [(copies[name], factor) for name in site.base for copies in (site.base, site.posterior)]
