"""Corruption errors: relative to a reference model (mCE, rmCE), and means over all corruptions.

The reference of Hendrycks and Dietterich (2019) is AlexNet, which is defined on ImageNet-C alone; that of EMP is the
plain network. All functions take the `shift` part of a run's metrics: corruption → severity → metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bayesify.lab.data.errors import list_some
from bayesify.lab.shift.checks import SEVERITIES, ShiftError
from bayesify.lab.shift.corruptions import CORRUPTIONS

Shift = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Metrics by kind of shift and by intensity, which is a number as a string."""
ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""AlexNet's mean top-1 error over the five severities of ImageNet-C, as published by Hendrycks and Dietterich."""
ALEXNET: Shift = {
    name: {str(severity): {"accuracy": 1 - error} for severity in SEVERITIES} for name, error in ALEXNET_ERRORS.items()
}
"""AlexNet on ImageNet-C, as the reference of a model that was measured there too."""
ALEXNET_ACCURACY = 1 - 0.435
"""AlexNet's accuracy on ImageNet without corruption (their table 1)."""


def corruption_error(shift: Shift, reference: Shift) -> dict[str, float]:
    """CE_c = E_c / E_c^reference for each corruption that both have; E_c is the mean error over severities (EMP, D.4).

    Args:
        shift: The `shift` part of a run's metrics.
        reference: The same of the reference model.

    Returns:
        The ratio of errors for each corruption.

    Raises:
        ShiftError: If a severity is missing, or the reference makes no errors.

    >>> half = {"fog": {str(severity): {"accuracy": 0.5} for severity in range(1, 6)}}
    >>> most = {"fog": {str(severity): {"accuracy": 0.2} for severity in range(1, 6)}}
    >>> corruption_error(half, most)
    {'fog': 0.625}
    """
    return {c: _ratio(_error(shift, c), _error(reference, c), c) for c in _shared(shift, reference)}


def mean_corruption_error(shift: Shift, reference: Shift) -> float:
    """mCE = 1/15 Σ_c CE_c (EMP, D.4); 1 for the reference itself. Papers print it in percent.

    Args:
        shift: The `shift` part of a run's metrics.
        reference: The same of the reference model, or on ImageNet-C `ALEXNET` (Hendrycks and Dietterich 2019).

    Returns:
        mCE as a ratio.

    Raises:
        ShiftError: If a corruption or a severity is missing, or the reference makes no errors.
    """
    return _mean(corruption_error(*_complete(shift, reference)).values())


def relative_corruption_error(
    shift: Shift, accuracy: float, reference: Shift, reference_accuracy: float
) -> dict[str, float]:
    """rCE_c = (E_c - E_clean) / (E_c^reference - E_clean^reference): what the corruption adds to the error (EMP, D.4).

    Args:
        shift: The `shift` part of a run's metrics.
        accuracy: The accuracy on the same rows without corruption.
        reference: The same of the reference model.
        reference_accuracy: The reference model's accuracy without corruption.

    Returns:
        The ratio of increases in error for each corruption.

    Raises:
        ShiftError: If a severity is missing, or a corruption does not harm the reference.

    >>> fog = {"fog": {str(severity): {"accuracy": 0.5} for severity in range(1, 6)}}
    >>> relative_corruption_error(fog, 0.75, fog, 1.0)
    {'fog': 0.5}

    EMP prints the denominator with the model's own clean error, but its table 8, like Hendrycks and Dietterich (2019),
    uses the reference's: otherwise a CE below 1 with an rCE above 1, as for EMP on snow, would be impossible.
    """
    return {
        c: _ratio(_error(shift, c) - (1 - accuracy), _error(reference, c) - (1 - reference_accuracy), c)
        for c in _shared(shift, reference)
    }


def relative_mean_corruption_error(shift: Shift, accuracy: float, reference: Shift, reference_accuracy: float) -> float:
    """rmCE = 1/15 Σ_c rCE_c (EMP, D.4).

    Args:
        shift: The `shift` part of a run's metrics.
        accuracy: The accuracy on the same rows without corruption.
        reference: The same of the reference model.
        reference_accuracy: The reference model's accuracy without corruption.

    Returns:
        rmCE as a ratio.

    Raises:
        ShiftError: If a corruption or a severity is missing, or one does not harm the reference.
    """
    ours, theirs = _complete(shift, reference)
    return _mean(relative_corruption_error(ours, accuracy, theirs, reference_accuracy).values())


def corrupted_means(shift: Shift, metrics: Iterable[str] = ("accuracy", "nll", "ece")) -> dict[str, float]:
    """Means over all corruptions and severities: cA, cNLL and cECE of the Rank-1 tables.

    Args:
        shift: The `shift` part of a run's metrics.
        metrics: The metrics to average.

    Returns:
        The mean of each metric.

    Raises:
        ShiftError: If a corruption is missing.
    """
    (ours,) = _complete(shift)
    cells = [ours[c][str(severity)] for c in CORRUPTIONS for severity in SEVERITIES]
    return {metric: _mean(cell[metric] for cell in cells) for metric in metrics}


def alexnet_errors(shift: Shift, accuracy: float) -> dict[str, float]:
    """mCE and rmCE relative to AlexNet, for a model of ImageNet's 1000 classes on the corruptions of ImageNet-C.

    Args:
        shift: The `shift` part of a run's metrics.
        accuracy: The accuracy on the same rows without corruption.

    Returns:
        The ratios, under `mce_alexnet` and `rmce_alexnet`.

    Raises:
        ShiftError: If a corruption or a severity is missing.
    """
    relative = relative_mean_corruption_error(shift, accuracy, ALEXNET, ALEXNET_ACCURACY)
    return {"mce_alexnet": mean_corruption_error(shift, ALEXNET), "rmce_alexnet": relative}


def _shared(shift: Shift, reference: Shift) -> list[str]:
    return [c for c in CORRUPTIONS if c in shift and c in reference]


def _complete(*shifts: Shift) -> tuple[Shift, ...]:
    """The same; raises if a corruption is missing."""
    for shift in shifts:
        missing = [c for c in CORRUPTIONS if c not in shift]
        if missing:
            raise ShiftError(
                f"expected all {len(CORRUPTIONS)} corruptions for the mean; {list_some(missing, most=15)} are missing"
            )
    return shifts


def _error(shift: Shift, corruption: str) -> float:
    """The mean top-1 error over the severities."""
    missing = [severity for severity in SEVERITIES if str(severity) not in shift[corruption]]
    if missing:
        raise ShiftError(f"{corruption} has no severity {list_some(missing)}; expected all of {list_some(SEVERITIES)}")
    return _mean(1 - shift[corruption][str(severity)]["accuracy"] for severity in SEVERITIES)


def _ratio(ours: float, reference: float, corruption: str) -> float:
    if reference < 1e-6:
        raise ShiftError(
            f"{corruption} adds no errors to the reference model, so the ratio is undefined; use a reference that "
            "it does harm"
        )
    return ours / reference


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)
