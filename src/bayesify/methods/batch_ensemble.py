"""BatchEnsemble (Wen et al., 2020): K points of the rank-1 factors."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from bayesify.methods._copies import bias_copies, stacked
from bayesify.methods.base import NOISE, Method, Perturbation, Site, parameter
from bayesify.methods.distributions import near_one


@dataclass(frozen=True)
class BatchEnsemble(Method):
    """W_k = W ∘ (r_k s_kᵀ) for K members; no prior, no noise.

    >>> import torch, bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.BatchEnsemble(4, bias="component"))
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'in_loc': (4, 3), 'out_loc': (4, 2), 'bias': (3, 2)}

    Factors start at Normal(1, mean_std²), or with `signs` at ±1 with that probability of +1 (from scratch only). If
    `mean_std` is None, it is the noise of a layer, which `convert` derives from `noise` and the number of layers.
    """

    components: int = 4
    _: KW_ONLY
    noise: float = NOISE
    mean_std: float | None = None
    signs: float | None = None
    bias: Literal["shared", "component"] = "shared"

    title = "BatchEnsemble"
    adds = "K input and output scales"
    roles = ("linear", "conv", "recurrent", "attention")
    draws_per = "component"
    covers_base = False
    noisy = False
    needs_factors = True

    def options_for(self, noise: float) -> dict[str, float]:
        return {"mean_std": noise}

    def init(self, site: Site) -> dict[str, Tensor]:
        assert site.in_size is not None and site.out_size is not None and self.mean_std is not None
        sizes = {"in_loc": site.in_size, "out_loc": site.out_size}
        factors = {name: near_one(self.components, size, self.mean_std, self.signs) for name, size in sizes.items()}
        points = {name: parameter(factor) for name, factor in factors.items()}
        return points | bias_copies(site, self.components, self.bias)

    def mean(self, site: Site) -> Perturbation:
        bias = stacked(site, "bias") if "bias" in site.posterior else None
        return Perturbation(self.components, site.posterior["in_loc"], site.posterior["out_loc"], bias=bias)

    def l2_terms(self, site: Site) -> list[tuple[Tensor, float]]:
        return []
