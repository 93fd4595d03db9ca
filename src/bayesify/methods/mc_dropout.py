"""MC dropout (Gal and Ghahramani, 2016)."""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from bayesify.methods.base import Draws, Method, Perturbation, Site
from bayesify.methods.draw_design import dropout_period


@dataclass(frozen=True)
class MCDropout(Method):
    """Drops inputs of a layer (channels of a convolution), in evaluation too; by default not the network's inputs.

    >>> import torch, bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.MCDropout(0.1))
    >>> sum(p.numel() for p in model.parameters())
    8

    An input factor is Bernoulli(1 - p) / (1 - p), so that its mean is 1.
    """

    p: float = 0.1
    _: KW_ONLY
    prior_std: float = 1.0

    title = "MC dropout"
    adds = "random masks on its inputs"
    roles = ("linear", "conv", "recurrent", "attention")
    draws_per = "row"
    skips_input = True
    noise_kind = "uniform"

    @property
    def noise_period(self) -> int:  # type: ignore[override]
        return dropout_period(self.p)

    def refusal(self, site: Site) -> str | None:
        if site.in_size is None:
            return f"{site.kind} has no input factor to drop; put MCDropout on the Linear or Conv before it"
        return super().refusal(site)

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        assert site.in_size is not None
        kept = draws.uniform((site.in_size,), self.noise_period) >= self.p
        return Perturbation(draws.size, in_scale=kept.float() / (1 - self.p))

    def l2_terms(self, site: Site) -> list[tuple[Tensor, float]]:
        return dropout_l2_terms(site, self.p, self.prior_std)


def dropout_l2_terms(site: Site, p: float, prior_std: float) -> list[tuple[Tensor, float]]:
    """(‖W‖²/(1-p) + ‖b‖²) / (2 prior_std²): EMP's eq. 2, with probability 1-p at M = W/(1-p)."""
    return [(t, 1 / ((1 - p if name == "weight" else 1) * prior_std**2)) for name, t in site.base.items()]
