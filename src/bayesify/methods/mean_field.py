"""The mean-field Gaussian of BayesAdapter (Deng et al., 2020), with four estimators of its likelihood term."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.methods.base import (
    NOISE,
    Draws,
    Gradients,
    Method,
    Per,
    Perturbation,
    Site,
    at_least_float32,
    parameter,
    refuse,
)

Estimator = Literal["exemplar", "shared", "flipout", "local"]

SMALLEST_WEIGHT = 1e-3
"""The least size of a weight that noise is relative to: a weight of zeros has noise, too."""


@dataclass(frozen=True)
class MeanField(Method):
    """w = μ + exp(ψ) ε for weights and biases; μ is the base tensor, the prior Normal(0, prior_std²).

    >>> import bayesify as by
    >>> model = by.convert(torch.nn.Linear(3, 2), by.MeanField())
    >>> {name: tuple(p.shape) for name, p in model.posterior.named_parameters()}
    {'weight_log_std': (2, 3), 'bias_log_std': (2,)}

    `estimator` says how training rows share noise: "exemplar" draws weights for each row (eq. 8), "shared" one for the
    batch (eq. 7), "flipout" one times random signs per row, "local" draws the pre-activations. λ = 1/(prior_std² N).
    "exemplar" keeps the weights of all rows in memory; with `rows_at_once`, Linear and Conv layers keep those of that
    many rows of one layer at a time, and draw them again for the gradient.

    Standard deviations start at `relative_std` times the root mean square of the layer's weight; if that is None, it
    is the noise of a layer, which `convert` derives from `noise` and the number of layers. With `init_log_std`, ψ
    starts uniformly between these two numbers instead (in the paper -6 and -5, which moves little in a few epochs).
    """

    _: KW_ONLY
    noise: float = NOISE
    prior_std: float = math.sqrt(0.1)
    estimator: Estimator = "flipout"
    relative_std: float | None = None
    init_log_std: tuple[float, float] | None = None
    rows_at_once: int | None = None

    title = "mean-field Gaussian"
    adds = "a standard deviation for every weight"
    roles = ("linear", "conv", "recurrent", "attention", "norm")
    factorised = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows_at_once is not None and self.estimator != "exemplar":
            given = f"MeanField(rows_at_once={self.rows_at_once}, estimator={self.estimator!r})"
            raise BayesifyError(
                f"{given}: only estimator='exemplar' draws weights for each row; give that, or leave out rows_at_once"
            )
        if self.init_log_std is None:
            return
        pair = tuple(self.init_log_std) if isinstance(self.init_log_std, (tuple, list)) else ()
        object.__setattr__(self, "init_log_std", pair or self.init_log_std)
        if len(pair) != 2 or not all(isinstance(end, (int, float)) for end in pair) or not pair[0] <= pair[1]:
            refuse(self, "init_log_std", "(low, high), low <= high")

    @property
    def draws_per(self) -> Per:  # type: ignore[override]
        return "batch" if self.estimator == "shared" else "row"

    def refusal(self, site: Site) -> str | None:
        if self.estimator == "local" and site.recurs:
            problem = "uses one draw of its weights at every step, unlike estimator='local', which draws outputs"
            return f"{site.kind} {problem}; use 'exemplar', 'flipout' or 'shared' there"
        return super().refusal(site)

    def options_for(self, noise: float) -> dict[str, float]:
        return {"relative_std": noise}

    def init(self, site: Site) -> dict[str, Tensor]:
        if self.init_log_std is not None:
            low, high = self.init_log_std
            drawn = {name: low + (high - low) * torch.rand(tensor.shape) for name, tensor in site.base.items()}
        else:
            assert self.relative_std is not None
            size = at_least_float32(site.base["weight"].detach()).square().mean().sqrt().clamp_min(SMALLEST_WEIGHT)
            start = (self.relative_std * size).log()
            drawn = {name: start.expand(tensor.shape).clone() for name, tensor in site.base.items()}
        return {f"{name}_log_std": parameter(log_std) for name, log_std in drawn.items()}

    def draw(self, site: Site, draws: Draws) -> Perturbation:
        """w = μ + exp(ψ) ε for each draw, unless a training step asks for another estimator."""
        if draws.size > 1 and not draws.reproducible and site.in_size is not None:
            if self.estimator == "flipout":
                return self._flipout(site, draws)
            if self.estimator == "local":
                return self._local(site, draws)
        drawn = {name: mean + self._noise(site, name, draws) for name, mean in site.base.items()}
        return Perturbation(draws.size, **drawn)  # type: ignore[arg-type]

    def kl(self, site: Site) -> Tensor:
        """Σ log(σ₀/σ) + (σ² + μ²)/(2σ₀²) - ½ over all elements."""
        total = torch.zeros((), device=site.device)
        for name, base in site.base.items():
            mean, log_std = at_least_float32(base), site.posterior[f"{name}_log_std"]
            squares = ((2 * log_std).exp() + mean.square()) / (2 * self.prior_std**2)
            total = total + (math.log(self.prior_std) - log_std + squares - 0.5).sum()
        return total

    def kl_grad(self, sites: list[Site]) -> Gradients:
        """∇μ = μ/σ₀², ∇ψ = exp(2ψ)/σ₀² - 1 (eq. 5)."""
        variance = self.prior_std**2
        means = [tensor for site in sites for tensor in site.base.values()]
        log_stds = [tensor for site in sites for tensor in site.posterior.values()]
        with torch.no_grad():
            directions = [t.detach() for t in means] + [(2 * t).exp_().sub_(variance) for t in log_stds]
        return [(t, direction, 1 / variance) for t, direction in zip(means + log_stds, directions, strict=True)]

    def _noise(self, site: Site, name: str, draws: Draws) -> Tensor:
        """exp(ψ) ε."""
        return site.posterior[f"{name}_log_std"].exp() * draws.normal(tuple(site.base[name].shape))

    def _flipout(self, site: Site, draws: Draws) -> Perturbation:
        """W + (a bᵀ) ∘ ΔW with random signs a, b per row: the mean is counted once.

        Samples of a row whose noise cancels share b: if both signs were turned, the product would not be.
        """
        assert site.in_size is not None and site.out_size is not None
        one = Draws(draws.position[:1])
        of_rows = Draws(draws.position[:: draws.samples])
        in_sign = _signs(of_rows, site.in_size).repeat_interleave(draws.samples, 0)
        out_sign = _signs(draws, site.out_size)
        bias = None if site.bias is None else self._noise(site, "bias", one) * out_sign
        noise = Perturbation(draws.size, in_sign, out_sign, weight=self._noise(site, "weight", one), bias=bias)
        return Perturbation(draws.size, plus=noise)

    def _local(self, site: Site, draws: Draws) -> Perturbation:
        variances = {name: (2 * site.posterior[f"{name}_log_std"]).exp().unsqueeze(0) for name in site.base}
        return Perturbation(draws.size, variance=Perturbation(draws.size, **variances), samples=draws.samples)  # type: ignore[arg-type]


def _signs(draws: Draws, size: int) -> Tensor:
    return 2 * (draws.uniform((size,)) >= 0.5).float() - 1
