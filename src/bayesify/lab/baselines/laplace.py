"""Laplace's approximation around a trained network, with the curvature from laplace-torch (Daxberger et al. 2021)."""

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
from bayesify.lab.baselines.errors import BaselineError
from bayesify.lab.baselines.prepared_batches import PreparedBatches, outputs_and_targets
from bayesify.lab.data.errors import import_optional
from bayesify.lab.recipes.methods import LaplacePart
from bayesify.layers import bayesian_layers
from bayesify.layers.base import BayesianLayer
from bayesify.methods.base import Method
from bayesify.prediction.likelihood import Likelihood

PRECISIONS = tuple(10.0**power for power in range(-2, 7))
"""The prior precisions that are tried on the validation rows."""
MOST_NUMBERS = 2**21
"""The most Jacobian entries to compute at once; more made the same work several times slower."""


def laplace(
    part: LaplacePart,
    network: nn.Module,
    likelihood: Likelihood,
    train: PreparedBatches,
    validation: PreparedBatches | None = None,
    *,
    seed: int = 0,
) -> tuple[nn.Module, float]:
    """A Bayesian copy of a trained network with the posterior Normal(w, (H + δ)⁻¹), and the prior precision δ.

    H is the Fisher information summed over the training rows, in the structure of `part.posterior`. A diagonal
    posterior becomes a `MeanField` with the standard deviations (H + δ)^-½; a Kronecker-factored one an `Ensemble` of
    drawn last layers. For the last layer, draws are exactly those of the linearised network.

    Args:
        part: The options.
        network: The trained network, which is not changed.
        likelihood: What its outputs mean.
        train: The training rows.
        validation: The validation rows, on which the prior precision is chosen.
        seed: The seed of draws.

    Returns:
        The Bayesian network, and the prior precision.

    Raises:
        BaselineError: If laplace-torch can't handle the network, or validation rows are missing.
    """
    with _quiet():
        fitted = _fit_curvature(part, network, likelihood, train)
        precision = _prior_precision(part, fitted, network, likelihood, validation, seed)
        return _posterior(part, fitted, network, precision, seed), precision


def package() -> Any:
    """Import laplace-torch, or raise an error with the command to install it."""
    with _quiet():
        return import_optional("laplace", "Laplace's approximation", extra="laplace")


def learn_noise(likelihood: Likelihood, network: nn.Module, train: PreparedBatches) -> None:
    """Fit the noise precision of a Gaussian likelihood to the training rows."""
    if isinstance(likelihood, by.Gaussian) and isinstance(likelihood.log_precision, nn.Parameter):
        outputs, targets = outputs_and_targets(network, train)
        with torch.no_grad():
            likelihood.log_precision.copy_(-(targets - outputs).double().square().mean().log())


def _fit_curvature(part: LaplacePart, network: nn.Module, likelihood: Likelihood, train: PreparedBatches) -> Any:
    """laplace-torch's approximation, with the curvature over all training rows."""
    weights, structure = ("all" if part.posterior == "all_diagonal" else "last_layer"), _structure(part)
    plain = _mean_field_parameters_only(network) if weights == "all" else copy.deepcopy(network).requires_grad_(True)
    noise: dict[str, float] = {}
    if isinstance(likelihood, by.Gaussian):
        noise["sigma_noise"] = float((-0.5 * likelihood.log_precision.detach()).exp())
    backend = getattr(import_optional("laplace.curvature", "its curvature", extra="laplace"), _BACKENDS[part.fisher])
    task = "regression" if noise else "classification"
    try:
        found = package().Laplace(plain.eval(), task, weights, structure, backend=backend, **noise)
        found.fit(train.with_batch_size(_batch_size(part, plain, train)))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise BaselineError(
            f"laplace-torch can't compute the curvature of this network with posterior={part.posterior!r}: {error}"
        ) from error
    return found


_BACKENDS = {"exact": "CurvlinopsGGN", "empirical": "CurvlinopsEF"}
"""The backends of laplace-torch; for these likelihoods the generalised Gauss-Newton matrix is the exact Fisher."""


def _structure(part: LaplacePart) -> str:
    return "kron" if part.posterior == "last_kron" else "diag"


def _mean_field_parameters_only(network: nn.Module) -> nn.Module:
    """A copy in which only the parameters that a `MeanField` can hold require gradients."""
    held = bayesian_layers(by.convert(copy.deepcopy(network), by.MeanField()))
    plain = copy.deepcopy(network)
    for name, p in plain.named_parameters():
        p.requires_grad_(name.rpartition(".")[0] in held)
    return plain


def _batch_size(part: LaplacePart, network: nn.Module, train: PreparedBatches) -> int:
    """A batch size that bounds the Jacobian entries: rows × parameters, for the exact Fisher × outputs."""
    if part.posterior != "all_diagonal":
        return train.batch_size
    with torch.no_grad():
        outputs = int(network(next(iter(train.with_batch_size(1)))[0]).shape[-1])
    numbers = sum(p.numel() for p in network.parameters() if p.requires_grad)
    numbers *= outputs if part.fisher == "exact" else 1
    return max(min(MOST_NUMBERS // numbers, train.batch_size), 1)


def _prior_precision(
    part: LaplacePart,
    fitted: Any,
    network: nn.Module,
    likelihood: Likelihood,
    validation: PreparedBatches | None,
    seed: int,
) -> float:
    if part.prior_precision == "marginal":
        fitted.optimize_prior_precision(pred_type="nn", method="marglik", prior_structure="scalar")
        return float(fitted.prior_precision)
    if part.prior_precision != "validation":
        return float(part.prior_precision)
    if validation is None:
        raise BaselineError(
            "laplace chooses its prior precision on validation rows, but there are none; set data.validation, or "
            "method.prior_precision to a number or 'marginal'"
        )
    losses = {
        precision: _loss(_posterior(part, fitted, network, precision, seed), likelihood, validation, part.draws, seed)
        for precision in PRECISIONS
    }
    return min(losses, key=lambda precision: losses[precision])


def _loss(model: nn.Module, likelihood: Likelihood, batches: PreparedBatches, draws: int, seed: int) -> float:
    """The negative log predictive density per row, with the same noise for every precision."""
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
        method: Method = by.Ensemble(part.draws, jitter=0.0)
        values = fitted.sample(part.draws, torch.Generator(fitted.mean.device).manual_seed(seed))
    else:
        method = by.MeanField(prior_std=precision**-0.5, estimator="shared")
        values = -0.5 * fitted.posterior_precision.log().unsqueeze(0)
    by.convert(model, {lambda name, _: name in layers: method})
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
    """Write values (rows, parameters) into the posterior: drawn weights, or one row of log standard deviations."""
    layers = bayesian_layers(model)
    for (name, shape), columns in zip(names.items(), values.split([s.numel() for s in names.values()], 1), strict=True):
        path, _, tensor = name.rpartition(".")
        layer, parts = layers[path], columns.reshape(-1, *shape)
        if isinstance(layer.method, by.MeanField):
            layer.posterior.tensors()[_log_std_of(layer, path, tensor)].copy_(parts[0])
        else:
            getattr(layer, tensor).copy_(parts[0])
            layer.posterior.tensors()[tensor].copy_(parts[1:])


def _log_std_of(layer: BayesianLayer, path: str, tensor: str) -> str:
    """The name of a parameter's standard deviations; of several weights each has a suffix, as in `weight_ih_l0`."""
    names = {f"{each}{end}": f"{each}_log_std{end}" for end, site in layer.sites().items() for each in site.base}
    if tensor not in names:
        raise BaselineError(
            f"layer {path!r} packs several weights into {tensor!r}, which posterior='all_diagonal' can't hold; use "
            "posterior='last_kron' or 'last_diagonal'"
        )
    return names[tensor]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide laplace-torch's warnings about options that are set here, and about what it imports."""
    with warnings.catch_warnings():
        for advice in (".*`link_approx`", r".*torch\.jit\.script"):
            warnings.filterwarnings("ignore", advice)
        yield
