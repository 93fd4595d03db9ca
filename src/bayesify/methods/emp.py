"""Ensemble model patching (Chang et al., 2019): K copies of a few layers, one of which is chosen for each layer."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.methods._copies import initial_copies, stacked
from bayesify.methods.base import NOISE, Draws, Method, Per, Perturbation, Role, Site, parameter, refuse


@dataclass(frozen=True)
class EMP(Method):
    """One z per layer and draw chooses the whole layer's tensors among K copies (eq. 4).

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.BatchNorm1d(6), by.EMP(5))
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'weight': (4, 6), 'bias': (4, 6)}

    Patched by default: all norm layers and the output layer; `patches` may name "norm", "output" and "input". Copies
    start from the base tensor with a `jitter` (if that is None, the noise of a layer, which `convert` derives from
    `noise` and the number of patched layers), or with `init_copies="random"` from the layer's own reset, as in the
    paper, which trains from scratch. `reach` is how far a training draw goes: the batch (the paper) or a row.
    `learn_mixing` learns the K probabilities by a straight-through estimate. `divergence="average"` is eq. 6,
    Σ_k (τ p_k / 2)‖M_k‖² with τ = 1/prior_std²; "sum" leaves p_k out: the plain L2 on every copy of appendix C.1.
    """

    components: int = 5
    _: KW_ONLY
    patches: tuple[Role, ...] = ("norm", "output")
    init_copies: Literal["jitter", "random"] = "jitter"
    noise: float = NOISE
    jitter: float | None = None
    reach: Literal["batch", "row"] = "batch"
    learn_mixing: bool = False
    prior_std: float = 1.0
    divergence: Literal["average", "sum"] = "average"

    title = "ensemble model patching"
    adds = "K copies, of norm layers and the output layer only"
    ties_components = False
    noise_kind = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "patches", (self.patches,) if isinstance(self.patches, str) else tuple(self.patches))
        if not self.patches or not set(self.patches) <= {"norm", "output", "input"}:
            refuse(self, "patches", "some of 'norm', 'output', 'input'")

    @property
    def draws_per(self) -> Per:  # type: ignore[override]
        return self.reach

    @property
    def roles(self) -> tuple[Role, ...]:  # type: ignore[override]
        return self.patches

    @property
    def noise_period(self) -> int:  # type: ignore[override]
        return self.components

    def options_for(self, noise: float) -> dict[str, float]:
        return {"jitter": noise}

    def init(self, site: Site) -> dict[str, Tensor]:
        assert self.jitter is not None
        tensors = initial_copies(site, self.components, self.init_copies, self.jitter)
        if self.learn_mixing:
            tensors["logits"] = parameter(torch.zeros(self.components))
        return tensors

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        z = self.choose(site, draws.uniform((), self.noise_period))
        if not self.learn_mixing:
            return self.mean(site).at(z)
        hot = self.straight_through(site, z)
        mixed = {name: torch.tensordot(hot.to(s.dtype), s, 1) for name in site.base for s in [stacked(site, name)]}
        return Perturbation(draws.size, **mixed)

    def mean(self, site: Site) -> Perturbation:
        return Perturbation(self.components, **{name: stacked(site, name) for name in site.base})  # type: ignore[arg-type]

    def weights(self, site: Site) -> Tensor | None:
        return self.probabilities(site) if self.learn_mixing else None

    def l2_terms(self, site: Site) -> list[tuple[Tensor, float]] | None:
        """τ p_k for every copy of a tensor, or τ; None if the probabilities are learned with them."""
        if self.learn_mixing and self.divergence == "average":
            return None
        factor = 1 / ((1 if self.divergence == "sum" else self.components) * self.prior_std**2)
        return [(copies[name], factor) for name in site.base for copies in (site.base, site.posterior)]

    def kl(self, site: Site) -> Tensor:
        if self.l2_terms(site) is not None:
            return super().kl(site)
        p = self.probabilities(site)
        norms = torch.stack([stacked(site, name).flatten(1).square().sum(1) for name in site.base]).sum(0)  # (K,)
        from_uniform = torch.xlogy(p, p).sum() + math.log(self.components)  # constant, and so left out, in eq. 6
        choices = sum(tensor.numel() for tensor in site.base.values()) if self.factorised else 1  # ECMP, or EMP
        return (p * norms).sum() / (2 * self.prior_std**2) + choices * from_uniform

    def probabilities(self, site: Site) -> Tensor:
        """The learned probabilities of the K copies."""
        return site.posterior["logits"].softmax(0)

    def choose(self, site: Site, uniform: Tensor) -> Tensor:
        """z, one of K, from uniform noise."""
        if not self.learn_mixing:
            return (uniform * self.components).long()
        edges = self.probabilities(site).detach().cumsum(0)[:-1]
        return torch.bucketize(uniform, edges, right=True)

    def straight_through(self, site: Site, z: Tensor) -> Tensor:
        """One-hot choices (…, K) whose gradient is that of the probabilities."""
        p = self.probabilities(site)
        return F.one_hot(z, self.components).to(p.dtype) + (p - p.detach())
