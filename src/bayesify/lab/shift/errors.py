"""Errors under corruption: relative to a reference model's, and means over all of them.

All take the `shift` part of a run's metrics: corruption → severity → metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bayesify.lab.data.errors import listed
from bayesify.lab.shift.checks import SEVERITIES, ShiftError
from bayesify.lab.shift.corruptions import CORRUPTIONS

Shift = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Metrics by kind of shift and by intensity, a number in words."""


def corruption_error(shift: Shift, reference: Shift) -> dict[str, float]:
    """CE_c = E_c / E_c^reference for each corruption that both have, E_c the error over all severities (EMP, D.4).

    >>> half = {"fog": {str(severity): {"accuracy": 0.5} for severity in range(1, 6)}}
    >>> most = {"fog": {str(severity): {"accuracy": 0.2} for severity in range(1, 6)}}
    >>> corruption_error(half, most)
    {'fog': 0.625}
    """
    return {c: _ratio(_error(shift, c), _error(reference, c), c) for c in _shared(shift, reference)}


def mean_corruption_error(shift: Shift, reference: Shift) -> float:
    """mCE = 1/15 Σ_c CE_c (EMP, D.4); the reference has 1, papers print it in percent."""
    return _mean(corruption_error(*_complete(shift, reference)).values())


def relative_corruption_error(
    shift: Shift, accuracy: float, reference: Shift, reference_accuracy: float
) -> dict[str, float]:
    """rCE_c = (E_c - E_clean) / (E_c^reference - E_clean^reference): what the corruption adds to the error (EMP, D.4).

    >>> fog = {"fog": {str(severity): {"accuracy": 0.5} for severity in range(1, 6)}}
    >>> relative_corruption_error(fog, 0.75, fog, 1.0)
    {'fog': 0.5}

    EMP's denominator is printed with the model's own clean error; its table 8, like Hendrycks and Dietterich (2019),
    has the reference's: a CE below 1 beside an rCE above 1, as for EMP on snow, could not be otherwise.
    """
    return {
        c: _ratio(_error(shift, c) - (1 - accuracy), _error(reference, c) - (1 - reference_accuracy), c)
        for c in _shared(shift, reference)
    }


def relative_mean_corruption_error(shift: Shift, accuracy: float, reference: Shift, reference_accuracy: float) -> float:
    """rmCE = 1/15 Σ_c rCE_c (EMP, D.4)."""
    ours, theirs = _complete(shift, reference)
    return _mean(relative_corruption_error(ours, accuracy, theirs, reference_accuracy).values())


def corrupted_means(shift: Shift, metrics: Iterable[str] = ("accuracy", "nll", "ece")) -> dict[str, float]:
    """Means over all corruptions and severities: cA, cNLL and cECE of the Rank-1 tables."""
    (ours,) = _complete(shift)
    cells = [ours[c][str(severity)] for c in CORRUPTIONS for severity in SEVERITIES]
    return {metric: _mean(cell[metric] for cell in cells) for metric in metrics}


def _shared(shift: Shift, reference: Shift) -> list[str]:
    return [c for c in CORRUPTIONS if c in shift and c in reference]


def _complete(*shifts: Shift) -> tuple[Shift, ...]:
    """The same, if each has every corruption."""
    for shift in shifts:
        missing = [c for c in CORRUPTIONS if c not in shift]
        if missing:
            raise ShiftError(
                f"a mean over all {len(CORRUPTIONS)} corruptions was asked for; {listed(missing, most=15)} were not run"
            )
    return shifts


def _error(shift: Shift, corruption: str) -> float:
    """The mean top-1 error over the severities."""
    missing = [severity for severity in SEVERITIES if str(severity) not in shift[corruption]]
    if missing:
        raise ShiftError(f"{corruption} has no severity {listed(missing)}; expected all of {listed(SEVERITIES)}")
    return _mean(1 - shift[corruption][str(severity)]["accuracy"] for severity in SEVERITIES)


def _ratio(ours: float, reference: float, corruption: str) -> float:
    if reference < 1e-6:
        raise ShiftError(
            f"{corruption} adds no errors to the reference model, so nothing can be relative to it; take a reference "
            "that corruption does harm"
        )
    return ours / reference


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)
