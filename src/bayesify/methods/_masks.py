"""What MC dropout and DropConnect share: random masks at one rate, which multiply by Bernoulli(1 - p) / (1 - p)."""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from bayesify.methods.base import NOISE, Draws, Method, Site, dropout_rate_of
from bayesify.methods.draw_design import dropout_period


@dataclass(frozen=True)
class Masks(Method):
    """The rate `p`, or the noise that it is derived from, and the penalty of weights that are dropped at that rate."""

    p: float | None = None
    _: KW_ONLY
    noise: float = NOISE
    prior_std: float = 1.0

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

    def masks(self, shape: tuple[int, ...], draws: Draws) -> Tensor:
        """A mask of this shape for each draw: whether each element is kept."""
        return draws.uniform(shape, self.noise_period) >= self.rate

    def l2_terms(self, site: Site) -> list[tuple[Tensor, float]]:
        """(‖W‖²/(1-p) + ‖b‖²) / (2 prior_std²): EMP's eq. 2, with probability 1-p at M = W/(1-p)."""
        p, variance = self.rate, self.prior_std**2
        return [(t, 1 / ((1 - p if name == "weight" else 1) * variance)) for name, t in site.base.items()]
