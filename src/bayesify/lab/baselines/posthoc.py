"""Post-hoc methods in a recipe: temperature scaling, Laplace and SWAG, applied after training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import bayesify as by
from bayesify.lab.baselines.laplace import laplace, learn_noise, package
from bayesify.lab.baselines.prepared_batches import PreparedBatches, outputs_and_targets
from bayesify.lab.baselines.swag import Snapshots, is_snapshot_due
from bayesify.lab.baselines.temperature import best_temperature
from bayesify.lab.data import Data, Reals
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.methods import LaplacePart, PostHocPart, SwagPart, TemperaturePart
from bayesify.layers import bayesian_layers
from bayesify.prediction.likelihood import Likelihood


@dataclass
class PostHocResult:
    """One network, or draws to join into an Ensemble; the likelihood; and facts for `run.json`."""

    networks: Sequence[nn.Module]
    likelihood: Likelihood
    facts: dict[str, Any] = field(default_factory=dict)


def needs_training(recipe: Recipe) -> bool:
    """Whether a recipe trains at all: post-hoc methods use trained weights unchanged, unless `finetune`."""
    method = recipe.method
    return not (isinstance(method, PostHocPart) and recipe.model.is_trained and not method.finetune)


def require_applicable(recipe: Recipe, data: Data, network: nn.Module, steps: int) -> None:
    """Raise if a post-hoc method can't be applied to the data or the network."""
    method, options = recipe.method, recipe.training
    if not isinstance(method, (PostHocPart, SwagPart)):
        return
    if options.regulariser is not None or options.freeze_base or options.recalibrate:
        raise RecipeError(
            f"{method.name} trains a plain network, so training.regulariser, freeze_base and recalibrate don't apply"
        )
    if isinstance(method, TemperaturePart):
        _require_temperature(data)
    elif isinstance(method, LaplacePart):
        _require_laplace(recipe, method, data)
    else:
        _require_swag(recipe, method, network, steps)


def snapshot_callbacks(recipe: Recipe, network: nn.Module) -> list[Snapshots]:
    """The callbacks that SWAG needs during training."""
    return [Snapshots(network, recipe.method)] if isinstance(recipe.method, SwagPart) else []


def apply_post_hoc(
    recipe: Recipe,
    data: Data,
    network: nn.Module,
    likelihood: Likelihood,
    callbacks: Sequence[Snapshots] = (),
    *,
    device: torch.device,
    seed: int = 0,
) -> PostHocResult:
    """Apply a recipe's post-hoc method, if it has one; the result is on the CPU."""
    method = recipe.method
    if not isinstance(method, (PostHocPart, SwagPart)):
        return PostHocResult([network], likelihood)
    network.to(device), likelihood.to(device)
    if isinstance(method, TemperaturePart):
        result = _fit_temperature(recipe, data, network)
    elif isinstance(method, LaplacePart):
        result = _laplace(recipe, method, data, network, likelihood, seed)
    else:
        result = _swag(recipe, method, data, network, likelihood, callbacks[0], seed)
    for each in result.networks:
        each.cpu().eval()
    result.likelihood.cpu()
    return result


def _fit_temperature(recipe: Recipe, data: Data, network: nn.Module) -> PostHocResult:
    logits, labels = outputs_and_targets(network, _validation(recipe, data, network))
    temperature = best_temperature(logits, labels)
    return PostHocResult([network], by.Categorical(temperature=temperature), {"temperature": temperature})


def _laplace(
    recipe: Recipe, method: LaplacePart, data: Data, network: nn.Module, likelihood: Likelihood, seed: int
) -> PostHocResult:
    train = PreparedBatches(network, data.inputs, data.train, recipe.data.batch_size)
    validation = _validation(recipe, data, network) if len(data.validation) else None
    if not needs_training(recipe):
        learn_noise(likelihood, network, train)
    model, precision = laplace(method, network, likelihood, train, validation, seed=seed)
    return PostHocResult([model], likelihood, {"prior_precision": precision})


def _swag(
    recipe: Recipe,
    method: SwagPart,
    data: Data,
    network: nn.Module,
    likelihood: Likelihood,
    snapshots: Snapshots,
    seed: int,
) -> PostHocResult:
    """Draw networks from SWAG; batch statistics are those of unaugmented training rows, the same for every draw."""
    size = min(recipe.data.batch_size, len(data.train))
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    rows = order[: min(method.recalibrate, len(order) // size) * size]
    batches = PreparedBatches(network, data.inputs, data.train.take(rows), size)
    drawn = snapshots.swag.networks(network, method.draws, batches, scale=method.scale, seed=seed)
    return PostHocResult(drawn, likelihood, {"snapshots": snapshots.swag.count})


def _validation(recipe: Recipe, data: Data, network: nn.Module) -> PreparedBatches:
    return PreparedBatches(network, data.inputs, data.validation, recipe.evaluation.batch_size)


def _require_temperature(data: Data) -> None:
    if isinstance(data.targets, Reals):
        raise RecipeError("temperature scaling is for classes; these targets are real numbers")
    if not len(data.validation):
        raise RecipeError("temperature is fitted to validation rows, but there are none; set data.validation")


def _require_laplace(recipe: Recipe, method: LaplacePart, data: Data) -> None:
    package()
    if isinstance(data.targets, Reals) and recipe.likelihood.precision in ("input", "auto"):
        raise RecipeError(
            "laplace needs the same noise for all inputs; set likelihood.precision to 'learned' or a number"
        )
    if isinstance(data.targets, Reals) and method.fisher == "empirical":  # laplace-torch 0.3 scales it wrongly
        raise RecipeError("laplace needs method.fisher='exact' for real targets")
    if method.prior_precision == "validation" and not len(data.validation):
        raise RecipeError(
            "laplace chooses its prior precision on validation rows, but there are none; set data.validation, or "
            "method.prior_precision to a number or 'marginal'"
        )


def _require_swag(recipe: Recipe, method: SwagPart, network: nn.Module, steps: int) -> None:
    options = recipe.training
    if options.patience is not None:
        raise RecipeError("swag takes its snapshots at the end of training, which training.patience may skip")
    total = -(-steps // options.accumulate) * options.epochs
    taken = sum(is_snapshot_due(step, total, options.epochs, method) for step in range(1, total + 1))
    if taken < 2:
        raise RecipeError(
            f"swag would take {taken} snapshots of the weights; it needs at least 2, better {max(method.rank, 2)}: "
            "raise method.snapshots or training.epochs, or lower method.start"
        )
    _require_joinable(network)


def _require_joinable(network: nn.Module) -> None:
    """Raise if an Ensemble, as which draws are kept, can't hold copies of every parameter."""
    held = bayesian_layers(by.convert(copy.deepcopy(network), by.Ensemble(2, jitter=0.0)))
    for name, p in network.named_parameters():
        if p.requires_grad and name.rpartition(".")[0] not in held:
            raise RecipeError(f"swag draws every parameter, but an Ensemble can't hold copies of {name!r}")
