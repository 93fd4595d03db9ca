"""What `samples` means: how many draws to make, by default or as asked, and when adaptive sampling may stop."""

from collections.abc import Iterable, Sequence

from torch import nn

from bayesify.batches import check_count
from bayesify.conversion.drawn_network import require_layers
from bayesify.errors import BayesifyError
from bayesify.methods.base import Method
from bayesify.methods.draw_design import component_cycle
from bayesify.prediction.adaptive import Adaptive

FEWEST_DRAWS = 20


def methods_of(model: nn.Module) -> list[Method]:
    """The method of each Bayesian layer."""
    return [layer.method for layer in require_layers(model).values()]


def components(methods: Iterable[Method]) -> int:
    """The largest number of components."""
    return max(method.components for method in methods)


def number_of_draws(methods: Sequence[Method], samples: int | None) -> int:
    """The number of draws asked for, or by default enough to use every component equally often."""
    if samples is None:
        k = components(methods)
        return component_cycle(methods) if are_points(methods) else k * -(-FEWEST_DRAWS // k)
    check_count("samples", samples)
    return samples


def stops_of(methods: Sequence[Method], samples: int | Adaptive | None, block: int) -> tuple[int, ...]:
    """After how many draws to stop: after all, or at the points where adaptive sampling may stop.

    Those follow complete blocks; where components are points, it is one cycle through all layers' components.
    """
    if not isinstance(samples, Adaptive):
        return (number_of_draws(methods, samples),)
    cycle = component_cycle(methods)
    if samples.max < cycle:
        raise BayesifyError(f"Adaptive(max={samples.max}): components take {cycle} draws; use max={cycle} or more")
    return (cycle,) if are_points(methods) else samples.stopping_points(block)


def are_points(methods: Iterable[Method]) -> bool:
    """Whether a draw is one of the components, without noise.

    >>> import bayesify as by
    >>> are_points([by.BatchEnsemble(4)]), are_points([by.BatchEnsemble(4), by.Rank1(4)])
    (True, False)
    """
    return all(not method.noisy and method.ties_components for method in methods)
