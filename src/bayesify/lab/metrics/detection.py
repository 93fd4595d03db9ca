"""How well scores tell strange inputs from familiar ones, or one class from another."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from bayesify.lab.metrics.measure import Measure, MetricError, Ranked, before
from bayesify.prediction import Classification, Prediction, Regression

ACCEPTED = 0.95
"""The share of familiar inputs that FPR95 accepts."""


def scores(p: Prediction) -> dict[str, Tensor]:
    """A row's uncertainties, one number each, the total first: higher is stranger.

    Of classes: entropy, mutual information, 1 - the highest probability, and the variance of the probabilities over
    draws. Of real numbers: deviations of standardised targets, and where there are several, their root mean square.
    """
    if isinstance(p, Classification):
        unlikely = p.probs.scatter(-1, p.label.unsqueeze(-1), 0.0).sum(-1)  # which 1 - p would round to 0
        return {"entropy": p.entropy, "epistemic": p.epistemic, "max_probability": unlikely, "variance": p.variance}
    if isinstance(p, Regression):
        both = {"std": p.std, "epistemic_std": p.epistemic_std}
        return {name: std.square().flatten(1).mean(1).sqrt() for name, std in both.items()}
    raise MetricError(f"{type(p).__name__}: expected the prediction of classes or of real numbers")


def detection(familiar: Mapping[str, Tensor], strange: Mapping[str, Tensor]) -> dict[str, dict[str, float] | None]:
    """How well each score of two sets of inputs tells them apart; None for a score that is the same for all.

    >>> found = detection({"entropy": torch.tensor([0.1, 0.3])}, {"entropy": torch.tensor([0.2, 0.9])})
    >>> found["entropy"]["auroc"], found["entropy"]["fpr95"]
    (0.75, 0.5)

    (A network without draws has neither mutual information nor variance.)
    """
    return {name: _told_apart(values, strange[name]) for name, values in familiar.items()}


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


def fpr95(familiar: Tensor, strange: Tensor) -> Tensor:
    """The share of strange inputs that pass for familiar where 95% of the familiar ones do (Liang et al. 2018).

    >>> fpr95(torch.arange(20.0), torch.tensor([18.0, 18.5, 19.0, 40.0]))
    tensor(0.2500)
    """
    _some_of_both(familiar, strange)
    needed = math.ceil(ACCEPTED * len(familiar) - 1e-9)
    return (strange <= familiar.sort().values[needed - 1]).float().mean()


def area_under_roc(score: Tensor, truth: Tensor) -> Measure:
    """AUROC of finding the true rows by high scores, ties counting half."""
    ranked = Ranked(score)

    def measure(times: Tensor) -> Tensor:
        yes, no = ranked.totals(times, truth, ~truth)
        beaten = ((yes - before(yes)) * (no + before(no)) / 2).sum(-1)
        return beaten / (yes[:, -1] * no[:, -1])

    return measure


def mean_precision(score: Tensor, truth: Tensor) -> Measure:
    """Average precision of finding the true rows by high scores."""
    ranked = Ranked(-score)

    def measure(times: Tensor) -> Tensor:
        found, looked = ranked.totals(times, truth, torch.ones_like(truth))
        return ((found - before(found)) * found / looked.clamp_min(1)).sum(-1) / found[:, -1]

    return measure


def _told_apart(familiar: Tensor, strange: Tensor) -> dict[str, float] | None:
    _some_of_both(familiar, strange)
    if (familiar == familiar[0]).all() and (strange == familiar[0]).all():
        return None
    ways = {"auroc": auroc, "average_precision": average_precision, "fpr95": fpr95}
    return {name: float(way(familiar, strange)) for name, way in ways.items()}


def _ranked(familiar: Tensor, strange: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as ranks from 0 to 1, and which are strange's.

    Torchmetrics takes scores beyond 1 for logits, whose sigmoids round to ties; ranks keep their order.
    """
    _some_of_both(familiar, strange)
    values, rank = torch.cat([familiar, strange]).unique(return_inverse=True)
    truth = torch.cat([torch.zeros(len(familiar)), torch.ones(len(strange))]).long()
    return rank.double() / len(values), truth.to(rank.device)


def _some_of_both(familiar: Tensor, strange: Tensor) -> None:
    if not len(familiar) or not len(strange):
        raise MetricError(f"{len(familiar)} familiar and {len(strange)} strange inputs: expected some of both")
