"""MC dropout (Gal and Ghahramani, 2016)."""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from bayesify.methods.base import NOISE, Draws, Method, Perturbation, Site, dropout_rate_of
from bayesify.methods.draw_design import dropout_period


@dataclass(frozen=True)
class MCDropout(Method):
    """Drops inputs of a layer (channels of a convolution), in evaluation too; by default not the network's inputs.

    >>> import torch, bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.MCDropout(0.1))
    >>> sum(p.numel() for p in model.parameters())
    8

    An input factor is Bernoulli(1 - p) / (1 - p), so that its mean is 1. If `p` is None, it is the rate at which its
    standard deviation is the noise of a layer, which `convert` derives from `noise` and the number of layers.
    """

    p: float | None = None
    _: KW_ONLY
    noise: float = NOISE
    prior_std: float = 1.0

    title = "MC dropout"
    adds = "random masks on its inputs"
    roles = ("linear", "conv", "recurrent", "attention")
    draws_per = "row"
    skips_input = True
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

    def refusal(self, site: Site) -> str | None:
        if site.in_size is None:
            return f"{site.kind} has no input factor to drop; put MCDropout on the Linear or Conv before it"
        return super().refusal(site)

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        assert site.in_size is not None
        kept = draws.uniform((site.in_size,), self.noise_period) >= self.rate
        return Perturbation(draws.size, in_scale=kept.float() / (1 - self.rate))

    def l2_terms(self, site: Site) -> list[tuple[Tensor, float]]:
        return dropout_l2_terms(site, self.rate, self.prior_std)


def dropout_l2_terms(site: Site, p: float, prior_std: float) -> list[tuple[Tensor, float]]:
    """(‖W‖²/(1-p) + ‖b‖²) / (2 prior_std²): EMP's eq. 2, with probability 1-p at M = W/(1-p)."""
    return [(t, 1 / ((1 - p if name == "weight" else 1) * prior_std**2)) for name, t in site.base.items()]
