"""DropConnect (Wan et al., 2013) as a variational method."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from bayesify.methods._masks import Masks
from bayesify.methods.base import Draws, Per, Perturbation, Site


@dataclass(frozen=True)
class DropConnect(Masks):
    """Drops single weights, never biases; `reach` is how far a training mask goes, the batch or a row.

    >>> import torch, bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.DropConnect(0.5))
    >>> bool((by.draw(model, 0).weight == 0).any())
    True

    A weight is multiplied by Bernoulli(1 - p) / (1 - p). If `p` is None, it is the rate at which the standard deviation
    of that is the noise of a layer, which `convert` derives from `noise` and the number of layers.
    """

    _: KW_ONLY
    reach: Literal["batch", "row"] = "batch"

    title = "DropConnect"
    adds = "random masks on its weights"
    roles = ("linear", "conv", "recurrent", "attention")
    factorised = True

    @property
    def draws_per(self) -> Per:  # type: ignore[override]
        return self.reach

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        weight = site.base["weight"]
        return Perturbation(draws.size, weight=self.masks(tuple(weight.shape), draws) * (weight / (1 - self.rate)))
