"""What `predict` returns: the average over draws and its uncertainty."""

import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bayesify.errors import BayesifyError, CheckpointError
from bayesify.methods.distributions import entropy
from bayesify.tensor_files import write_tensors

OPTIONAL = ("draws", "draw_stds", "familiarity", "doubt")
"""The fields that a prediction may lack."""


@dataclass(frozen=True, repr=False)
class Prediction:
    """The posterior predictive of a batch from `samples` draws; `draws` (S, B, …) are the outputs, if kept.

    With adaptive sampling a row has `draws_used` draws, at most `samples`. `standard_error` estimates how far their
    average is from that of infinitely many draws: for the probabilities of classes or of yes, or for the mean of a
    regression. It is estimated with as many degrees of freedom as `freedom` has for each row; see `margin`. With a
    `by.Familiarity`, `familiarity` is the share of held-out inputs that are less familiar than a row's, and `doubt`
    says how little to trust the row. `p[3]`, `p[:10]` and `p[p.confidence < 0.9]` are predictions of some rows.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    """What `to_dict` has of each row, beside familiarity and doubt."""

    samples: int
    draws: Tensor | None
    draws_used: Tensor = field(kw_only=True)
    standard_error: Tensor = field(kw_only=True)
    freedom: Tensor = field(kw_only=True)
    familiarity: Tensor | None = field(kw_only=True, default=None)
    doubt: Tensor | None = field(kw_only=True, default=None)

    def margin(self, level: float = 0.95) -> Tensor:
        """How far from the average the value of infinitely many draws is at most, with a probability of `level`.

        >>> import bayesify as by
        >>> p = by.Categorical().predictive(torch.tensor([[[0.0, 0.0]], [[0.0, 1.0]], [[0.0, 2.0]]]))
        >>> p.probs[..., 1], p.standard_error[..., 1], p.margin()[..., 1]  # Student's t for two degrees: 4.30
        (tensor([0.7040]), tensor([0.1108]), tensor([0.4766]))

        Args:
            level: The probability.

        Returns:
            The standard errors times a quantile of Student's t.
        """
        if not 0 < level < 1:
            raise BayesifyError(f"margin({level!r}): expected a probability between 0 and 1, like 0.95")
        if self.freedom.is_meta:
            return torch.empty_like(self.standard_error)
        degrees, place = self.freedom.unique(return_inverse=True)
        quantiles = [student_quantile((1 + level) / 2, int(each)) for each in degrees.tolist()]
        return self.standard_error * self.standard_error.new_tensor(quantiles)[place]

    @classmethod
    def join(cls, parts: Sequence[Self], dim: int = 0) -> Self:
        """Concatenate the predictions of consecutive batches, whose rows are in dimension `dim`."""
        if not parts:
            raise BayesifyError("nothing to predict: the data has no batches")
        if len(parts) == 1:
            return parts[0]
        dims = {name: at for name, (_, at) in parts[0]._tensors(dim).items()}
        joined: dict[str, Any] = {name: torch.cat([getattr(p, name) for p in parts], at) for name, at in dims.items()}
        return replace(parts[0], **joined, samples=max(part.samples for part in parts))

    def rows(self, index: Tensor, dim: int = 0) -> Self:
        """The prediction for some rows, which are in dimension `dim`."""
        some: dict[str, Any] = {name: x.index_select(at, index) for name, (x, at) in self._tensors(dim).items()}
        return replace(self, **some)

    def __len__(self) -> int:
        return len(self.draws_used)

    def __repr__(self) -> str:
        main = "mean" if "mean" in self.columns else "probs"
        shape = tuple(getattr(self, main).shape)
        return f"{type(self).__name__}({len(self)} rows, {main} {shape}, {self.samples} draws)"

    def __getitem__(self, index: Any) -> Self:
        places = torch.arange(len(self))[index.cpu() if isinstance(index, Tensor) else index]
        return self.rows(places.reshape(-1).to(self.draws_used.device))

    def to_dict(self) -> dict[str, Any]:
        """The values of each row as lists, by name: label, confidence, uncertainties, …, as `columns` lists them."""
        names = (*self.columns, *(name for name in ("familiarity", "doubt") if getattr(self, name) is not None))
        return {name: getattr(self, name).tolist() for name in names}

    def to_dataframe(self) -> Any:
        """The same as a DataFrame of pandas, with a column for each class or target, such as `probs_0`."""
        pandas = importlib.import_module("pandas")
        columns: dict[str, Any] = {}
        for name, rows in self.to_dict().items():
            several = isinstance(rows[0], list) if rows else False
            if several and isinstance(rows[0][0], list):
                raise BayesifyError(f"{name} has more than two dimensions, which no table has; use p.to_dict()")
            parts = enumerate(zip(*rows, strict=True)) if several else []
            columns |= {f"{name}_{i}": part for i, part in parts} if several else {name: rows}
        return pandas.DataFrame(columns)

    def save(self, path: str | Path) -> None:
        """Write the prediction to a safetensors file, whole or not at all; `Prediction.load` reads it.

        Args:
            path: The file; its folder must exist.
        """
        tensors = {name: x.detach().cpu().contiguous().clone() for name, (x, _) in self._tensors(0).items()}
        header = {"kind": type(self).__name__, "samples": self.samples}
        write_tensors(tensors, Path(path), {"bayesify_prediction": json.dumps(header)})

    @staticmethod
    def load(path: str | Path) -> "Prediction":
        """Read a prediction that `save` has written.

        Args:
            path: The file.

        Returns:
            The prediction, on the CPU.

        Raises:
            CheckpointError: If `save` did not write the file.
        """
        try:
            with safe_open(path, "pt") as file:
                header = json.loads((file.metadata() or {})["bayesify_prediction"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            kinds = (Classification, BinaryPrediction, Regression, CountPrediction)
            kind = {each.__name__: each for each in kinds}[header["kind"]]
            missing = {each.name: None for each in fields(kind) if each.name in OPTIONAL}
            return kind(**{**missing, "samples": int(header["samples"]), **tensors})
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: not a file of Prediction.save, or damaged ({error!r})") from error

    def _tensors(self, dim: int) -> dict[str, tuple[Tensor, int]]:
        """Each field that is a tensor, and in which dimension its rows are."""
        dims = {"draws": dim + 1, "draw_stds": dim + 1, "draws_used": 0, "familiarity": 0, "doubt": 0}
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: (x, dims.get(name, dim)) for name, x in values.items() if isinstance(x, Tensor)}


@dataclass(frozen=True, repr=False)
class Classification(Prediction):
    """Classes: `log_probs` is the log-mean-exp over draws; `aleatoric` the mean entropy of the draws (iBNN, eq. 26).

    >>> from bayesify import Categorical
    >>> p = Categorical().predictive(torch.tensor([[[9.0, -9.0]], [[-9.0, 9.0]]]))
    >>> p.probs, round(float(p.epistemic), 3)
    (tensor([[0.5000, 0.5000]]), 0.693)
    """

    columns = ("label", "confidence", "entropy", "aleatoric", "epistemic", "probs")
    log_probs: Tensor
    mean_log_probs: Tensor  # over draws; its softmax is that of the mean logits
    aleatoric: Tensor
    votes: Tensor  # for each class, how many draws predict it
    variance: Tensor  # of a class's probability over draws, averaged over classes

    @property
    def probs(self) -> Tensor:
        """The predictive probabilities."""
        return self.log_probs.exp()

    @property
    def label(self) -> Tensor:
        """The most probable class."""
        return self.log_probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class."""
        return self.probs.max(-1).values

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty, in nats."""
        return entropy(self.log_probs)

    @property
    def epistemic(self) -> Tensor:
        """The mutual information of label and draw: entropy - aleatoric (iBNN, eq. 27)."""
        return (self.entropy - self.aleatoric).clamp_min(0)

    @property
    def disagreement(self) -> Tensor:
        """The fraction of pairs of draws whose labels differ."""
        return disagreement_of(self.votes)


@dataclass(frozen=True, repr=False)
class BinaryPrediction(Prediction):
    """Independent yes-or-no labels: `log_probs` and `log_not_probs` of yes and no, each a log-mean-exp over draws."""

    columns = ("label", "confidence", "entropy", "aleatoric", "epistemic", "probs")
    log_probs: Tensor
    log_not_probs: Tensor
    aleatoric: Tensor
    disagreement: Tensor

    @property
    def probs(self) -> Tensor:
        """The predictive probability of yes."""
        return self.log_probs.exp()

    @property
    def label(self) -> Tensor:
        """1 where yes is at least as probable as no."""
        return (self.log_probs >= self.log_not_probs).long()

    @property
    def confidence(self) -> Tensor:
        """The probability of the more probable answer."""
        return torch.maximum(self.log_probs, self.log_not_probs).exp()

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty of each label, in nats."""
        return entropy(torch.stack([self.log_probs, self.log_not_probs], -1))

    @property
    def epistemic(self) -> Tensor:
        """The mutual information of each label and the draw."""
        return (self.entropy - self.aleatoric).clamp_min(0)


@dataclass(frozen=True, repr=False)
class Regression(Prediction):
    """Real targets: a mixture of one Gaussian per draw, with means `draws` and standard deviations `draw_stds`.

    Without kept draws `interval` and `log_prob` use the Gaussian of the same mean and variance.
    """

    columns = ("mean", "std", "aleatoric_std", "epistemic_std")
    mean: Tensor
    epistemic_std: Tensor
    aleatoric_std: Tensor
    draw_stds: Tensor | None

    @property
    def std(self) -> Tensor:
        """The predictive standard deviation: variance of the means plus mean of the variances."""
        return (self.epistemic_std.square() + self.aleatoric_std.square()).sqrt()

    def log_prob(self, target: Tensor) -> Tensor:
        """The log-density of targets, summed over a row's dimensions: a log-mean-exp over draws."""
        if target.shape != self.mean.shape:
            raise BayesifyError(f"targets have shape {tuple(target.shape)}, predictions {tuple(self.mean.shape)}")
        if self.draws is None or self.draw_stds is None:
            return gaussian_log_prob(target, self.mean, self.std)
        each = gaussian_log_prob(target.unsqueeze(0), self.draws, self.draw_stds, batch_dims=2)
        return each.logsumexp(0) - math.log(self.samples)

    def interval(self, p: float) -> tuple[Tensor, Tensor]:
        """The bounds of the central interval in which a target lies with probability p."""
        if not 0 < p < 1:
            raise BayesifyError(f"interval({p!r}): expected a probability between 0 and 1")
        return self._quantile((1 - p) / 2), self._quantile((1 + p) / 2)

    def _quantile(self, q: float) -> Tensor:
        if self.draws is None or self.draw_stds is None:
            return self.mean + self.std * NormalDist().inv_cdf(q)
        low = (self.draws - 12 * self.draw_stds).amin(0)
        high = (self.draws + 12 * self.draw_stds).amax(0)
        for _ in range(60):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle - self.draws) / self.draw_stds).mean(0) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


@dataclass(frozen=True, repr=False)
class CountPrediction(Regression):
    """Counts: a mixture of one Poisson distribution per draw, with the rates `draws`; `std` is that of the counts.

    Without kept draws, `interval` and `log_prob` take rates for log-normal, with the mean and the spread of all.
    """

    def log_prob(self, target: Tensor) -> Tensor:
        """The log-probability of counts, summed over a row's dimensions: a log-mean-exp over draws."""
        if target.shape != self.mean.shape:
            raise BayesifyError(f"targets have shape {tuple(target.shape)}, predictions {tuple(self.mean.shape)}")
        rates = self._rates()
        each = poisson_log_prob(target.unsqueeze(0), rates.log())
        each = each.flatten(2).sum(-1) if each.dim() > 2 else each
        return each.logsumexp(0) - math.log(len(rates))

    def _rates(self) -> Tensor:
        """Equally likely rates (S, B, …): those of the draws, or 50 quantiles of a log-normal distribution."""
        if self.draws is not None:
            return self.draws
        places = self.mean.new_tensor([NormalDist().inv_cdf((place + 0.5) / 50) for place in range(50)])
        std = (self.epistemic_std / self.mean.clamp_min(1e-12)).square().log1p().sqrt()
        rates = (places.reshape(-1, *[1] * std.dim()) * std).exp()
        return rates * self.mean / rates.mean(0)

    def _quantile(self, q: float) -> Tensor:
        """The smallest count up to which the probability is at least q."""
        rates = self._rates().double()
        most = rates.amax(0)
        low, high = torch.full_like(most, -1.0), (most + 40 * most.sqrt() + 40).ceil()
        for _ in range(60):
            middle = ((low + high) / 2).floor()
            below = (middle < 0) | (torch.special.gammaincc(middle.clamp_min(0) + 1, rates).mean(0) < q)
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high.to(self.mean.dtype)


def poisson_log_prob(target: Tensor, log_rate: Tensor) -> Tensor:
    """The log-probability of each count: k log λ - λ - log k!, where 0 log 0 = 0."""
    return torch.where(target > 0, target * log_rate, 0.0) - log_rate.exp() - torch.lgamma(target + 1.0)


@cache
def student_quantile(p: float, freedom: int) -> float:
    """The quantile of Student's t, for p of one half or more and an integer number of degrees of freedom.

    Up to 30 of them by bisection of its distribution function, which is a finite sum (Abramowitz & Stegun 26.7.3 and
    26.7.4), then by its expansion around the normal (26.7.5).

    >>> [round(student_quantile(0.975, freedom), 3) for freedom in (1, 2, 15, 100)]
    [12.706, 4.303, 2.131, 1.984]
    """
    if freedom > 30:
        z = NormalDist().inv_cdf(p)
        terms = (
            z,
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        )
        return float(sum(term / freedom**power for power, term in enumerate(terms)))
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / √freedom
    for _ in range(60):
        angle = (low + high) / 2
        is_odd, cosine = freedom % 2, math.cos(angle)
        term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
        for power in range(2 + is_odd, freedom + 1, 2):
            total += term
            term *= cosine**2 * (power - 1) / power
        inside = 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
        low, high = (angle, high) if inside < 2 * p - 1 else (low, angle)
    return math.sqrt(freedom) * math.tan(angle)


def gaussian_log_prob(target: Tensor, mean: Tensor, std: Tensor, batch_dims: int = 1) -> Tensor:
    """The log-density of a Gaussian, summed over all but the batch's dimensions."""
    each = -0.5 * ((target - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    return each.flatten(batch_dims).sum(-1) if each.dim() > batch_dims else each


def disagreement_of(votes: Tensor) -> Tensor:
    """The fraction of pairs of draws whose labels differ, from the votes for each label; 0 for a single draw.

    >>> disagreement_of(torch.tensor([[2, 1], [3, 0]]))
    tensor([0.6667, 0.0000])
    """
    votes = votes.long()
    count = votes.sum(-1)
    agreeing = (votes * (votes - 1)).sum(-1) / (count * (count - 1)).clamp_min(1)
    return torch.where(count < 2, 0.0, 1 - agreeing)
