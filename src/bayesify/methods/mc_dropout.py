"""MC dropout (Gal and Ghahramani, 2016)."""

from dataclasses import dataclass

from bayesify.methods._masks import Masks
from bayesify.methods.base import Draws, Perturbation, Site


@dataclass(frozen=True)
class MCDropout(Masks):
    """Drops inputs of a layer (channels of a convolution), in evaluation too; by default not the network's inputs.

    >>> import torch, bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.MCDropout(0.1))
    >>> sum(p.numel() for p in model.parameters())
    8

    An input factor is Bernoulli(1 - p) / (1 - p), so that its mean is 1. If `p` is None, it is the rate at which its
    standard deviation is the noise of a layer, which `convert` derives from `noise` and the number of layers.
    """

    title = "MC dropout"
    adds = "random masks on its inputs"
    roles = ("linear", "conv", "recurrent", "attention")
    draws_per = "row"
    skips_input = True

    def refusal(self, site: Site) -> str | None:
        if site.in_size is None:
            return f"{site.kind} has no input factor to drop; put MCDropout on the Linear or Conv before it"
        return super().refusal(site)

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        assert site.in_size is not None
        return Perturbation(draws.size, in_scale=self.masks((site.in_size,), draws).float() / (1 - self.rate))
