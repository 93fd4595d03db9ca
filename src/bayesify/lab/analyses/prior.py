"""Functions drawn from the prior of a method (EMP, figure 3 and appendix D.1)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.analyses.analysis import AnalysisError, Chart
from bayesify.lab.analyses.style import colour
from bayesify.layers import BayesianLayer, bayesian_layers
from bayesify.methods.base import Method
from bayesify.methods.distributions import prior, rho_of

WEIGHT_STD, BIAS_STD = math.sqrt(5), math.sqrt(20)
"""The paper's prior: weights Normal(0, 5), biases Normal(0, 20), by variance."""


@dataclass(frozen=True)
class PriorFunctions(Chart):
    """Functions from the prior over x: values (functions, len(x))."""

    x: np.ndarray
    values: np.ndarray

    @property
    def axis_names(self) -> tuple[str, str]:
        return ("x", "f(x)")

    def columns(self) -> dict[str, np.ndarray]:
        return {"x": self.x} | {f"function_{i}": values for i, values in enumerate(self.values)}

    def draw(self, axes: Axes) -> None:
        for i, values in enumerate(self.values):
            axes.plot(self.x, values, color=colour(i), lw=1.4)


class Sign(nn.Module):
    """The activation of the paper's example: -1, 0 or 1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sign(x)


def sign_network(hidden: int = 100) -> nn.Module:
    """y = B + Σ_h W_h sign(b_h + w_h x), the network of appendix D.1.

    Args:
        hidden: The number of hidden units.

    Returns:
        The network.
    """
    return nn.Sequential(nn.Linear(1, hidden), Sign(), nn.Linear(hidden, 1))


def prior_functions(
    network: nn.Module,
    methods: Method | Mapping[Any, Method | None],
    x: Tensor,
    *,
    functions: int = 3,
    weight_std: float = WEIGHT_STD,
    bias_std: float = BIAS_STD,
    seed: int = 0,
) -> PriorFunctions:
    """Draw functions from a network whose weights, and a method's copies of them, have a normal prior.

    For each function every weight and bias, and each of a method's K copies, is drawn from Normal(0, std²); then the
    method draws: EMP one copy for each layer, ECMP one for each element, DropConnect(0.5) zeros with probability 0.5,
    which is the paper's "dropout" (here the rest is doubled). Factors (Rank1, IBNN) come from their own prior; those
    without one (BatchEnsemble, LowRankEnsemble) have their initial values. The network is not changed.

    Args:
        network: A plain network with one input and one output, such as `sign_network()`.
        methods: A method for every layer that it supports, or methods by layer as in `by.convert`.
        x: The inputs (N, 1).
        functions: How many functions to draw.
        weight_std: The prior standard deviation of weights.
        bias_std: The prior standard deviation of biases.
        seed: The seed of the draws.

    Returns:
        The functions' values over x.

    Raises:
        AnalysisError: If x is not of shape (N, 1), or `functions` is not positive.

    >>> found = prior_functions(sign_network(), by.EMP(5), torch.linspace(-5, 5, 50)[:, None])
    >>> found.values.shape
    (3, 50)
    """
    if isinstance(functions, bool) or not isinstance(functions, int) or functions < 1:
        raise AnalysisError(f"functions={functions!r}: expected an integer >= 1")
    if x.dim() != 2 or x.shape[1] != 1:
        raise AnalysisError(f"x has shape {tuple(x.shape)}: expected (N, 1)")
    chosen = {"*": methods} if isinstance(methods, Method) else methods
    chosen = {key: _as_prior(method) for key, method in chosen.items()}
    values = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for index in range(functions):
            model = by.convert(copy.deepcopy(network), chosen)
            _set_to_prior(model, weight_std, bias_std)
            with torch.no_grad():
                values.append(by.draw(model, seed, index=index, design="independent")(x).flatten())
    return PriorFunctions(x.cpu().flatten().numpy(), torch.stack(values).cpu().numpy())


def _as_prior(method: Method | None) -> Method | None:
    """The method with a posterior of the same distribution as its prior."""
    kind = getattr(method, "prior", None)
    return method if kind is None else replace(method, posterior=kind, prior=None)  # type: ignore[type-var]


@torch.no_grad()
def _set_to_prior(model: nn.Module, weight_std: float, bias_std: float) -> None:
    for name, parameter in model.named_parameters():
        if ".posterior." not in f".{name}":
            parameter.normal_(0, bias_std if name.endswith("bias") else weight_std)
    for layer in bayesian_layers(model).values():
        _set_posterior(layer, weight_std, bias_std)


def _set_posterior(layer: BayesianLayer, weight_std: float, bias_std: float) -> None:
    """Draw copies of weights like the base tensors, and set distributions to their priors."""
    tensors = layer.posterior.tensors()
    for name, tensor in tensors.items():
        if name in ("weight", "bias"):
            tensor.normal_(0, bias_std if name == "bias" else weight_std)
        elif name.endswith("_log_std"):
            tensor.fill_(-math.inf)  # the base tensor is drawn from the prior; no noise is added
        elif name.endswith("_rho"):
            method: Any = layer.method
            kind: Any = getattr(method, "posterior", "normal")
            factor: Any = prior(kind, getattr(method, "prior_mean", 1.0), method.prior_std, tensor)
            tensors[f"{name.removesuffix('_rho')}_loc"].copy_(factor.loc.expand_as(tensor))
            tensor.copy_(rho_of(factor.scale).expand_as(tensor))
