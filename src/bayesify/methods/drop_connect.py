"""DropConnect (Wan et al., 2013) as a variational method."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from bayesify.methods._common import check_number, check_option
from bayesify.methods.base import Draws, Gradients, Method, Per, Perturbation, Site
from bayesify.methods.mc_dropout import dropout_kl, dropout_kl_grad


@dataclass(frozen=True)
class DropConnect(Method):
    """Drops single weights, never biases; `reach` is how far a training mask goes, the batch or a row.

    >>> import torch, bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.DropConnect(0.5))
    >>> bool((by.draw(model, 0).weight == 0).any())
    True

    A weight is multiplied by Bernoulli(1 - p) / (1 - p).
    """

    p: float = 0.1
    _: KW_ONLY
    prior_std: float = 1.0
    reach: Literal["batch", "row"] = "batch"

    title = "DropConnect"
    adds = "random masks on its weights"
    roles = ("linear", "conv", "recurrent", "attention")
    factorised = True

    def __post_init__(self) -> None:
        check_number(self, "p", 0, 1)
        check_number(self, "prior_std", 0, open_low=True)
        check_option(self, "reach", ("batch", "row"))

    @property
    def draws_per(self) -> Per:  # type: ignore[override]
        return self.reach

    def init(self, site: Site) -> dict[str, Tensor]:
        return {}

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        weight = site.base["weight"]
        kept = draws.uniform(tuple(weight.shape)) >= self.p
        return Perturbation(draws.size, weight=kept * (weight / (1 - self.p)))

    def mean(self, site: Site) -> Perturbation:
        return Perturbation(1)

    def kl(self, site: Site) -> Tensor:
        return dropout_kl(site, self.p, self.prior_std)

    def kl_grad(self, sites: list[Site]) -> Gradients:
        return dropout_kl_grad(sites, self.p, self.prior_std)
