"""Out-of-distribution detection: how well a score tells out-of-distribution inputs from in-distribution ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from bayesify.lab.metrics.weighted import Measure, MetricError, Ranked, previous_totals
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression

ACCEPTED = 0.95
"""The share of in-distribution inputs that FPR95 accepts."""
LEAST = 1e-38
"""Familiarities below this count as this, so that their logarithms are finite."""


def scores(p: Prediction) -> dict[str, Tensor]:
    """The uncertainty scores of each row, the total one first; out-of-distribution inputs should score higher.

    For classes: entropy, mutual information, 1 - the highest probability, and the variance of the probabilities over
    draws; for several labels and for a class of each pixel the means of the first three over these. For real numbers:
    standard deviations of standardised targets; if there are several, the root mean square. If the prediction has them,
    also -log of the familiarity, and the doubt.

    Args:
        p: A prediction.

    Returns:
        Scores (N,) by name.

    Raises:
        MetricError: If the prediction is of another kind.
    """
    if isinstance(p, BinaryPrediction) or (isinstance(p, Classification) and p.log_probs.dim() > 2):
        each = {"entropy": p.entropy, "epistemic": p.epistemic, "max_probability": 1 - p.confidence}
        return {name: values.reshape(len(values), -1).mean(1) for name, values in each.items()} | _of_familiarity(p)
    if isinstance(p, Classification):
        unlikely = p.probs.scatter(-1, p.label.unsqueeze(-1), 0.0).sum(-1)  # more precise than 1 - p
        found = {"entropy": p.entropy, "epistemic": p.epistemic, "max_probability": unlikely, "variance": p.variance}
        return found | _of_familiarity(p)
    if isinstance(p, Regression):
        both = {"std": p.std, "epistemic_std": p.epistemic_std}
        return {name: std.square().flatten(1).mean(1).sqrt() for name, std in both.items()} | _of_familiarity(p)
    raise MetricError(f"{type(p).__name__}: expected a prediction of classes, labels or real numbers")


def _of_familiarity(p: Prediction) -> dict[str, Tensor]:
    found = {} if p.familiarity is None else {"familiarity": -p.familiarity.clamp_min(LEAST).log()}
    return found if p.doubt is None else found | {"doubt": p.doubt}


def detection(in_dist: Mapping[str, Tensor], ood: Mapping[str, Tensor]) -> dict[str, dict[str, float] | None]:
    """AUROC, average precision and FPR95 of each score; None for a score that is the same for all inputs.

    Args:
        in_dist: Scores of in-distribution inputs, by name.
        ood: Scores of out-of-distribution inputs, by name.

    Returns:
        The metrics of each score.

    Raises:
        MetricError: If either set is empty.

    >>> found = detection({"entropy": torch.tensor([0.1, 0.3])}, {"entropy": torch.tensor([0.2, 0.9])})
    >>> found["entropy"]["auroc"], found["entropy"]["fpr95"]
    (0.75, 0.5)

    (The mutual information and the variance of a single network are 0 for all inputs.)
    """
    return {name: _detection_metrics(values, ood[name]) for name, values in in_dist.items()}


def auroc(in_dist: Tensor, ood: Tensor) -> Tensor:
    """The probability that an out-of-distribution input scores higher than an in-distribution one, ties counting half.

    Args:
        in_dist: The scores of in-distribution inputs.
        ood: The scores of out-of-distribution inputs.

    Returns:
        The probability, from 0 to 1.

    Raises:
        MetricError: If either is empty.

    >>> auroc(torch.tensor([0.1, 5.0]), torch.tensor([7.0, 9.0]))
    tensor(1.)
    """
    return binary_auroc(*_ranked(in_dist, ood)).float()


def average_precision(in_dist: Tensor, ood: Tensor) -> Tensor:
    """The average precision of detecting out-of-distribution inputs by high scores.

    Args:
        in_dist: The scores of in-distribution inputs.
        ood: The scores of out-of-distribution inputs.

    Returns:
        The average precision, from 0 to 1.

    Raises:
        MetricError: If either is empty.

    >>> average_precision(torch.tensor([0.1, 5.0]), torch.tensor([7.0, 9.0]))
    tensor(1.)
    """
    return binary_average_precision(*_ranked(in_dist, ood)).float()


def fpr95(in_dist: Tensor, ood: Tensor) -> Tensor:
    """The share of out-of-distribution inputs accepted if 95% of in-distribution ones are (Liang et al. 2018).

    Args:
        in_dist: The scores of in-distribution inputs.
        ood: The scores of out-of-distribution inputs.

    Returns:
        The share, from 0 to 1.

    Raises:
        MetricError: If either is empty.

    >>> fpr95(torch.arange(20.0), torch.tensor([18.0, 18.5, 19.0, 40.0]))
    tensor(0.2500)
    """
    _require_both(in_dist, ood)
    needed = math.ceil(ACCEPTED * len(in_dist) - 1e-9)
    return (ood <= in_dist.sort().values[needed - 1]).float().mean()


def area_under_roc(score: Tensor, truth: Tensor) -> Measure:
    """AUROC of detecting the true rows by high scores, ties counting half."""
    ranked = Ranked(score)

    def measure(counts: Tensor) -> Tensor:
        yes, no = ranked.totals(counts, truth, ~truth)
        beaten = ((yes - previous_totals(yes)) * (no + previous_totals(no)) / 2).sum(-1)
        return beaten / (yes[:, -1] * no[:, -1])

    return measure


def mean_precision(score: Tensor, truth: Tensor) -> Measure:
    """Average precision of detecting the true rows by high scores."""
    ranked = Ranked(-score)

    def measure(counts: Tensor) -> Tensor:
        found, looked = ranked.totals(counts, truth, torch.ones_like(truth))
        return ((found - previous_totals(found)) * found / looked.clamp_min(1)).sum(-1) / found[:, -1]

    return measure


def _detection_metrics(in_dist: Tensor, ood: Tensor) -> dict[str, float] | None:
    _require_both(in_dist, ood)
    if (in_dist == in_dist[0]).all() and (ood == in_dist[0]).all():
        return None
    functions = {"auroc": auroc, "average_precision": average_precision, "fpr95": fpr95}
    return {name: float(function(in_dist, ood)) for name, function in functions.items()}


def _ranked(in_dist: Tensor, ood: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as ranks from 0 to 1, and which of them are out-of-distribution.

    Torchmetrics takes scores above 1 for logits, whose sigmoids round to ties; ranks keep the order.
    """
    _require_both(in_dist, ood)
    values, rank = torch.cat([in_dist, ood]).unique(return_inverse=True)
    truth = torch.cat([torch.zeros(len(in_dist)), torch.ones(len(ood))]).long()
    return rank.double() / len(values), truth.to(rank.device)


def _require_both(in_dist: Tensor, ood: Tensor) -> None:
    if not len(in_dist) or not len(ood):
        raise MetricError(
            f"{len(in_dist)} in-distribution and {len(ood)} out-of-distribution inputs: expected some of both"
        )
