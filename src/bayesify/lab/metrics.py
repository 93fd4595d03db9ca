"""How good predictions are: functions of tensors, on torchmetrics where it has them."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    multiclass_accuracy,
    multiclass_calibration_error,
)

from bayesify.errors import BayesifyError
from bayesify.lab.data import Reals
from bayesify.prediction import Classification, Prediction, Regression

BINS = 15
INTERVAL = 0.9
"""The probability of the interval whose coverage is measured."""


class MetricError(BayesifyError):
    """Predictions and targets that can't be measured."""


def classification_metrics(p: Classification, y: Tensor) -> dict[str, float]:
    """Accuracy, scores and calibration of predicted classes, and their mean uncertainties in nats.

    >>> from bayesify import Categorical
    >>> p = Categorical().predictive(torch.tensor([[[3.0, 0.0], [0.0, 3.0]]]))
    >>> classification_metrics(p, torch.tensor([0, 0]))["accuracy"]
    0.5
    """
    _same_rows(p.log_probs, y)
    y = y.to(p.log_probs.device)
    measures = {
        "accuracy": accuracy(p.probs, y),
        "nll": nll(p.log_probs, y),
        "ece": ece(p.probs, y),
        "brier": brier(p.probs, y),
    }
    means = {name: getattr(p, name).double().mean() for name in ("entropy", "aleatoric", "epistemic")}
    return {name: float(value) for name, value in {**measures, **means}.items()}


def regression_metrics(p: Regression, y: Tensor, targets: Reals) -> dict[str, float]:
    """Error, density and coverage in the targets' own units; `y` is standardised, as the examples have it.

    With several targets, the error and the deviations are means over them, and each one's error has its name.
    """
    if p.mean.shape != y.shape:
        raise MetricError(f"predictions have shape {tuple(p.mean.shape)}, targets {tuple(y.shape)}; they must be equal")
    y = y.to(p.mean.device)
    scale = torch.tensor(targets.std, dtype=torch.float64, device=y.device)
    errors = (p.mean.double() - y.double()).square().mean(0).sqrt() * scale
    found = {
        "rmse": errors.mean(),
        "log_density": p.log_prob(y).double().mean() - scale.log().sum(),
        "coverage": coverage(p, y),
    }
    for name in ("std", "aleatoric_std", "epistemic_std"):
        found[name] = (getattr(p, name).double().mean(0) * scale).mean()
    if targets.count > 1:
        found |= {f"rmse_{name}": error for name, error in zip(targets.names, errors, strict=True)}
    return {name: float(value) for name, value in found.items()}


def accuracy(probs: Tensor, y: Tensor) -> Tensor:
    """The share of rows whose most probable class is theirs.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.5000)
    """
    return multiclass_accuracy(probs.argmax(-1), y, probs.shape[-1], average="micro")


def nll(log_probs: Tensor, y: Tensor) -> Tensor:
    """The mean of -log p(y); the logarithm is that of the draws' mean probability, not a mean of logarithms.

    >>> nll(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0])).exp()
    tensor(4.0000, dtype=torch.float64)
    """
    return -log_probs.double().gather(-1, y.unsqueeze(-1)).mean()


def ece(probs: Tensor, y: Tensor, bins: int = BINS) -> Tensor:
    """The expected calibration error: |accuracy - confidence| in equal bins of confidence, weighted by their sizes.

    >>> ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    tensor(0.4000)
    """
    # A probability that rounding left above 1 would make torchmetrics take them all for logits.
    probs = probs.clamp(0, 1)
    return multiclass_calibration_error(probs, y, probs.shape[-1], n_bins=bins, norm="l1")


def brier(probs: Tensor, y: Tensor) -> Tensor:
    """The mean of Σ (p - [class is y])² over the classes (Brier 1950, eq. 2): from 0 to 2.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.5000, dtype=torch.float64)
    """
    truth = torch.nn.functional.one_hot(y, probs.shape[-1])
    return (probs.double() - truth).square().sum(-1).mean()


def coverage(p: Regression, y: Tensor, probability: float = INTERVAL) -> Tensor:
    """The share of targets in the predictive interval of a probability, which a calibrated model makes equal to it."""
    low, high = p.interval(probability)
    return ((low <= y) & (y <= high)).double().mean()


def quantile_of(p: Regression, y: Tensor) -> Tensor:
    """P(target ≤ y) of each row's predictive; uniform between 0 and 1 where it is calibrated (Dawid 1984)."""
    if p.draws is None or p.draw_stds is None:
        below: Tensor = torch.special.ndtr((y - p.mean) / p.std)
    else:
        below = torch.special.ndtr((y - p.draws) / p.draw_stds).mean(0)
    return below


def auroc(familiar: Tensor, strange: Tensor) -> Tensor:
    """The probability that a strange input scores higher than a familiar one, ties counting half.

    >>> auroc(torch.tensor([0.1, 5.0]), torch.tensor([7.0, 9.0]))
    tensor(1.)
    """
    return binary_auroc(*_ranked(familiar, strange)).float()


def average_precision(familiar: Tensor, strange: Tensor) -> Tensor:
    """The mean precision of finding strange inputs by high scores, over all recalls.

    >>> average_precision(torch.tensor([0.1, 5.0]), torch.tensor([7.0, 9.0]))
    tensor(1.)
    """
    return binary_average_precision(*_ranked(familiar, strange)).float()


def scores(p: Prediction) -> dict[str, Tensor]:
    """A row's total and epistemic uncertainty, one number each: entropies, or standard deviations.

    Deviations are those of standardised targets, and where there are several, their root mean square.
    """
    if isinstance(p, Classification):
        return {"entropy": p.entropy, "epistemic": p.epistemic}
    if isinstance(p, Regression):
        both = {"std": p.std, "epistemic_std": p.epistemic_std}
        return {name: std.square().flatten(1).mean(1).sqrt() for name, std in both.items()}
    raise MetricError(f"{type(p).__name__}: expected the prediction of classes or of real numbers")


def _ranked(familiar: Tensor, strange: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as ranks from 0 to 1, and which are strange's.

    Torchmetrics takes scores beyond 1 for logits, whose sigmoids round to ties; ranks keep their order.
    """
    if not len(familiar) or not len(strange):
        raise MetricError(f"{len(familiar)} familiar and {len(strange)} strange inputs: expected some of both")
    values, rank = torch.cat([familiar, strange]).unique(return_inverse=True)
    truth = torch.cat([torch.zeros(len(familiar)), torch.ones(len(strange))]).long()
    return rank.double() / len(values), truth.to(rank.device)


def _same_rows(log_probs: Tensor, y: Tensor) -> None:
    if y.shape != log_probs.shape[:-1]:
        raise MetricError(
            f"predictions have shape {tuple(log_probs.shape)}, so labels must have shape "
            f"{tuple(log_probs.shape[:-1])}; got {tuple(y.shape)}"
        )
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < log_probs.shape[-1]:
        raise MetricError(f"labels from {int(y.min())} to {int(y.max())}: expected 0 to {log_probs.shape[-1] - 1}")
