"""Metrics of predictions, as functions of tensors; from torchmetrics if it has them."""

from bayesify.lab._torchvision import TORCHVISION  # noqa: F401  (before Lightning imports it)
from bayesify.lab.metrics.bootstrap import detection_intervals, intervals, selective_intervals
from bayesify.lab.metrics.calibration import BINS, adaptive_ece, calibration_bins, classwise_ece, ece, mce
from bayesify.lab.metrics.classification import (
    accuracy,
    brier,
    classification_metrics,
    nll,
    normalised_disagreement,
    top_k,
)
from bayesify.lab.metrics.ood_detection import auroc, average_precision, detection, fpr95, scores
from bayesify.lab.metrics.regression import INTERVAL, coverage, crps, quantile_error, quantile_of, regression_metrics
from bayesify.lab.metrics.selective_prediction import (
    Curve,
    accuracy_at,
    aurc,
    buckets,
    risk_coverage,
    selective_metrics,
)
from bayesify.lab.metrics.weighted import Measure, MetricError

__all__ = [
    "BINS",
    "INTERVAL",
    "Curve",
    "Measure",
    "MetricError",
    "accuracy",
    "accuracy_at",
    "adaptive_ece",
    "aurc",
    "auroc",
    "average_precision",
    "brier",
    "buckets",
    "calibration_bins",
    "classification_metrics",
    "classwise_ece",
    "coverage",
    "crps",
    "detection",
    "detection_intervals",
    "ece",
    "fpr95",
    "intervals",
    "mce",
    "nll",
    "normalised_disagreement",
    "quantile_error",
    "quantile_of",
    "regression_metrics",
    "risk_coverage",
    "scores",
    "selective_intervals",
    "selective_metrics",
    "top_k",
]
