"""DropConnect (Wan et al., 2013) as a variational method."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from bayesify.methods.base import NOISE, Draws, Method, Per, Perturbation, Site, dropout_rate_of
from bayesify.methods.draw_design import dropout_period
from bayesify.methods.mc_dropout import dropout_l2_terms


@dataclass(frozen=True)
class DropConnect(Method):
    """Drops single weights, never biases; `reach` is how far a training mask goes, the batch or a row.

    >>> import torch, bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.DropConnect(0.5))
    >>> bool((by.draw(model, 0).weight == 0).any())
    True

    A weight is multiplied by Bernoulli(1 - p) / (1 - p). If `p` is None, it is the rate at which the standard deviation
    of that is the noise of a layer, which `convert` derives from `noise` and the number of layers.
    """

    p: float | None = None
    _: KW_ONLY
    noise: float = NOISE
    prior_std: float = 1.0
    reach: Literal["batch", "row"] = "batch"

    title = "DropConnect"
    adds = "random masks on its weights"
    roles = ("linear", "conv", "recurrent", "attention")
    factorised = True
    noise_kind = "uniform"

    def options_for(self, noise: float) -> dict[str, float]:
        return {"p": dropout_rate_of(noise)}

    @property
    def rate(self) -> float:
        """The rate `p`, of a method that is sized for a network."""
        assert self.p is not None
        return self.p

    @property
    def noise_period(self) -> int:  # type: ignore[override]
        return dropout_period(self.rate)

    @property
    def draws_per(self) -> Per:  # type: ignore[override]
        return self.reach

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        weight = site.base["weight"]
        kept = draws.uniform(tuple(weight.shape), self.noise_period) >= self.rate
        return Perturbation(draws.size, weight=kept * (weight / (1 - self.rate)))

    def l2_terms(self, site: Site) -> list[tuple[Tensor, float]]:
        return dropout_l2_terms(site, self.rate, self.prior_std)
