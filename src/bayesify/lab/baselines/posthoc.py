"""What a recipe's method does after training, and what it asks for before."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import bayesify as by
from bayesify.lab.baselines.laplace import laplace, learn_noise, package
from bayesify.lab.baselines.prepared import Prepared, outputs_and_targets
from bayesify.lab.baselines.swag import Snapshots, due
from bayesify.lab.baselines.temperature import best_temperature
from bayesify.lab.data import Data, Reals
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.methods import LaplacePart, PostHocPart, SwagPart, TemperaturePart
from bayesify.layers import bayesian_layers
from bayesify.likelihood import Likelihood


@dataclass
class Finished:
    """One network, or draws that are to be joined; its likelihood; and what there is to tell."""

    networks: Sequence[nn.Module]
    likelihood: Likelihood
    facts: dict[str, Any] = field(default_factory=dict)


def trains(recipe: Recipe) -> bool:
    """Whether a recipe trains at all: a step after training takes trained weights as they are, unless told."""
    method = recipe.method
    return not (isinstance(method, PostHocPart) and recipe.model.is_trained and not method.finetune)


def require_possible(recipe: Recipe, data: Data, network: nn.Module, steps: int) -> None:
    """Raise where the method can't be applied to the data or the network, before there is a folder."""
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


def watchers(recipe: Recipe, network: nn.Module) -> list[Snapshots]:
    """What looks on while a network trains."""
    return [Snapshots(network, recipe.method)] if isinstance(recipe.method, SwagPart) else []


def finish(
    recipe: Recipe,
    data: Data,
    network: nn.Module,
    likelihood: Likelihood,
    seen: Sequence[Snapshots] = (),
    *,
    device: torch.device,
    seed: int = 0,
) -> Finished:
    """The network and its likelihood as the method leaves them, on the CPU."""
    method = recipe.method
    if not isinstance(method, (PostHocPart, SwagPart)):
        return Finished([network], likelihood)
    network.to(device), likelihood.to(device)
    if isinstance(method, TemperaturePart):
        done = _tempered(recipe, data, network)
    elif isinstance(method, LaplacePart):
        done = _laplace(recipe, method, data, network, likelihood, seed)
    else:
        done = _swag(recipe, method, data, network, likelihood, seen[0], seed)
    for each in done.networks:
        each.cpu().eval()
    done.likelihood.cpu()
    return done


def _tempered(recipe: Recipe, data: Data, network: nn.Module) -> Finished:
    logits, labels = outputs_and_targets(network, _validation(recipe, data, network))
    temperature = best_temperature(logits, labels)
    return Finished([network], by.Categorical(temperature=temperature), {"temperature": temperature})


def _laplace(
    recipe: Recipe, method: LaplacePart, data: Data, network: nn.Module, likelihood: Likelihood, seed: int
) -> Finished:
    train = Prepared(network, data.inputs, data.train, recipe.data.batch_size)
    validation = _validation(recipe, data, network) if len(data.validation) else None
    if not trains(recipe):
        learn_noise(likelihood, network, train)
    model, precision = laplace(method, network, likelihood, train, validation, seed=seed)
    return Finished([model], likelihood, {"prior_precision": precision})


def _swag(
    recipe: Recipe,
    method: SwagPart,
    data: Data,
    network: nn.Module,
    likelihood: Likelihood,
    seen: Snapshots,
    seed: int,
) -> Finished:
    """Batch statistics are of training rows in whole batches, without augmentation, the same for every draw."""
    size = min(recipe.data.batch_size, len(data.train))
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    rows = order[: min(method.recalibrate, len(order) // size) * size]
    batches = Prepared(network, data.inputs, data.train.take(rows), size)
    drawn = seen.swag.networks(network, method.draws, batches, scale=method.scale, seed=seed)
    return Finished(drawn, likelihood, {"snapshots": seen.swag.count})


def _validation(recipe: Recipe, data: Data, network: nn.Module) -> Prepared:
    return Prepared(network, data.inputs, data.validation, recipe.evaluation.batch_size)


def _require_temperature(data: Data) -> None:
    if isinstance(data.targets, Reals):
        raise RecipeError("temperature scales the logits of classes; these targets are real numbers")
    if not len(data.validation):
        raise RecipeError("temperature is fitted to validation rows, and there are none; set data.validation")


def _require_laplace(recipe: Recipe, method: LaplacePart, data: Data) -> None:
    package()
    if isinstance(data.targets, Reals) and recipe.likelihood.precision == "input":
        raise RecipeError("laplace needs one noise for all inputs; set likelihood.precision to 'learned' or a number")
    if isinstance(data.targets, Reals) and method.fisher == "empirical":  # which laplace-torch 0.3 scales wrongly
        raise RecipeError("laplace needs method.fisher='exact' for real targets")
    if method.prior_precision == "validation" and not len(data.validation):
        raise RecipeError(
            "laplace chooses its prior precision on validation rows, and there are none; set data.validation, or "
            "method.prior_precision to a number or 'marginal'"
        )


def _require_swag(recipe: Recipe, method: SwagPart, network: nn.Module, steps: int) -> None:
    options = recipe.training
    if options.patience is not None:
        raise RecipeError("swag takes its snapshots at the end of training, which training.patience may cut off")
    total = -(-steps // options.accumulate) * options.epochs
    taken = sum(due(step, total, options.epochs, method) for step in range(1, total + 1))
    if taken < 2:
        raise RecipeError(
            f"swag would take {taken} snapshots of the weights and needs 2 at least, better {max(method.rank, 2)}; "
            "raise method.snapshots or training.epochs, or lower method.start"
        )
    _require_joinable(network)


def _require_joinable(network: nn.Module) -> None:
    """Draws are kept as an Ensemble, which must hold every parameter that is drawn."""
    held = bayesian_layers(by.convert(copy.deepcopy(network), by.Ensemble(2, jitter=0.0)))
    for name, p in network.named_parameters():
        if p.requires_grad and name.rpartition(".")[0] not in held:
            raise RecipeError(f"swag draws every parameter, and an Ensemble can't hold copies of {name!r}")
