"""Laplace's approximation around a trained network, its curvature by laplace-torch (Daxberger et al. 2021)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.family import Family
from bayesify.lab.baselines.errors import BaselineError
from bayesify.lab.baselines.prepared import Prepared, outputs_and_targets
from bayesify.lab.data.errors import need
from bayesify.lab.recipes.methods import LaplacePart
from bayesify.layers import bayesian_layers
from bayesify.likelihood import Likelihood

PRECISIONS = tuple(10.0**power for power in range(-2, 7))
"""The prior precisions that validation rows choose from."""
MOST_NUMBERS = 2**21
"""So many numbers of Jacobians are computed at once; with more the same work measured several times as long."""


def laplace(
    part: LaplacePart,
    network: nn.Module,
    likelihood: Likelihood,
    train: Prepared,
    validation: Prepared | None = None,
    *,
    seed: int = 0,
) -> tuple[nn.Module, float]:
    """A Bayesian copy of a trained network, with the posterior Normal(w, (H + δ)⁻¹), and the prior precision δ.

    H is the sum of the training rows' Fisher information, in the structure that the part says. A diagonal posterior is
    a `MeanField` of the standard deviations (H + δ)^-½; draws from one with Kronecker factors are an `Ensemble` of last
    layers. Of the last layer, draws are exactly those of the linearised network.
    """
    with _quiet():
        fitted = _fitted(part, network, likelihood, train)
        precision = _prior_precision(part, fitted, network, likelihood, validation, seed)
        return _posterior(part, fitted, network, precision, seed), precision


def package() -> Any:
    """laplace-torch, or how to get it."""
    with _quiet():
        return need("laplace", "Laplace's approximation", extra="laplace")


def learn_noise(likelihood: Likelihood, network: nn.Module, train: Prepared) -> None:
    """The precision of a Gaussian's noise that makes training rows most likely, where training has not learnt it."""
    if isinstance(likelihood, by.Gaussian) and isinstance(likelihood.log_precision, nn.Parameter):
        outputs, targets = outputs_and_targets(network, train)
        with torch.no_grad():
            likelihood.log_precision.copy_(-(targets - outputs).double().square().mean().log())


def _fitted(part: LaplacePart, network: nn.Module, likelihood: Likelihood, train: Prepared) -> Any:
    """laplace-torch's approximation, with the curvature of all training rows."""
    weights, structure = ("all" if part.posterior == "all_diagonal" else "last_layer"), _structure(part)
    plain = _trainable(network) if weights == "all" else copy.deepcopy(network).requires_grad_(True)
    noise: dict[str, float] = {}
    if isinstance(likelihood, by.Gaussian):
        noise["sigma_noise"] = float((-0.5 * likelihood.log_precision.detach()).exp())
    backend = getattr(need("laplace.curvature", "its curvature", extra="laplace"), _BACKENDS[part.fisher])
    task = "regression" if noise else "classification"
    try:
        found = package().Laplace(plain.eval(), task, weights, structure, backend=backend, **noise)
        found.fit(train.of(_rows(part, plain, train)))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise BaselineError(
            f"laplace-torch can't take the curvature of this network with posterior={part.posterior!r}: {error}"
        ) from error
    return found


_BACKENDS = {"exact": "CurvlinopsGGN", "empirical": "CurvlinopsEF"}
"""laplace-torch's names; for these likelihoods the generalised Gauss-Newton matrix is the Fisher information."""


def _structure(part: LaplacePart) -> str:
    return "kron" if part.posterior == "last_kron" else "diag"


def _trainable(network: nn.Module) -> nn.Module:
    """A copy that trains what a `MeanField` can hold; the rest stays at its mean."""
    held = bayesian_layers(by.convert(copy.deepcopy(network), by.MeanField()))
    plain = copy.deepcopy(network)
    for name, p in plain.named_parameters():
        p.requires_grad_(name.rpartition(".")[0] in held)
    return plain


def _rows(part: LaplacePart, network: nn.Module, train: Prepared) -> int:
    """A batch with few enough numbers: one for each row and parameter, and for the exact Fisher for each output."""
    if part.posterior != "all_diagonal":
        return train.batch_size
    with torch.no_grad():
        outputs = int(network(next(iter(train.of(1)))[0]).shape[-1])
    numbers = sum(p.numel() for p in network.parameters() if p.requires_grad)
    numbers *= outputs if part.fisher == "exact" else 1
    return max(min(MOST_NUMBERS // numbers, train.batch_size), 1)


def _prior_precision(
    part: LaplacePart,
    fitted: Any,
    network: nn.Module,
    likelihood: Likelihood,
    validation: Prepared | None,
    seed: int,
) -> float:
    if part.prior_precision == "marginal":
        fitted.optimize_prior_precision(pred_type="nn", method="marglik", prior_structure="scalar")
        return float(fitted.prior_precision)
    if part.prior_precision != "validation":
        return float(part.prior_precision)
    if validation is None:
        raise BaselineError(
            "laplace chooses its prior precision on validation rows, and there are none; set data.validation, or "
            "method.prior_precision to a number or 'marginal'"
        )
    losses = {
        precision: _loss(_posterior(part, fitted, network, precision, seed), likelihood, validation, part.draws, seed)
        for precision in PRECISIONS
    }
    return min(losses, key=lambda precision: losses[precision])


def _loss(model: nn.Module, likelihood: Likelihood, batches: Prepared, draws: int, seed: int) -> float:
    """The negative log predictive density per row; the same noise for every precision."""
    p = by.predict(model, (x for x, _ in batches), draws, seed=seed, likelihood=likelihood)
    y = torch.cat([y for _, y in batches])
    each = p.log_prob(y) if isinstance(likelihood, by.Gaussian) else p.log_probs.gather(1, y.unsqueeze(1))
    loss = float(-each.double().mean())
    return loss if math.isfinite(loss) else math.inf


def _posterior(part: LaplacePart, fitted: Any, network: nn.Module, precision: float, seed: int) -> nn.Module:
    """A Bayesian copy of the network for one prior precision."""
    fitted.prior_precision = precision
    model = copy.deepcopy(network)
    names = _names(part, fitted)
    layers = {name.rpartition(".")[0] for name in names}
    if part.posterior == "last_kron":
        family: Family = by.Ensemble(part.draws, jitter=0.0)
        values = fitted.sample(part.draws, torch.Generator(fitted.mean.device).manual_seed(seed))
    else:
        family = by.MeanField(prior_std=precision**-0.5, estimator="shared")
        values = -0.5 * fitted.posterior_precision.log().unsqueeze(0)
    by.convert(model, {lambda name, _: name in layers: family})
    _fill(model, names, values.detach())
    return model.eval()


def _names(part: LaplacePart, fitted: Any) -> dict[str, torch.Size]:
    """The parameters that the posterior is over, in laplace-torch's order."""
    if part.posterior == "all_diagonal":
        return {name: p.shape for name, p in fitted.model.named_parameters() if p.requires_grad}
    extractor = fitted.model
    last = next(name for name, module in extractor.model.named_modules() if module is extractor.last_layer)
    return {f"{last}.{name}" if last else name: p.shape for name, p in extractor.last_layer.named_parameters()}


@torch.no_grad()
def _fill(model: nn.Module, names: dict[str, torch.Size], values: Tensor) -> None:
    """Write values (rows, parameters) into a posterior: copies of weights, or one row of log standard deviations."""
    layers = bayesian_layers(model)
    for (name, shape), columns in zip(names.items(), values.split([s.numel() for s in names.values()], 1), strict=True):
        path, _, tensor = name.rpartition(".")
        layer, parts = layers[path], columns.reshape(-1, *shape)
        if isinstance(layer.family, by.MeanField):
            layer.posterior.tensors()[f"{tensor}_log_std"].copy_(parts[0])
        else:
            getattr(layer, tensor).copy_(parts[0])
            layer.posterior.tensors()[tensor].copy_(parts[1:])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without laplace-torch's advice on options that are set here, and what it imports that torch deprecates."""
    with warnings.catch_warnings():
        for advice in (".*`link_approx`", r".*torch\.jit\.script"):
            warnings.filterwarnings("ignore", advice)
        yield
