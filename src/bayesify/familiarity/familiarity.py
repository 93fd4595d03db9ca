"""`Familiarity`: how familiar inputs are to a network, and how much to doubt its predictions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.batches import batches, check_count
from bayesify.errors import BayesifyError
from bayesify.familiarity.density import Density, Ranks, fit_density
from bayesify.familiarity.features import Call, FeatureNetwork
from bayesify.familiarity.files import read_familiarity, write_familiarity
from bayesify.familiarity.sample import sample_features
from bayesify.prediction.results import Prediction, Regression

FOLDS, LEAST_ROWS = 5, 20
"""Ranks come from so many folds of the rows, each scored by the others; fewer rows than this can't give any."""
WEIGHT = 2.0
"""What the excess over the held-out inputs' distances weighs in the doubt, beside the rank of the uncertainty."""
MARGIN = 0.1
"""A column is out of range beyond its lowest and highest training value by more than this share of their distance."""
CHANGED = 0.02
"""A layer's checksum that differs by more than this is from other weights; rounding to 16 bits changes it less."""


@dataclass(frozen=True, eq=False)
class Familiarity:
    """A density of the training inputs in a network's own features, which tells familiar inputs from others.

    A network may be sure of itself far from its training data, and so may all its draws. So its features are compared
    with those of the training inputs: what goes into up to six of its layers, from the first to the last, pooled over
    pixels or steps to means and standard deviations. In each layer the training inputs are Gaussians, one for each
    class, with one shared covariance (Lee et al. 2018), shrunk as in Ledoit and Wolf (2004). The distance of an input
    is the mean over layers of the standardised log-distance to the nearest centre. It is ranked among held-out inputs.

    >>> import bayesify as by
    >>> x, y = torch.randn(500, 4), torch.randint(3, (500,))
    >>> model = by.convert(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), by.Rank1(4))
    >>> f = by.Familiarity.fit(model, (x, y))
    >>> p = by.predict(model, torch.full((1, 4), 100.0), familiarity=f)
    >>> bool(p.familiarity < 1e-6)
    True

    Attributes:
        layers: The names of the layers.
        rows: How many training inputs the densities were fitted to.
    """

    layers: tuple[str, ...]
    rows: int
    densities: tuple[Density, ...] = field(repr=False)
    log_distances: Tensor = field(repr=False)  # (layers, 2): the mean and standard deviation of held-out inputs'
    ranks: Ranks = field(repr=False)
    checksums: tuple[float, ...] = field(default=(), repr=False)
    low: Tensor | None = field(default=None, repr=False)
    high: Tensor | None = field(default=None, repr=False)
    uncertainty: Ranks | None = field(default=None, repr=False)

    @classmethod
    @torch.no_grad()
    def fit(
        cls,
        model: nn.Module,
        data: Any,
        *,
        held_out: Any = None,
        layers: str | Sequence[str] | None = None,
        rows: int = 10_000,
        batch_size: int | None = 500,
        call: Call | None = None,
    ) -> Familiarity:
        """Fit the densities to training inputs, in one pass of the mean network.

        Args:
            model: A converted or a plain network. Of several components the mean of the first is used.
            data: As in `by.predict`: best a loader of (input, class) pairs. Without classes, there is one Gaussian.
                A pair of tensors counts as such, and a dict may have its classes in "labels".
            held_out: Data that the network was not trained on, for the ranks. By default each fifth of the rows is
                compared with the other four, which ranks inputs too low if the network has learnt its data by heart.
            layers: The names of the layers whose inputs are the features, such as "fc"; by default up to six of those
                with a matrix or kernel, evenly spread, the first and the last included.
            rows: At most so many rows are used, chosen at random from all; at least 20.
            batch_size: How many rows of a tensor to run at a time.
            call: As in `by.predict`.

        Returns:
            What `by.predict(…, familiarity=…)` takes.
        """
        check_count("rows", rows, least=LEAST_ROWS)
        names = [layers] if isinstance(layers, str) else layers
        network = FeatureNetwork(model, names, call)
        seen = sample_features(network, data, rows, batch_size)
        _require_rows("data", seen.features[0])
        features, labels = seen.features, seen.classes
        densities = [fit_density(x, labels) for x in features]
        if held_out is not None:
            others = sample_features(network, held_out, rows, batch_size)
            _require_rows("held_out", others.features[0])
            pairs = zip(densities, others.features, strict=True)
            distances = torch.stack([d.log_distance(x.double()) for d, x in pairs])
        else:
            distances = torch.stack([_cross_fitted(x, labels) for x in features])
        spread = distances.std(1, correction=0)
        if not bool((spread > 1e-6).any()):
            raise BayesifyError("all inputs have the same features, so none is less familiar: look at the data")
        moments = torch.stack([distances.mean(1), torch.where(spread > 1e-6, spread, 1.0)], 1)
        score = ((distances - moments[:, :1]) / moments[:, 1:]).mean(0)
        return cls(
            tuple(network.layers),
            len(features[0]),
            tuple(Density(*(t.float().contiguous() for t in vars(d).values())) for d in densities),
            moments.float(),
            Ranks.of(score),
            tuple(network.checksums()),
            seen.low,
            seen.high,
        )

    @torch.no_grad()
    def score(self, model: nn.Module, data: Any, *, batch_size: int | None = None, call: Call | None = None) -> Tensor:
        """How familiar inputs are, without a prediction, for converted and plain networks alike.

        Args:
            model: The network that the familiarity was fitted on.
            data: As in `by.predict`.
            batch_size: How many rows of a tensor to run at a time; by default all.
            call: As in `by.predict`.

        Returns:
            For each input the share of held-out inputs that are less familiar, from 0 to 1. Beyond the least
            familiar tenth of them it is the tail of an exponential distribution.
        """
        watch = self.watch(model, call)
        parts = [watch(watch.network.given(each)) for each in batches(data, batch_size, watch.network.batch_dim)]
        if not parts:
            raise BayesifyError("nothing to score: the data has no batches")
        return (-torch.cat(parts)).exp()

    def watch(self, model: nn.Module, call: Call | None = None) -> Watch:
        """What scores batches of inputs one by one, with a copy of the network as it is now."""
        return Watch(self, FeatureNetwork(model, self.layers, call))

    def calibrated(self, p: Prediction) -> Familiarity:
        """The same familiarity, which now also knows the usual uncertainty of held-out inputs, as `doubt` needs it.

        Args:
            p: A prediction of at least 20 held-out inputs with the same model.

        Returns:
            A new familiarity. Predictions with it have a `doubt`, too.
        """
        if not isinstance(p, Prediction):
            raise BayesifyError(f"calibrated: expected what by.predict returns, got {type(p).__name__}")
        usual = total_uncertainty(p)
        _require_rows("the prediction", usual)
        return replace(self, uncertainty=Ranks.of(usual))

    def doubt(self, p: Prediction) -> Tensor:
        """How much to doubt each prediction: the recommended score, which combines uncertainty and familiarity.

        It is -log of the share of held-out predictions that are more uncertain (by entropy or standard deviation),
        plus twice by how many mean excesses the distance is beyond that of nine in ten held-out inputs.

        Args:
            p: A prediction with its familiarity.

        Returns:
            The doubt of each row, from 0.
        """
        return sum(self.doubts(p).values(), torch.zeros(()))

    def doubts(self, p: Prediction) -> dict[str, Tensor]:
        """The two parts of the doubt: "uncertain" and "unfamiliar"."""
        if self.uncertainty is None:
            raise BayesifyError(
                "the usual uncertainty of held-out inputs is not known: call "
                "f = f.calibrated(by.predict(model, held_out_inputs)) first"
            )
        if p.familiarity is None:
            raise BayesifyError("the prediction has no familiarity: use by.predict(…, familiarity=f)")
        total = total_uncertainty(p)
        uncertain = Ranks(self.uncertainty.quantiles.to(total.device)).surprise(total)
        return {"uncertain": uncertain, "unfamiliar": WEIGHT * (-(10 * p.familiarity).clamp(1e-38, 1).log())}

    def out_of_range(self, x: Tensor) -> Tensor:
        """Which columns (N, D) of inputs are far outside the range that they have in the training data.

        Args:
            x: Inputs (N, D) as the network takes them.

        Returns:
            True where a value is beyond the lowest or highest by more than a tenth of their distance.
        """
        if self.low is None or self.high is None:
            raise BayesifyError("columns have ranges only where inputs are tensors (N, D) of floats")
        if x.dim() != 2 or x.shape[1] != len(self.low):
            raise BayesifyError(f"inputs of shape {tuple(x.shape)}: expected (N, {len(self.low)})")
        low, high = self.low.to(x.device), self.high.to(x.device)
        slack = MARGIN * (high - low) + 1e-6 * torch.maximum(low.abs(), high.abs())
        return (x < low - slack) | (x > high + slack)

    def save(self, path: str | Path) -> None:
        """Write it to a file in the format of safetensors.

        Args:
            path: The file; its folder must exist.
        """
        tensors = {f"{name}.{i}": t for i, d in enumerate(self.densities) for name, t in vars(d).items()}
        tensors |= {"log_distances": self.log_distances, "ranks": self.ranks.quantiles}
        if self.low is not None and self.high is not None:
            tensors |= {"low": self.low, "high": self.high}
        if self.uncertainty is not None:
            tensors["uncertainty"] = self.uncertainty.quantiles
        header = {"layers": list(self.layers), "rows": self.rows, "checksums": list(self.checksums)}
        write_familiarity(tensors, header, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Familiarity:
        """Read a file that `save` wrote; nothing in it is executed.

        Args:
            path: The file.

        Returns:
            The familiarity.

        Raises:
            CheckpointError: If `save` did not write the file.
        """
        header, tensors = read_familiarity(Path(path))
        names = ("mean", "scale", "whiten", "centres")
        count = len(header["layers"])
        return cls(
            tuple(header["layers"]),
            header["rows"],
            tuple(Density(*(tensors[f"{name}.{i}"] for name in names)) for i in range(count)),
            tensors["log_distances"],
            Ranks(tensors["ranks"]),
            tuple(header["checksums"]),
            tensors.get("low"),
            tensors.get("high"),
            Ranks(tensors["uncertainty"]) if "uncertainty" in tensors else None,
        )


class Watch:
    """Scores batches by a familiarity with one copy of a network."""

    def __init__(self, familiarity: Familiarity, network: FeatureNetwork) -> None:
        self.familiarity, self.network = familiarity, network
        self._on: tuple[torch.device, list[Density], Tensor, Ranks] | None = None
        known = familiarity.checksums
        if (
            known
            and not network.is_meta
            and any(abs(a - b) > CHANGED for a, b in zip(network.checksums(), known, strict=True))
        ):
            warnings.warn(
                "the familiarity was fitted on other weights than the network's: fit it again after training",
                stacklevel=3,
            )

    def __call__(self, batch: Any) -> Tensor:
        """-log of the familiarity of each row of what the network is called with."""
        found = self.network.of(batch)
        densities, moments, ranks = self._tensors(next(iter(found.values())).device)
        parts = []
        for (name, features), density, (mean, std) in zip(found.items(), densities, moments, strict=True):
            if features.shape[1] != len(density.mean):
                raise BayesifyError(
                    f"layer {name!r} has {features.shape[1]} features; the familiarity was fitted on a network with "
                    f"{len(density.mean)}: fit it on this one"
                )
            parts.append((density.log_distance(features) - mean) / std)
        return ranks.surprise(torch.stack(parts).mean(0))

    def add(self, p: Prediction, batch: Any) -> Prediction:
        """The prediction of a batch with its familiarity and, if the usual uncertainty is known, its doubt."""
        p = replace(p, familiarity=(-self(batch)).exp())
        return p if self.familiarity.uncertainty is None else replace(p, doubt=self.familiarity.doubt(p))

    def _tensors(self, device: torch.device) -> tuple[list[Density], Tensor, Ranks]:
        """The densities and ranks on a device."""
        if self._on is None or self._on[0] != device:
            f = self.familiarity
            densities = [Density(*(t.to(device) for t in vars(d).values())) for d in f.densities]
            self._on = device, densities, f.log_distances.to(device), Ranks(f.ranks.quantiles.to(device))
        return self._on[1:]


def total_uncertainty(p: Prediction) -> Tensor:
    """One number for each row: the entropy, or the standard deviation; of several, the (root) mean (square)."""
    value = p.std.square() if isinstance(p, Regression) else p.entropy  # type: ignore[attr-defined]
    value = value.flatten(1).mean(1) if value.dim() > 1 else value
    return value.sqrt() if isinstance(p, Regression) else value


def _require_rows(name: str, rows: Tensor) -> None:
    if len(rows) < LEAST_ROWS:
        raise BayesifyError(f"{name} has {len(rows)} rows: ranks among so few mean nothing, give at least {LEAST_ROWS}")


def _cross_fitted(features: Tensor, labels: Tensor | None) -> Tensor:
    """The log-distance of each row by a density of other rows. Rows come shuffled."""
    fold = torch.arange(len(features)) % FOLDS
    found = torch.empty(len(features), dtype=torch.float64)
    for k in range(FOLDS):
        rest = fold != k
        density = fit_density(features[rest], None if labels is None else labels[rest])
        found[~rest] = density.log_distance(features[~rest].double())
    return found
