"""How many draws a model has that differ, how many to make unless told, and when adaptive sampling looks."""

from __future__ import annotations

import math

from torch import nn

from .adaptive import Adaptive
from .errors import BayesifyError
from .layers import bayesian_layers
from .selection import unwrapped

FEWEST_DRAWS = 20


def components(model: nn.Module) -> int:
    """The largest number of components of a model's layers."""
    layers = bayesian_layers(unwrapped(model))
    if not layers:
        raise BayesifyError("the model has no Bayesian layer: use by.convert(model, family) first")
    return max(layer.family.components for layer in layers.values())


def number_of_draws(model: nn.Module, samples: int | None) -> int:
    """The draws asked for, or enough to use every component alike."""
    k = components(model)
    if samples is None:
        return k if are_points(model) else k * -(-FEWEST_DRAWS // k)
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise BayesifyError(f"samples={samples!r}: expected a whole number >= 1")
    return samples


def looks_of(model: nn.Module, rule: Adaptive) -> tuple[int, ...]:
    """When adaptive sampling looks: after whole turns of all layers' components, or after one where they are points."""
    looks = rule.looks(cycle=turn(model))
    return (components(model),) if are_points(model) else looks


def turn(model: nn.Module) -> int:
    """After how many draws every layer's components come in the same order again."""
    layers = bayesian_layers(unwrapped(model)).values()
    return math.lcm(components(model), *(layer.family.components for layer in layers))


def are_points(model: nn.Module) -> bool:
    """Whether a model's draws are its components and nothing else."""
    families = [layer.family for layer in bayesian_layers(unwrapped(model)).values()]
    return all(not family.noisy and family.tied for family in families)
