"""MC dropout (Gal and Ghahramani, 2016) and DropConnect (Wan et al., 2013) as variational families."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from ..family import Draws, Elementwise, Family, Gradients, Grain, Perturbation, Site
from ..noise import is_eager
from .common import l2, scaled
from .options import check_number, check_option


@dataclass(frozen=True)
class _Dropping(Family):
    """Bernoulli(1 - p) / (1 - p) times inputs or weights."""

    p: float = 0.1
    _: KW_ONLY
    prior_std: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "p", 0, 1)
        check_number(self, "prior_std", 0, open_low=True)

    def init(self, site: Site) -> dict[str, Tensor]:
        return {}

    def mean(self, site: Site) -> Perturbation:
        return Perturbation(1)

    def kl(self, site: Site) -> Tensor:
        """(‖W‖²/(1-p) + ‖b‖²) / (2 prior_std²): EMP's eq. 2, with probability 1-p at M = W/(1-p)."""
        if not site.base:
            return torch.zeros(())
        kept = l2([site.base["weight"]], self.prior_std) / (1 - self.p)
        return kept if site.bias is None else kept + l2([site.bias], self.prior_std)

    def kl_grad(self, sites: list[Site]) -> Gradients:
        """W / ((1-p) prior_std²) and b / prior_std²."""
        weights = [site.base["weight"] for site in sites if site.base]
        biases = [site.bias for site in sites if site.bias is not None]
        precision = 1 / self.prior_std**2
        return scaled(weights, precision / (1 - self.p)) + scaled(biases, precision)

    def _keep(self, uniform: Tensor) -> Tensor:
        return (uniform >= self.p).to(uniform.dtype) / (1 - self.p)

    def _masked(self, weight: Tensor, uniform: Tensor) -> Tensor:
        """In the noise's memory where it can be: fresh memory takes longer than both operations."""
        kept = weight / (1 - self.p)
        if not is_eager() or kept.requires_grad or kept.dtype != uniform.dtype:
            return kept * (uniform >= self.p)
        return uniform.ge_(self.p).mul_(kept)


@dataclass(frozen=True)
class MCDropout(_Dropping):
    """Drops the inputs of a layer (channels of a convolution), in evaluation too; by default not the network's own.

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.MCDropout(0.1))
    >>> sum(p.numel() for p in model.parameters())
    8
    """

    grain = "row"
    spares_input = True
    factors_only = True

    def refusal(self, site: Site) -> str | None:
        if site.in_size is None:
            return f"{site.kind} has no input factor to drop; put MCDropout on the Linear or Conv before it"
        return super().refusal(site)

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        return Perturbation(draws.size, in_scale=Elementwise(self._keep, (), draws, "uniform"))


@dataclass(frozen=True)
class DropConnect(_Dropping):
    """Drops single weights, never biases; `reach` is how far a training mask goes, the batch or a row.

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.DropConnect(0.5))
    >>> bool((by.draw(model, 0).weight == 0).any())
    True
    """

    _: KW_ONLY
    reach: Literal["batch", "row"] = "batch"

    elements = ("weight",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(self, "reach", ("batch", "row"))

    @property
    def grain(self) -> Grain:  # type: ignore[override]
        return self.reach

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        weight = Elementwise(self._masked, (site.base["weight"],), draws, "uniform")
        return Perturbation(draws.size, weight=weight)
