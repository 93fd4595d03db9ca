"""Ensemble model patching (Chang et al., 2019): EMP and ECMP."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import BayesifyError
from ..family import Draws, Elementwise, Family, Gradients, Grain, Perturbation, Role, Site, parameter
from ..noise import is_eager
from .common import chosen, copies, scaled, stacked, with_copies
from .options import check_flag, check_number, check_option

FEW = 8
"""To go through so few copies is faster than to gather entries from a stack of them."""


@dataclass(frozen=True)
class EMP(Family):
    """One z per layer and draw chooses the whole layer's tensors among K copies (eq. 4).

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.BatchNorm1d(6), by.EMP(5))
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'weight': (4, 6), 'bias': (4, 6)}

    Patched by default: all norm layers and the output layer; `patches` may name "norm", "output" and "input". Copies
    start from the base tensor with a `jitter`, or with `init_copies="random"` from the layer's own reset, as in the
    paper, which trains from scratch. `reach` is how far a training draw goes: the batch (the paper) or a row.
    `learn_mixing` learns the K probabilities by a straight-through estimate. `divergence="average"` is eq. 6,
    Σ_k (τ p_k / 2)‖M_k‖² with τ = 1/prior_std²; "sum" leaves p_k out: the plain L2 on every copy of appendix C.1.
    """

    components: int = 5
    _: KW_ONLY
    patches: tuple[Role, ...] = ("norm", "output")
    init_copies: Literal["jitter", "random"] = "jitter"
    jitter: float = 0.05
    reach: Literal["batch", "row"] = "batch"
    learn_mixing: bool = False
    prior_std: float = 1.0
    divergence: Literal["average", "sum"] = "average"

    tied = False

    def __post_init__(self) -> None:
        check_number(self, "components", 1, whole=True)
        check_number(self, "jitter", 0)
        check_number(self, "prior_std", 0, open_low=True)
        check_option(self, "init_copies", ("jitter", "random"))
        check_option(self, "reach", ("batch", "row"))
        check_option(self, "divergence", ("average", "sum"))
        check_flag(self, "learn_mixing")
        object.__setattr__(self, "patches", (self.patches,) if isinstance(self.patches, str) else tuple(self.patches))
        if not self.patches or not set(self.patches) <= {"norm", "output", "input"}:
            raise BayesifyError(
                f"{type(self).__name__}(patches={self.patches!r}): expected some of 'norm', 'output', 'input'"
            )

    @property
    def grain(self) -> Grain:  # type: ignore[override]
        return self.reach

    @property
    def roles(self) -> tuple[Role, ...]:  # type: ignore[override]
        return self.patches

    def init(self, site: Site) -> dict[str, Tensor]:
        tensors = copies(site, self.components, self.init_copies, self.jitter)
        if self.learn_mixing:
            tensors["logits"] = parameter(torch.zeros(self.components))
        return tensors

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        z = self._choose(site, draws.uniform(()))
        if draws.size == 1 and not self.learn_mixing:
            return Perturbation(1, **{name: chosen(site, name, z) for name in site.base})  # type: ignore[arg-type]
        parts = {name: stacked(site, name) for name in site.base}
        if not self.learn_mixing:
            return Perturbation(self.components, **parts, choice=z)  # type: ignore[arg-type]
        return Perturbation(draws.size, **{name: self._mixed(site, stack, z) for name, stack in parts.items()})  # type: ignore[arg-type]

    def mean(self, site: Site) -> Perturbation:
        return Perturbation(self.components, **{name: stacked(site, name) for name in site.base})  # type: ignore[arg-type]

    def weights(self, site: Site) -> Tensor | None:
        return self._probabilities(site) if self.learn_mixing else None

    def kl(self, site: Site) -> Tensor:
        norms = torch.stack([sum_of_squares(stacked(site, name)) for name in site.base]).sum(0)  # (K,)
        if self.divergence == "sum":
            return norms.sum() / (2 * self.prior_std**2)
        p = self._probabilities(site)
        total = (p * norms).sum() / (2 * self.prior_std**2)
        return total + self._choices(site) * self._information(p) if self.learn_mixing else total

    def kl_grad(self, sites: list[Site]) -> Gradients:
        """τ p_k M_k for every copy; with learned probabilities by autograd."""
        if self.learn_mixing:
            return super().kl_grad(sites)
        weight = 1 if self.divergence == "sum" else 1 / self.components
        tensors = [t for site in sites for t in (*site.base.values(), *site.posterior.values())]
        return scaled(tensors, weight / self.prior_std**2)

    def _probabilities(self, site: Site) -> Tensor:
        if self.learn_mixing:
            return site.posterior["logits"].softmax(0)
        return torch.full((self.components,), 1 / self.components, device=site.base["weight"].device)

    @staticmethod
    def _information(p: Tensor) -> Tensor:
        """KL of the mixing probabilities from uniform ones, which eq. 6 counts as constant."""
        return torch.xlogy(p, p).sum() + math.log(p.shape[0])

    def _choices(self, site: Site) -> int:
        """How many independent z a draw of the layer has."""
        return 1

    def _choose(self, site: Site, uniform: Tensor) -> Tensor:
        """z from uniform noise: by equal or by learned probabilities."""
        if not self.learn_mixing:
            return (uniform * self.components).long()
        edges = self._probabilities(site).detach().cumsum(0)[:-1]
        return torch.bucketize(uniform, edges, right=True)

    def _mixed(self, site: Site, stack: Tensor, z: Tensor) -> Tensor:
        hot = self._straight_through(site, z).to(stack.dtype)
        return (hot @ stack.flatten(1)).reshape(-1, *stack.shape[1:])

    def _straight_through(self, site: Site, z: Tensor) -> Tensor:
        """One-hot choices (…, K) whose gradient is that of the probabilities."""
        p = self._probabilities(site)
        return F.one_hot(z, self.components).to(p.dtype) + (p - p.detach())


@dataclass(frozen=True)
class ECMP(EMP):
    """As EMP, with one z per element: the K copies are crossed within a layer (eq. 5).

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), by.ECMP(5))
    >>> by.kl(model).ndim
    0
    """

    @property
    def elements(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.learn_mixing else ("weight", "bias")

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        parts = {
            name: Elementwise(self._cross(site), (base, site.posterior[name]), draws, "coarse")
            for name, base in site.base.items()
        }
        bias = parts.pop("bias", None)
        return Perturbation(
            draws.size,
            **parts,  # type: ignore[arg-type]
            bias=None if bias is None else bias.all(tuple(site.base["bias"].shape)),
        )

    def _choices(self, site: Site) -> int:
        return sum(tensor.numel() for tensor in site.base.values())

    def _cross(self, site: Site):  # type: ignore[no-untyped-def]
        def cross(base: Tensor, others: Tensor, uniform: Tensor) -> Tensor:
            apart = base.dim() == uniform.dim()  # the copies were already taken apart by draw
            direct = not self.learn_mixing and not torch.is_grad_enabled() and is_eager()
            if direct and base.dtype == uniform.dtype and 1 < self.components <= FEW:
                return _chosen_in_passes((base, *others.unbind()), uniform)
            z, stack = self._choose(site, uniform), with_copies(base, others)
            if self.learn_mixing:
                hot = self._straight_through(site, z).movedim(-1, 0)
                return (hot * (stack if apart else stack.unsqueeze(1))).sum(0)
            return _entries(stack, z, apart)

        return cross


def _chosen_in_passes(copies: tuple[Tensor, ...], uniform: Tensor) -> Tensor:
    """The entry of the copy that each noise says, copy after copy taking the place of those before it."""
    first, second, *others = copies
    above = torch.ge(uniform, 1 / len(copies), out=torch.empty_like(uniform))
    chosen = torch.lerp(first, second, above)  # a share of exactly 0 or 1 gives one of the two to the last bit
    for k, other in enumerate(others, 2):
        chosen.lerp_(other, torch.ge(uniform, k / len(copies), out=above))
    return chosen


def _entries(stack: Tensor, z: Tensor, apart: bool) -> Tensor:
    """The entry of a stack (K, …), or of one for each draw (K, G, …), that each of z (G, …) says."""
    return stack.gather(0, z.unsqueeze(0)).squeeze(0) if apart else stack.gather(0, z)


def sum_of_squares(stack: Tensor) -> Tensor:
    """‖M_k‖² for each of K stacked tensors."""
    return stack.flatten(1).square().sum(1)
