"""The metrics that fit a prediction and its targets."""

from __future__ import annotations

from torch import Tensor

from bayesify.lab.data import Classes, Labels, Masks, Reals, Targets
from bayesify.lab.metrics.classification import class_measures
from bayesify.lab.metrics.regression import real_measures
from bayesify.lab.metrics.several_answers import label_measures, pixel_measures
from bayesify.lab.metrics.weighted import Measure, MetricError
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression


def measures_of(p: Prediction, y: Tensor, targets: Targets) -> dict[str, Measure]:
    """The metrics of the task, each as a function of how often each row counts."""
    if isinstance(p, Classification) and isinstance(targets, Classes):
        return class_measures(p, y)
    if isinstance(p, Classification) and isinstance(targets, Masks):
        return pixel_measures(p, y, targets.names)
    if isinstance(p, BinaryPrediction) and isinstance(targets, Labels):
        return label_measures(p, y, targets.names)
    if isinstance(p, Regression) and isinstance(targets, Reals):
        return real_measures(p, y, targets)
    raise MetricError(f"no metrics for a {type(p).__name__} where targets are {type(targets).__name__}")
