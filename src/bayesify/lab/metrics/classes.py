"""How good predicted classes are."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy

from bayesify.lab.metrics.calibration import EMP_BINS, EMP_FEW, Bins, classwise, confident, equal_mass
from bayesify.lab.metrics.detection import area_under_roc, mean_precision
from bayesify.lab.metrics.measure import Measure, MetricError, each_once, mean, values_of
from bayesify.lab.metrics.selective import area_under_risk
from bayesify.prediction import Classification

TOP = 5


def classification_metrics(p: Classification, y: Tensor) -> dict[str, float | None]:
    """Accuracy, scores and calibration of predicted classes, and their mean uncertainties in nats.

    >>> from bayesify import Categorical
    >>> p = Categorical().predictive(torch.tensor([[[3.0, 0.0], [0.0, 3.0]]]))
    >>> classification_metrics(p, torch.tensor([0, 0]))["accuracy"]
    0.5

    None stands for what isn't a finite number: the NLL where a row's class has probability 0, the disagreement per
    error where no draw errs, the AUROC where all rows have one class, `ece20` where no bin has more than 5 rows.
    """
    return values_of(class_measures(p, y), y.numel(), p.log_probs.device)


def class_measures(p: Classification, y: Tensor) -> dict[str, Measure]:
    """The metrics of classes, each as a function of how often each row counts."""
    _same_rows(p.log_probs, y)
    per_error, y = _per_error(p, y), y.to(p.log_probs.device).flatten()
    probs, log_probs = p.probs.flatten(0, -2), p.log_probs.flatten(0, -2)
    confidence, correct = confident(probs, y)
    emp = Bins(confidence, correct, EMP_BINS, few=EMP_FEW)
    return {
        "accuracy": mean(correct),
        **({f"top{TOP}": mean(_in_top(probs, y, TOP))} if probs.shape[-1] > TOP else {}),
        "nll": mean(_nlls(log_probs, y)),
        "brier": mean(_briers(probs, y)),
        "ece": Bins(confidence, correct).expected,
        "ece20": emp.expected,
        "mce": Bins(confidence, correct).largest,
        "mce20": emp.largest,
        "adaptive_ece": Bins(confidence, correct, edges=equal_mass).expected,
        "classwise_ece": classwise(probs, y),
        **{name: mean(getattr(p, name).flatten()) for name in ("entropy", "aleatoric", "epistemic", "disagreement")},
        "normalised_disagreement": per_error,
        "aurc": area_under_risk(p.entropy.flatten(), ~correct),
        **(_binary_measures(log_probs, y) if probs.shape[-1] == 2 else {}),
    }


def accuracy(probs: Tensor, y: Tensor) -> Tensor:
    """The share of rows whose most probable class is theirs.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.5000)
    """
    return multiclass_accuracy(probs.argmax(-1), y, probs.shape[-1], average="micro")


def top_k(probs: Tensor, y: Tensor, k: int = TOP) -> Tensor:
    """The share of rows whose class is among their k most probable; 1 where there are no more classes than that.

    >>> top_k(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6]]), torch.tensor([1, 0]), k=2)
    tensor(0.5000, dtype=torch.float64)
    """
    return _in_top(probs, y, k).double().mean()


def nll(log_probs: Tensor, y: Tensor) -> Tensor:
    """The mean of -log p(y); the logarithm is that of the draws' mean probability, not a mean of logarithms.

    >>> nll(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0])).exp()
    tensor(4.0000, dtype=torch.float64)
    """
    return _nlls(log_probs, y).mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    """The mean of Σ (p - [class is y])² over the classes (Brier 1950, eq. 2): from 0 to 2.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.5000, dtype=torch.float64)
    """
    return _briers(probs, y).mean()


def normalised_disagreement(p: Classification, y: Tensor) -> Tensor:
    """The share of pairs of draws whose labels differ, over 1 - the draws' mean accuracy (Rank-1, section 3.5).

    Draws are the members. NaN where no draw errs: such draws can't differ.
    """
    return _per_error(p, y)(each_once(y.numel(), p.votes.device)).squeeze(0)


def _per_error(p: Classification, y: Tensor) -> Measure:
    right = p.votes.gather(-1, y.to(p.votes.device).unsqueeze(-1)).flatten()
    differing, erring = mean(p.disagreement.flatten()), mean(1 - right.double() / p.votes.sum(-1).flatten())
    return lambda times: differing(times) / erring(times)


def _binary_measures(log_probs: Tensor, y: Tensor) -> dict[str, Measure]:
    """How well the odds of class 1 tell it from class 0."""
    odds = log_probs[:, 1] - log_probs[:, 0]
    return {"auroc": area_under_roc(odds, y == 1), "average_precision": mean_precision(odds, y == 1)}


def _in_top(probs: Tensor, y: Tensor, k: int) -> Tensor:
    return (probs.topk(min(k, probs.shape[-1]), -1).indices == y.unsqueeze(-1)).any(-1)


def _nlls(log_probs: Tensor, y: Tensor) -> Tensor:
    return -log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1).double()


def _briers(probs: Tensor, y: Tensor) -> Tensor:
    own = y.unsqueeze(-1)
    gaps = probs.double().scatter_add(-1, own, -torch.ones_like(own, dtype=torch.float64))
    return gaps.square().sum(-1)


def _same_rows(log_probs: Tensor, y: Tensor) -> None:
    if y.shape != log_probs.shape[:-1] or not len(y):
        raise MetricError(
            f"predictions have shape {tuple(log_probs.shape)}, so labels must have shape "
            f"{tuple(log_probs.shape[:-1])}, with some rows; got {tuple(y.shape)}"
        )
    if not 0 <= int(y.min()) <= int(y.max()) < log_probs.shape[-1]:
        raise MetricError(f"labels from {int(y.min())} to {int(y.max())}: expected 0 to {log_probs.shape[-1] - 1}")
