"""Learning-rate schedules: a factor of the initial rate, by the share of training that is done."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[float, float, float], float]
"""(done, final, warmup) → factor."""

ONE_CYCLE_START = 0.04
"""A one-cycle schedule starts at this share of its peak."""


def constant(done: float, final: float, warmup: float) -> float:
    """Always 1."""
    return 1.0


def linear(done: float, final: float, warmup: float) -> float:
    """A line from 1 to `final`."""
    return 1.0 + (final - 1.0) * done


def cosine(done: float, final: float, warmup: float) -> float:
    """Half a cosine from 1 to `final`.

    >>> [round(cosine(done, 0.1, 0), 3) for done in (0, 0.5, 1)]
    [1.0, 0.55, 0.1]
    """
    return final + (1.0 - final) * (1.0 + math.cos(math.pi * done)) / 2


def one_cycle(done: float, final: float, warmup: float) -> float:
    """Half a cosine up to 1 over the share `warmup`, then half a cosine down to `final` (Smith and Topin 2019)."""
    if done < warmup:
        return 1.0 + (ONE_CYCLE_START - 1.0) * (1.0 + math.cos(math.pi * done / warmup)) / 2
    return cosine((done - warmup) / max(1.0 - warmup, 1e-12), final, 0.0)


def late_linear(done: float, final: float, warmup: float) -> float:
    """1 for the first half, a line to `final` at 90%, then constant (iBNN, appendix).

    >>> [round(late_linear(done, 0.01, 0), 3) for done in (0.5, 0.7, 0.9, 1)]
    [1.0, 0.505, 0.01, 0.01]
    """
    return linear(min(max((done - 0.5) / 0.4, 0.0), 1.0), final, 0.0)


SCHEDULES: dict[str, Schedule] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "one_cycle": one_cycle,
    "late_linear": late_linear,
}
"""Every schedule by name."""
