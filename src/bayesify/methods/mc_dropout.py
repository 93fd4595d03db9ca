"""MC dropout (Gal and Ghahramani, 2016)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from bayesify.methods._common import check_number, l2, l2_grad
from bayesify.methods.base import Draws, Gradients, Method, Perturbation, Site


@dataclass(frozen=True)
class MCDropout(Method):
    """Drops inputs of a layer (channels of a convolution), in evaluation too; by default not the network's inputs.

    >>> import bayesify as by
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

    def __post_init__(self) -> None:
        check_number(self, "p", 0, 1)
        check_number(self, "prior_std", 0, open_low=True)

    def refusal(self, site: Site) -> str | None:
        if site.in_size is None:
            return f"{site.kind} has no input factor to drop; put MCDropout on the Linear or Conv before it"
        return super().refusal(site)

    def init(self, site: Site) -> dict[str, Tensor]:
        return {}

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        assert site.in_size is not None
        kept = draws.uniform((site.in_size,)) >= self.p
        return Perturbation(draws.size, in_scale=kept.float() / (1 - self.p))

    def mean(self, site: Site) -> Perturbation:
        return Perturbation(1)

    def kl(self, site: Site) -> Tensor:
        return dropout_kl(site, self.p, self.prior_std)

    def kl_grad(self, sites: list[Site]) -> Gradients:
        return dropout_kl_grad(sites, self.p, self.prior_std)


def dropout_kl(site: Site, p: float, prior_std: float) -> Tensor:
    """(‖W‖²/(1-p) + ‖b‖²) / (2 prior_std²): EMP's eq. 2, with probability 1-p at M = W/(1-p)."""
    if not site.base:
        return torch.zeros(())
    on_weight = l2([site.base["weight"]], prior_std) / (1 - p)
    return on_weight if site.bias is None else on_weight + l2([site.bias], prior_std)


def dropout_kl_grad(sites: list[Site], p: float, prior_std: float) -> Gradients:
    """W / ((1-p) prior_std²) and b / prior_std²."""
    weights = [site.base["weight"] for site in sites if site.base]
    biases = [site.bias for site in sites if site.bias is not None]
    return l2_grad(weights, 1 / ((1 - p) * prior_std**2)) + l2_grad(biases, 1 / prior_std**2)
