"""The parameter-sharing ensemble of BayesAdapter (Deng et al., 2020), of any rank."""

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from bayesify.methods.base import NOISE, Draws, Gradients, Method, Perturbation, Site, at_least_float32, parameter


@dataclass(frozen=True)
class LowRankEnsemble(Method):
    """w_c = W ∘ (l_c r_c) for C candidates: the kernel as a matrix times a low-rank one (section 2.2, PSE).

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Conv2d(3, 8, 3), by.LowRankEnsemble(20, rank=2))
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'left': (20, 8, 2), 'right': (20, 2, 27)}

    Entries of l and r start so that an entry of the product has mean 1 and standard deviation `std` (in the paper 0.2,
    and 0.1 for ImageNet); if that is None, it is the noise of a layer, which `convert` derives from `noise` and the
    number of layers.
    """

    components: int = 20
    _: KW_ONLY
    rank: int = 1
    noise: float = NOISE
    std: float | None = None
    prior_std: float = math.sqrt(0.1)

    title = "parameter-sharing ensemble"
    adds = "C low-rank factors of the weight"
    roles = ("linear", "conv", "recurrent", "attention")
    draws_per = "component"
    noisy = False
    needs_factors = True

    def refusal(self, site: Site) -> str | None:
        if "weight" in site.base and site.base["weight"].numel() == 0:
            return f"{site.kind} has a weight of shape {tuple(site.base['weight'].shape)}: nothing to perturb"
        return super().refusal(site)

    def options_for(self, noise: float) -> dict[str, float]:
        return {"std": noise}

    def init(self, site: Site) -> dict[str, Tensor]:
        assert self.std is not None
        rows = site.base["weight"].shape[0]
        columns = site.base["weight"].numel() // rows
        mean = math.sqrt(1 / self.rank)
        std = math.sqrt((math.sqrt(1 + self.rank * self.std**2) - 1) / self.rank)
        left = mean + std * torch.randn(self.components, rows, self.rank)
        right = mean + std * torch.randn(self.components, self.rank, columns)
        return {"left": parameter(left), "right": parameter(right)}

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        component = draws.component(self.components)
        left, right = (site.posterior[name].index_select(0, component) for name in ("left", "right"))
        return self._perturbation(site, left, right)

    def mean(self, site: Site) -> Perturbation:
        return self._perturbation(site, site.posterior["left"], site.posterior["right"])

    def kl(self, site: Site) -> Tensor:
        """mean_c ‖W ∘ (l_c r_c)‖² / (2σ₀²), plus the bias's L2."""
        total = (_mean_square(site.posterior["left"], site.posterior["right"]) * _matrix(site).square()).sum()
        total = total if site.bias is None else total + at_least_float32(site.bias).square().sum()
        return total / (2 * self.prior_std**2)

    def kl_grad(self, sites: list[Site]) -> Gradients:
        """Equation 6, for W, l and r; plain decay for the bias. For a rank above 1 by autograd."""
        if self.rank > 1:
            return super().kl_grad(sites)
        with torch.no_grad():
            return [(t, grad.to(t.dtype), 1 / self.prior_std**2) for site in sites for t, grad in self._grads(site)]

    def _grads(self, site: Site) -> list[tuple[Tensor, Tensor]]:
        matrix = _matrix(site)
        left, right = (site.posterior[name].to(matrix.dtype) for name in ("left", "right"))
        squares = matrix.square() / self.components
        return [
            (site.base["weight"], (_mean_square(left, right) * matrix).reshape(site.base["weight"].shape)),
            (site.posterior["left"], left * (right.squeeze(1).square() @ squares.mT).unsqueeze(2)),
            (site.posterior["right"], right * (left.squeeze(2).square() @ squares).unsqueeze(1)),
            *([] if site.bias is None else [(site.bias, site.bias)]),
        ]

    def _perturbation(self, site: Site, left: Tensor, right: Tensor) -> Perturbation:
        if self.rank == 1 and site.is_matrix:
            return Perturbation(left.shape[0], in_scale=right.squeeze(1), out_scale=left.squeeze(2))
        if self.rank == 1 and site.outputs_first:
            return Perturbation(left.shape[0], kernel_scale=right.squeeze(1), out_scale=left.squeeze(2))
        weight = (left @ right) * _matrix(site)
        return Perturbation(left.shape[0], weight=weight.reshape(-1, *site.base["weight"].shape))


def _mean_square(left: Tensor, right: Tensor) -> Tensor:
    """The mean over candidates of (l r)², (n, m); for rank 1 without a candidate's full matrix."""
    if left.shape[2] == 1:
        return left.squeeze(2).square().mT @ right.squeeze(1).square() / left.shape[0]
    return (left @ right).square().mean(0)


def _matrix(site: Site) -> Tensor:
    return at_least_float32(site.base["weight"]).flatten(1)
