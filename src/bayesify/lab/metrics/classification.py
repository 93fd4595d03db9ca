"""Metrics of classification: accuracy, NLL, Brier score, calibration, disagreement."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy

from bayesify.lab.metrics.calibration import EMP_BINS, EMP_FEW, Bins, classwise, equal_mass, top_confidence
from bayesify.lab.metrics.ood_detection import area_under_roc, mean_precision
from bayesify.lab.metrics.selective_prediction import SUFFIXES, area_under_risk
from bayesify.lab.metrics.weighted import Measure, MetricError, evaluate_measures, mean, unit_weights
from bayesify.prediction.results import Classification

TOP = 5


def classification_metrics(p: Classification, y: Tensor) -> dict[str, float | None]:
    """Accuracy, proper scores and calibration of predicted classes, and their mean uncertainty in nats.

    Args:
        p: A prediction of classes.
        y: The true labels (N,).

    Returns:
        The metrics by name.

    Raises:
        MetricError: If the labels don't fit the prediction.

    >>> from bayesify import Categorical
    >>> p = Categorical().predictive(torch.tensor([[[3.0, 0.0], [0.0, 3.0]]]))
    >>> classification_metrics(p, torch.tensor([0, 0]))["accuracy"]
    0.5

    A metric is None if it is not a finite number: the NLL if a true class has probability 0, the normalised
    disagreement if no draw errs, the AUROC if all rows have one class, `ece20` if no bin has more than 5 rows.
    """
    return evaluate_measures(class_measures(p, y), y.numel(), p.log_probs.device)


def class_measures(p: Classification, y: Tensor) -> dict[str, Measure]:
    """The metrics of classification, each as a function of how often each row counts."""
    _require_matching(p.log_probs, y)
    per_error, y = _disagreement_per_error(p, y), y.to(p.log_probs.device).flatten()
    probs, log_probs, mean_logs = (each.flatten(0, -2) for each in (p.probs, p.log_probs, p.mean_log_probs))
    confidence, correct = top_confidence(probs, y)
    emp = Bins(confidence, correct, EMP_BINS, few=EMP_FEW)
    return {
        "accuracy": mean(correct),
        **({f"top{TOP}": mean(_in_top(probs, y, TOP))} if probs.shape[-1] > TOP else {}),
        "nll": mean(nlls(log_probs, y)),
        "gibbs_nll": mean(nlls(mean_logs, y)),
        "mean_logits_nll": mean(nlls(mean_logs.log_softmax(-1), y)),
        "brier": mean(_briers(probs, y)),
        "ece": Bins(confidence, correct).expected,
        "ece20": emp.expected,
        "mce": Bins(confidence, correct).largest,
        "mce20": emp.largest,
        "adaptive_ece": Bins(confidence, correct, edges=equal_mass).expected,
        "classwise_ece": classwise(probs, y),
        **{name: mean(getattr(p, name).flatten()) for name in ("entropy", "aleatoric", "epistemic", "disagreement")},
        "normalised_disagreement": per_error,
        **{f"aurc{suffix}": area_under_risk(getattr(p, by).flatten(), ~correct) for by, suffix in SUFFIXES.items()},
        **(_binary_measures(log_probs, y) if probs.shape[-1] == 2 else {}),
    }


def accuracy(probs: Tensor, y: Tensor) -> Tensor:
    """The share of rows whose most probable class is the true one.

    Args:
        probs: Probabilities (N, classes).
        y: The true labels (N,).

    Returns:
        The accuracy, from 0 to 1.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.5000)
    """
    return multiclass_accuracy(probs.argmax(-1), y, probs.shape[-1], average="micro")


def top_k(probs: Tensor, y: Tensor, k: int = TOP) -> Tensor:
    """The share of rows whose true class is among the k most probable; 1 if there are at most k classes.

    Args:
        probs: Probabilities (N, classes).
        y: The true labels (N,).
        k: How many classes count.

    Returns:
        The share, from 0 to 1.

    >>> top_k(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6]]), torch.tensor([1, 0]), k=2)
    tensor(0.5000, dtype=torch.float64)
    """
    return _in_top(probs, y, k).double().mean()


def nll(log_probs: Tensor, y: Tensor) -> Tensor:
    """The mean of -log p(y), where p is the mean probability over draws.

    Args:
        log_probs: Log-probabilities (N, classes).
        y: The true labels (N,).

    Returns:
        The mean in nats.

    >>> nll(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0])).exp()
    tensor(4.0000, dtype=torch.float64)
    """
    return nlls(log_probs, y).mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    """The mean over rows of Σ_classes (p - [class is y])², from 0 to 2 (Brier 1950, eq. 2).

    Args:
        probs: Probabilities (N, classes).
        y: The true labels (N,).

    Returns:
        The mean score.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.5000, dtype=torch.float64)
    """
    return _briers(probs, y).mean()


def normalised_disagreement(p: Classification, y: Tensor) -> Tensor:
    """The share of pairs of draws whose labels differ, divided by the mean error of the draws (Rank-1, section 3.5).

    The paper's members are draws here. NaN if no draw errs.

    Args:
        p: A prediction of classes.
        y: The true labels (N,).

    Returns:
        The ratio.
    """
    return _disagreement_per_error(p, y)(unit_weights(y.numel(), p.votes.device)).squeeze(0)


def _disagreement_per_error(p: Classification, y: Tensor) -> Measure:
    right = p.votes.gather(-1, y.to(p.votes.device).unsqueeze(-1)).flatten()
    differing, erring = mean(p.disagreement.flatten()), mean(1 - right.double() / p.votes.sum(-1).flatten())
    return lambda counts: differing(counts) / erring(counts)


def _binary_measures(log_probs: Tensor, y: Tensor) -> dict[str, Measure]:
    """How well the odds of class 1 separate it from class 0."""
    odds = log_probs[:, 1] - log_probs[:, 0]
    return {"auroc": area_under_roc(odds, y == 1), "average_precision": mean_precision(odds, y == 1)}


def _in_top(probs: Tensor, y: Tensor, k: int) -> Tensor:
    return (probs.topk(min(k, probs.shape[-1]), -1).indices == y.unsqueeze(-1)).any(-1)


def nlls(log_probs: Tensor, y: Tensor) -> Tensor:
    """-log p(y) of each row."""
    return -log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1).double()


def _briers(probs: Tensor, y: Tensor) -> Tensor:
    own = y.unsqueeze(-1)
    gaps = probs.double().scatter_add(-1, own, -torch.ones_like(own, dtype=torch.float64))
    return gaps.square().sum(-1)


def _require_matching(log_probs: Tensor, y: Tensor) -> None:
    if y.shape != log_probs.shape[:-1] or not len(y):
        raise MetricError(
            f"predictions have shape {tuple(log_probs.shape)}, so labels must have shape "
            f"{tuple(log_probs.shape[:-1])} and not be empty; got {tuple(y.shape)}"
        )
    if not 0 <= int(y.min()) <= int(y.max()) < log_probs.shape[-1]:
        raise MetricError(f"labels from {int(y.min())} to {int(y.max())}: expected 0 to {log_probs.shape[-1] - 1}")
