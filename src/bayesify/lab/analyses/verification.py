"""Verification: are two inputs of the same identity? By the distance of features, averaged over draws.

BayesAdapter, section 4.3 and appendix B: the network has never seen the identities, so its last layer is of no use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.analyses.analysis import AnalysisError, Chart
from bayesify.lab.analyses.style import SOFT, colour
from bayesify.lab.metrics import auroc
from bayesify.layers import bayesian_layers


@dataclass(frozen=True)
class Verification(Chart):
    """The accuracy in each fold, the threshold it was measured with, and the ROC curve over the pairs of all folds.

    `false_accepts` and `true_accepts` are the shares of pairs of different and of equal identity that are accepted at
    rising thresholds, `auroc` is the area under that curve.
    """

    accuracies: np.ndarray
    thresholds: np.ndarray
    false_accepts: np.ndarray
    true_accepts: np.ndarray
    auroc: float

    @property
    def accuracy(self) -> float:
        """The mean over folds, as papers report it."""
        return float(self.accuracies.mean())

    @property
    def axis_names(self) -> tuple[str, str]:
        return ("false accept rate", "true accept rate")

    def columns(self) -> dict[str, np.ndarray]:
        return {"false_accepts": self.false_accepts, "true_accepts": self.true_accepts}

    def draw(self, axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=SOFT, lw=1)
        axes.plot(self.false_accepts, self.true_accepts, color=colour(0), label="ROC")
        axes.text(0.97, 0.05, f"{self.accuracy:.1%} right, area {self.auroc:.3f}", ha="right", fontsize=9)


def verification(features: Tensor, identities: Tensor, *, folds: int = 10, seed: int = 0) -> Verification:
    """Verify pairs of inputs: equal identities should have closer features than different ones.

    As in LFW's protocol, identities are divided into folds, and pairs are within a fold: all of equal identity, and as
    many of different ones, at random. The accuracy in a fold is that of the threshold which is best on all others.
    Features are normalised, so that the squared Euclidean distance is twice one minus their cosine.

    Args:
        features: Features (N, D), such as those of `mean_features`.
        identities: Whose input each row is, (N,).
        folds: The number of folds; there must be two identities for each.
        seed: The seed of the folds and of the pairs.

    Returns:
        Accuracies and the ROC curve.

    Raises:
        AnalysisError: If there are too few identities or rows.

    >>> identities = torch.arange(40).repeat_interleave(3)
    >>> found = verification(torch.nn.functional.one_hot(identities).float(), identities)
    >>> found.accuracy, found.auroc
    (1.0, 1.0)
    """
    if features.dim() != 2 or identities.shape != features.shape[:1]:
        raise AnalysisError(
            f"features of shape {tuple(features.shape)} and identities of shape {tuple(identities.shape)}: expected "
            "(N, D) and (N,)"
        )
    names, whose = identities.cpu().unique(return_inverse=True)
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2 or len(names) < 2 * folds:
        raise AnalysisError(
            f"folds={folds!r}: expected an integer >= 2, with two identities for each; there are {len(names)}"
        )
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randperm(len(names), generator=generator).tensor_split(folds)
    pairs = [_pairs((whose[:, None] == part).any(1).nonzero().flatten(), whose, generator) for part in parts]
    directions = nn.functional.normalize(features.cpu().double(), dim=1)
    distance = [(directions[pair[0]] - directions[pair[1]]).square().sum(1) for pair in pairs]
    same = [whose[pair[0]] == whose[pair[1]] for pair in pairs]
    if not all(part.any() and not part.all() for part in same):
        raise AnalysisError("a fold has no pair of equal identity, or none of different ones: give more inputs of each")
    thresholds, accuracies = [], []
    for fold in range(folds):
        others = [each for each in range(folds) if each != fold]
        threshold = _best(torch.cat([distance[each] for each in others]), torch.cat([same[each] for each in others]))
        thresholds.append(threshold)
        accuracies.append(float(((distance[fold] <= threshold) == same[fold]).double().mean()))
    far, near = _curve(torch.cat(distance), torch.cat(same))
    area = float(auroc(torch.cat(distance)[torch.cat(same)], torch.cat(distance)[~torch.cat(same)]))
    return Verification(np.array(accuracies), np.array(thresholds), far, near, area)


def mean_features(
    model: nn.Module,
    x: Tensor,
    samples: int | None = None,
    *,
    layer: str | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> Tensor:
    """The features that a layer is given, averaged over draws (BayesAdapter, appendix B).

    Args:
        model: A network, Bayesian or plain.
        x: Prepared inputs.
        samples: The number of draws, as in `by.predict`.
        layer: The name of the layer; by default the last `Linear`.
        seed: The seed of the draws.
        batch_size: Inputs per batch; by default all.

    Returns:
        Features (N, D).

    Raises:
        AnalysisError: If there is no such layer.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if layer is None and not names:
        raise AnalysisError(f"{type(model).__name__} has no Linear layer; name the one whose inputs are the features")
    name = layer if layer is not None else names[-1]
    if name not in dict(model.named_modules()):
        raise AnalysisError(f"the network has no layer {name!r}; its Linear layers are {', '.join(names)}")

    def features_of(network: nn.Module, batch: Any) -> Tensor:
        found: list[Tensor] = []
        handle = network.get_submodule(name).register_forward_pre_hook(lambda _, args: found.append(args[0].flatten(1)))
        try:
            network(batch)
        finally:
            handle.remove()
        if not found:
            raise AnalysisError(f"layer {name!r} is not called")
        return found[0]

    if bayesian_layers(model):
        p = by.predict(
            model,
            x,
            samples,
            seed=seed,
            likelihood=by.Gaussian(1.0),
            batch_size=batch_size,
            draws=False,
            call=features_of,
        )
        mean: Tensor = p.mean
        return mean
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([features_of(model, part) for part in x.split(batch_size or max(len(x), 1))])
    finally:
        model.train(was_training)


def _pairs(rows: Tensor, whose: Tensor, generator: torch.Generator) -> Tensor:
    """All pairs of rows with equal identity, and as many with different ones: (2, pairs)."""
    every = torch.combinations(rows, 2).T
    same = whose[every[0]] == whose[every[1]]
    other = every[:, ~same]
    chosen = torch.randperm(other.shape[1], generator=generator)[: int(same.sum())]
    return torch.cat([every[:, same], other[:, chosen]], 1)


def _best(distance: Tensor, same: Tensor) -> float:
    """The threshold up to which most pairs are rightly taken for equal."""
    rising, order = distance.sort()
    right = torch.where(same[order], 1, -1).cumsum(0)  # accepted equal ones less accepted different ones
    ends = torch.cat([rising[1:] != rising[:-1], rising.new_ones(1, dtype=torch.bool)]).nonzero().flatten()
    place = int(ends[right[ends].argmax()])
    following = rising[min(place + 1, len(rising) - 1)]
    return float((rising[place] + following) / 2)


def _curve(distance: Tensor, same: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The shares of different and of equal pairs that are accepted at each threshold."""
    rising, order = distance.sort()
    ends = torch.cat([rising[1:] != rising[:-1], rising.new_ones(1, dtype=torch.bool)])
    counts = [torch.where(kind[order], 1.0, 0.0).cumsum(0)[ends] / kind.sum() for kind in (~same, same)]
    far, near = (torch.nn.functional.pad(each, (1, 0)).numpy() for each in counts)
    return far, near
