"""Metrics where a row has several answers: several labels, or a class for each pixel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bayesify.lab.metrics.calibration import BINS, equal_width
from bayesify.lab.metrics.ood_detection import area_under_roc, mean_precision
from bayesify.lab.metrics.selective_prediction import SUFFIXES, area_under_risk
from bayesify.lab.metrics.weighted import Measure, MetricError, mean
from bayesify.prediction.results import BinaryPrediction, Classification

Answers = BinaryPrediction | Classification


def label_measures(p: BinaryPrediction, y: Tensor, names: Sequence[str]) -> dict[str, Measure]:
    """The metrics of several labels (N, L), each as a function of how often each row counts.

    AUROC, average precision and F1 are means over labels, and there are `auroc_LABEL` and `average_precision_LABEL` for
    each. `exact_match` is the share of rows with all labels right.
    """
    y = _targets(y, p.log_probs, p.log_probs.shape)
    odds, yes = p.log_probs - p.log_not_probs, y == 1
    aurocs = [area_under_roc(odds[:, i], yes[:, i]) for i in range(len(names))]
    precisions = [mean_precision(odds[:, i], yes[:, i]) for i in range(len(names))]
    per_label = {"auroc": aurocs, "average_precision": precisions}
    return {
        **_shared_measures(p, y, -p.log_probs.where(yes, p.log_not_probs), (p.probs.double() - y).square()),
        "exact_match": mean((p.label == y).all(1)),
        "f1": _mean_over(_ratios(*_overlaps(p.label == 1, yes, factor=2.0))),
        **{name: _mean_over(_stacked(each)) for name, each in per_label.items()},
        **{f"{name}_{label}": one for name, each in per_label.items() for label, one in zip(names, each, strict=True)},
    }


def pixel_measures(p: Classification, y: Tensor, names: Sequence[str]) -> dict[str, Measure]:
    """The metrics of a class for each pixel (N, H, W), each as a function of how often each image counts.

    `mean_iou` is the mean over classes of the intersection over union of predicted and true pixels of all images
    (Everingham et al. 2015), and there is `iou_CLASS` for each; classes that are nowhere don't count.
    """
    y = _targets(y, p.log_probs, p.log_probs.shape[:-1])
    own = p.log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    briers = p.probs.square().sum(-1) - 2 * own.exp() + 1
    overlaps = [_overlaps(p.label.flatten(1) == c, y.flatten(1) == c) for c in range(len(names))]
    both, either = (torch.stack([each.sum(1) for each in some], 1) for some in zip(*overlaps, strict=True))
    ratios = _ratios(both, either)
    return {
        **_shared_measures(p, y, -own, briers),
        "mean_iou": _mean_over(ratios),
        **{f"iou_{name}": _entry(ratios, i) for i, name in enumerate(names)},
    }


def share_right(p: Answers, y: Tensor) -> Tensor:
    """The share of each row's labels or pixels that are predicted right."""
    return (p.label == y).double().flatten(1).mean(1)


def row_mean(values: Tensor) -> Tensor:
    """The mean over each row's labels or pixels."""
    return values.flatten(1).mean(1)


def _shared_measures(p: Answers, y: Tensor, nll: Tensor, brier: Tensor) -> dict[str, Measure]:
    """What both kinds have: means over all labels or pixels, their calibration, and selective prediction of rows."""
    right = share_right(p, y)
    return {
        "accuracy": mean(right),
        "nll": mean(row_mean(nll.double())),
        "brier": mean(row_mean(brier.double())),
        "ece": _pooled_error(p.confidence.flatten(1), (p.label == y).flatten(1)),
        **{name: mean(row_mean(getattr(p, name))) for name in ("entropy", "aleatoric", "epistemic", "disagreement")},
        **{f"aurc{suffix}": area_under_risk(row_mean(getattr(p, by)), 1 - right) for by, suffix in SUFFIXES.items()},
    }


def _targets(y: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(y.shape) != tuple(shape) or not len(y):
        raise MetricError(f"targets have shape {tuple(y.shape)}; expected {tuple(shape)}, and at least one row")
    return y.to(like.device).long()


def _overlaps(predicted: Tensor, true: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Where both are true, and either, or with a factor of 2 their sum: the parts of IoU, or of F1."""
    both, total = (predicted & true).double(), predicted.double() + true.double()
    return factor * both, total - (2 - factor) * both


def _ratios(above: Tensor, below: Tensor) -> Measure:
    """For each of several columns, the ratio of its sums over rows; NaN if there is nothing."""
    return lambda counts: (counts @ above) / (counts @ below)


def _stacked(measures: Sequence[Measure]) -> Measure:
    return lambda counts: torch.stack([measure(counts) for measure in measures], -1)


def _mean_over(columns: Measure) -> Measure:
    return lambda counts: columns(counts).nanmean(-1)


def _entry(columns: Measure, i: int) -> Measure:
    return lambda counts: columns(counts)[..., i]


def _pooled_error(confidence: Tensor, correct: Tensor) -> Measure:
    """The expected calibration error over the labels or pixels (N, M) of all rows, in equal bins of confidence."""
    gaps = torch.zeros(len(confidence), BINS, dtype=torch.float64, device=confidence.device)
    for some in _columns(confidence.shape[1]):
        p = confidence[:, some].double().clamp(0, 1)
        gaps.scatter_add_(1, equal_width(p, BINS), correct[:, some].double() - p)
    gaps /= confidence.shape[1]
    return lambda counts: (counts @ gaps).abs().sum(-1) / counts.sum(-1)


def _columns(count: int, at_once: int = 1024) -> Iterator[slice]:
    """Some pixels at a time, so that float64 copies of all are never in memory."""
    yield from (slice(start, start + at_once) for start in range(0, count, at_once))
