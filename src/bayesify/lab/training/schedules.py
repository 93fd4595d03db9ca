"""Learning-rate schedules: a factor of the initial rate, by the share of training that is done."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise

from bayesify.lab.recipes.parts import PointsPart, ScheduleName, StepsPart

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


def factor(
    schedule: ScheduleName | StepsPart | PointsPart, done: float, epochs: int, *, final: float, warmup: float
) -> float:
    """The factor of the initial rate once the share `done` of training is done.

    >>> [factor(StepsPart(steps=[80, 160], factor=0.2), epoch / 200, 200, final=0, warmup=0) for epoch in (79, 80, 160)]
    [1.0, 0.2, 0.04000000000000001]
    >>> falling = PointsPart(points=[(6, 1.0), (10, 0.25)])  # iBNN, table 7
    >>> [factor(falling, epoch / 15, 15, final=0, warmup=0) for epoch in (0, 6, 8, 10, 15)]
    [1.0, 1.0, 0.625, 0.25, 0.25]

    Args:
        schedule: The name of a schedule, steps, or points.
        done: The share of training that is done.
        epochs: The number of epochs.
        final: The last factor of a schedule with a name.
        warmup: The share of training in which `one_cycle` rises.

    Returns:
        The factor.
    """
    if isinstance(schedule, StepsPart):
        return schedule.factor ** bisect_right(schedule.steps, done, key=lambda time: _share(time, epochs))
    if isinstance(schedule, PointsPart):
        return _between([(_share(time, epochs), value) for time, value in schedule.points], done)
    return SCHEDULES[schedule](done, final, warmup)


def _between(points: list[tuple[float, float]], done: float) -> float:
    """Piecewise linear, and constant before the first point and after the last."""
    for (start, before), (end, after) in pairwise(points):
        if start <= done < end:
            return before + (after - before) * (done - start) / (end - start)
    return points[0][1] if done < points[0][0] else points[-1][1]


def _share(time: float, epochs: int) -> float:
    """A time as a share of training: below 1 it is one, from 1 on it is a number of epochs."""
    return time if time < 1 else time / epochs
