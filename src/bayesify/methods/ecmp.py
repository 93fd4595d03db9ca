"""Ensemble crossed model patching (Chang et al., 2019): K copies of a few layers, mixed element by element."""

from dataclasses import dataclass

from torch import Tensor

from bayesify.methods._copies import stacked
from bayesify.methods.base import Draws, Perturbation, Site
from bayesify.methods.emp import EMP


@dataclass(frozen=True)
class ECMP(EMP):
    """As EMP, with one z per element: the K copies are crossed within a layer (eq. 5).

    >>> import torch, bayesify as by
    >>> model = by.convert(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), by.ECMP(5))
    >>> by.kl(model).ndim
    0
    """

    title = "crossed model patching"
    adds = "the same copies, mixed element by element"
    factorised = True

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        return Perturbation(draws.size, **{name: self._crossed(site, name, draws) for name in site.base})  # type: ignore[arg-type]

    def _crossed(self, site: Site, name: str, draws: Draws) -> Tensor:
        """Each element taken from the copy that was chosen for it: (G, …)."""
        stack = stacked(site, name)
        z = self.choose(site, draws.uniform(tuple(stack.shape[1:]), self.noise_period))
        if not self.learn_mixing:
            return stack.gather(0, z)
        hot = self.straight_through(site, z).movedim(-1, 0)  # (K, G, …)
        return (hot * stack.unsqueeze(1)).sum(0)
