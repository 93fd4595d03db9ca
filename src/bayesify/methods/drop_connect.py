"""DropConnect (Wan et al., 2013) as a variational method."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from bayesify.methods.base import Draws, Method, Per, Perturbation, Site
from bayesify.methods.draw_design import dropout_period
from bayesify.methods.mc_dropout import dropout_l2_terms


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
    noise_kind = "uniform"

    @property
    def noise_period(self) -> int:  # type: ignore[override]
        return dropout_period(self.p)

    @property
    def draws_per(self) -> Per:  # type: ignore[override]
        return self.reach

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        weight = site.base["weight"]
        kept = draws.uniform(tuple(weight.shape), self.noise_period) >= self.p
        return Perturbation(draws.size, weight=kept * (weight / (1 - self.p)))

    def l2_terms(self, site: Site) -> list[tuple[Tensor, float]]:
        return dropout_l2_terms(site, self.p, self.prior_std)
