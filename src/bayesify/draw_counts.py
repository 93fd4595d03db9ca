"""How many draws a model has that differ, how many to make unless told, and when adaptive sampling looks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import nn

from .adaptive import Adaptive
from .errors import BayesifyError
from .family import Family
from .layers import bayesian_layers
from .selection import unwrapped

FEWEST_DRAWS = 20


def families_of(model: nn.Module) -> list[Family]:
    """The family of each Bayesian layer."""
    families = [layer.family for layer in bayesian_layers(unwrapped(model)).values()]
    if not families:
        raise BayesifyError("the model has no Bayesian layer: use by.convert(model, family) first")
    return families


def components(families: Iterable[Family]) -> int:
    """The largest number of components."""
    return max(family.components for family in families)


def number_of_draws(families: Sequence[Family], samples: int | None) -> int:
    """The draws asked for, or enough to use every component alike."""
    if samples is None:
        k = components(families)
        return turn(families) if are_points(families) else k * -(-FEWEST_DRAWS // k)
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise BayesifyError(f"samples={samples!r}: expected a whole number >= 1")
    return samples


def looks_of(families: Sequence[Family], samples: int | Adaptive | None) -> tuple[int, ...]:
    """After how many draws to stop: all, or where adaptive sampling looks.

    That is after whole turns of all layers' components, or after one where they are points.
    """
    if not isinstance(samples, Adaptive):
        return (number_of_draws(families, samples),)
    looks = samples.looks(cycle=turn(families))
    return (turn(families),) if are_points(families) else looks


def turn(families: Iterable[Family]) -> int:
    """After how many draws every layer's components come in the same order again.

    >>> import bayesify as by
    >>> turn([by.Rank1(4), by.IBNN(6)])
    12
    """
    return math.lcm(*(family.components for family in families))


def are_points(families: Iterable[Family]) -> bool:
    """Whether draws are components and nothing else.

    >>> import bayesify as by
    >>> are_points([by.BatchEnsemble(4)]), are_points([by.BatchEnsemble(4), by.Rank1(4)])
    (True, False)
    """
    return all(not family.noisy and family.tied for family in families)
