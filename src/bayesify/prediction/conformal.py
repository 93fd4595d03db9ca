"""Conformal prediction: sets of classes and intervals that hold the truth as often as asked, by held-out rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesify.errors import BayesifyError
from bayesify.methods.draw_design import noise_seed
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression

CLASS_SCORES, REAL_SCORES = ("lac", "aps", "raps"), ("normalised", "cqr")
"""The scores for classes and for real targets; the first is the default."""
PENALTY, K_REG = 0.01, 5


@dataclass(frozen=True)
class ConformalSets:
    """The classes that may be the true one: `set` (N, C) is True where a class is in a row's set."""

    set: Tensor

    @property
    def size(self) -> Tensor:
        """The number of classes in each set."""
        return self.set.sum(1)

    def covers(self, targets: Any) -> Tensor:
        """Whether each set has the true class."""
        return self.set.gather(1, _classes(targets, self.set).unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class ConformalIntervals:
    """Where real targets lie: `interval` has their lowest and their highest values."""

    interval: tuple[Tensor, Tensor]

    @property
    def size(self) -> Tensor:
        """The width of each interval."""
        return self.interval[1] - self.interval[0]

    def covers(self, targets: Any) -> Tensor:
        """Whether each interval has the true value."""
        low, high = self.interval
        y = _reals(targets, low)
        return (low <= y) & (y <= high)


@dataclass(frozen=True, eq=False)
class Conformal:
    """What `by.conformal` returns: call it on a prediction for sets of classes or intervals.

    Attributes:
        coverage: How often the truth should be in them.
        score: The name of the score.
        rows: How many rows it was calibrated on.
        shape: What is predicted for a row: (C,) for C classes; () or (K,) for real targets.
        threshold: The highest score in a set or interval: one for all, or one for each class or real target.
        penalty: λ of RAPS.
        k_reg: How many classes RAPS does not penalise.
        seed: The seed of randomised sets.
    """

    coverage: float
    score: str
    rows: int
    shape: tuple[int, ...]
    threshold: Tensor = field(repr=False)
    penalty: float = PENALTY
    k_reg: int = K_REG
    seed: int | None = None

    def __post_init__(self) -> None:
        is_seed = self.seed is None or (type(self.seed) is int and self.score in ("aps", "raps"))
        for name, is_right, expected in (
            ("coverage", isinstance(self.coverage, Real) and 0 < self.coverage < 1, "a number between 0 and 1"),
            ("score", self.score in CLASS_SCORES + REAL_SCORES, f"one of {', '.join(CLASS_SCORES + REAL_SCORES)}"),
            ("rows", type(self.rows) is int and self.rows >= 0, "a number of rows"),
            ("penalty", isinstance(self.penalty, Real) and 0 <= self.penalty < math.inf, "a number from 0"),
            ("k_reg", type(self.k_reg) is int and self.k_reg >= 0, "a number of classes from 0"),
            ("seed", is_seed, "None or, with score='aps' or 'raps', an integer"),
        ):
            if not is_right:
                raise BayesifyError(f"conformal: {name}={getattr(self, name)!r}; expected {expected}")
        if self.score != "raps" and (self.penalty, self.k_reg) != (PENALTY, K_REG):
            raise BayesifyError(f"conformal: penalty and k_reg are for score='raps'; the score is {self.score!r}")

    def __call__(self, prediction: Any) -> Any:
        """The sets or intervals of a prediction.

        Args:
            prediction: What `by.predict` returns, for the same model and with the same options.

        Returns:
            For classes an object with `set` (N, C), for real targets one with `interval`, the lowest and the highest
            values. Both have `size`, the number of classes or the width, and `covers(targets)`.
        """
        known = self._known(prediction)
        if known.shape[1:] != self.shape:
            raise BayesifyError(
                f"conformal: a prediction of shape {tuple(known.shape)}; expected {(len(known), *self.shape)}, as that "
                "of the calibration rows"
            )
        threshold = self.threshold.to(known)
        if self.score in CLASS_SCORES:
            return ConformalSets(self._class_scores(known, "prediction") <= threshold)
        if self.score == "normalised":
            return ConformalIntervals((known - threshold * prediction.std, known + threshold * prediction.std))
        low, high = prediction.interval(self.coverage)
        middle = (low + high) / 2  # where a negative threshold would turn the interval round
        return ConformalIntervals((torch.minimum(low - threshold, middle), torch.maximum(high + threshold, middle)))

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` needs, in the types that JSON has."""
        return {**asdict(self), "shape": list(self.shape), "threshold": self.threshold.tolist()}

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> Conformal:
        """The rule that `to_dict` has described.

        Args:
            description: What `to_dict` returned.

        Returns:
            The same rule.

        Raises:
            BayesifyError: If it does not describe one.
        """
        try:
            if description.keys() != {each.name for each in fields(cls)}:
                raise ValueError(f"its entries are {', '.join(map(str, description))}")
            threshold = torch.tensor(description["threshold"], dtype=torch.float64)
            found = cls(**{**description, "shape": tuple(map(int, description["shape"])), "threshold": threshold})
            shapes = [(), found.shape] if found.score in CLASS_SCORES else [found.shape]
            if tuple(threshold.shape) not in shapes or not bool(threshold.isfinite().all()):
                raise ValueError(f"threshold={description['threshold']} for shape={found.shape}")
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise BayesifyError(f"not what Conformal.to_dict returned: {error}") from error
        return found

    def _known(self, p: Any) -> Tensor:
        """The log-probabilities (N, C) or the means of a prediction; raises unless it is of the score's kind."""
        if not isinstance(p, Prediction):
            raise BayesifyError(f"conformal: expected what by.predict returns, got {type(p).__name__}")
        is_real = isinstance(p, Regression)
        if self.score not in (right := REAL_SCORES if is_real else CLASS_SCORES):
            what = "real targets" if is_real else "classes"
            raise BayesifyError(f"conformal: score={self.score!r} for {what}; expected one of {', '.join(right)}")
        known = p.mean if isinstance(p, Regression) else _log_probs(p)
        wrong = ~(known.isfinite() & p.std.isfinite() & (p.std > 0)) if isinstance(p, Regression) else known.isnan()
        if bool(wrong.any()):
            rows = int(wrong.reshape(len(wrong), -1).any(1).sum())
            raise BayesifyError(f"conformal: {rows} rows of the prediction are NaN or infinite, or have no spread")
        return known

    def _class_scores(self, log_probs: Tensor, stream: str) -> Tensor:
        """The score (N, C) of each class of each row; classes of low scores are in the set."""
        if self.score == "lac":  # -log p orders rows as 1 - p does, and tells small probabilities apart
            return (-log_probs).clamp_max(torch.finfo(log_probs.dtype).max)
        probs, order = log_probs.exp().sort(dim=1, descending=True, stable=True)
        scores = pad(probs.cumsum(1)[:, :-1], (1, 0))  # the probability of all classes above
        if self.seed is not None:
            generator = torch.Generator().manual_seed(noise_seed(self.seed, stream, "conformal"))
            scores = scores + torch.rand(len(probs), 1, generator=generator).to(probs) * probs
        if self.score == "raps":
            ranks = torch.arange(1, probs.shape[1] + 1, device=probs.device)
            scores = scores + self.penalty * (ranks - self.k_reg).clamp_min(0)
        return torch.empty_like(scores).scatter_(1, order, scores)


def conformal(
    prediction: Any,
    targets: Any,
    coverage: float = 0.9,
    *,
    score: str | None = None,
    class_conditional: bool = False,
    penalty: float = PENALTY,
    k_reg: int = K_REG,
    seed: int | None = None,
) -> Conformal:
    """Calibrate sets of classes, or intervals, so that they hold the truth of new rows as often as asked.

    If n calibration rows and a new one are exchangeable, the score of the new one is at most the k-th lowest of theirs
    with a probability of at least k / (n + 1). So the threshold is that score for k = ⌈(n + 1) · coverage⌉.

    >>> import bayesify as by
    >>> logits = 3 * torch.randn(1000, 5)
    >>> y = torch.distributions.Categorical(logits=logits).sample()
    >>> likelihood = by.Categorical()
    >>> rule = conformal(likelihood.interpret(logits[:500]), y[:500])
    >>> sets = rule(likelihood.interpret(logits[500:]))
    >>> sets.set.shape, bool((sets.covers(y[500:]).float().mean() - 0.9).abs() < 0.1)
    (torch.Size([500, 5]), True)

    Args:
        prediction: What `by.predict` returns for rows that chose nothing: no weights, epochs or temperature.
        targets: Their classes (N,), or their values in the shape of the prediction's mean.
        coverage: How often the truth should be in the sets or intervals.
        score: For classes "lac" (the default; Sadinle et al. 2019): 1 - p(y), which gives the smallest sets; "aps"
            (Romano et al. 2020): the probability of all classes above y, so that harder inputs have larger sets; "raps"
            (Angelopoulos et al. 2021): the same and `penalty` for each rank beyond `k_reg`. For real targets
            "normalised" (the default): |y - mean| / std; "cqr" (Romano et al. 2019): how far y is outside of the
            prediction's own `interval(coverage)`.
        class_conditional: Whether each class has a threshold by its own rows, and so the asked coverage.
        penalty: λ of "raps".
        k_reg: How many classes "raps" does not penalise.
        seed: Randomises "aps" and "raps" as in the papers: the probability of y times a uniform number is added, and
            sets may be empty. Without it the most probable class is in every set.

    Returns:
        The rule, to call on further predictions.

    Raises:
        BayesifyError: If there are too few rows for the coverage, so that the threshold would be infinite.
    """
    is_real = isinstance(prediction, Regression)
    score = score or (REAL_SCORES if is_real else CLASS_SCORES)[0]
    rule = Conformal(coverage, score, 0, (), torch.zeros(()), penalty, k_reg, seed)
    known = rule._known(prediction)
    if is_real and class_conditional:
        raise BayesifyError("conformal: class_conditional=True is for classes; the prediction is of real targets")
    if is_real:
        y = _reals(targets, known)
        low, high = prediction.interval(coverage) if score == "cqr" else (known, known)
        scores = torch.maximum(low - y, y - high) / (1 if score == "cqr" else prediction.std)
        threshold = quantile(scores, coverage)
    else:
        classes = _classes(targets, known)
        scores = rule._class_scores(known, "calibration").gather(1, classes.unsqueeze(1)).squeeze(1)
        own = [(f" of class {k}", scores[classes == k]) for k in range(known.shape[1])] if class_conditional else []
        threshold = (
            torch.stack([quantile(x, coverage, whose) for whose, x in own]) if own else quantile(scores, coverage)
        )
    saved = threshold.detach().double().cpu()
    return replace(rule, coverage=float(coverage), rows=len(known), shape=tuple(known.shape[1:]), threshold=saved)


def quantile(scores: Tensor, coverage: float, whose: str = "") -> Tensor:
    """The ⌈(n + 1) · coverage⌉-th lowest of n scores, along the first dimension; raises if n is less than that.

    >>> quantile(torch.arange(9.0), 0.9), quantile(torch.arange(19.0), 0.9)
    (tensor(8.), tensor(17.))
    """
    share, n = Fraction(str(float(coverage))), len(scores)  # exact: 0.55 · 100 is more than 55 for floats
    if n < (least := math.ceil(share / (1 - share))):
        raise BayesifyError(
            f"conformal: {n} rows{whose}, with which the threshold for coverage={coverage} is infinite; give at least "
            f"{least}, or ask for a coverage of at most {math.floor(1000 * n / (n + 1)) / 1000}"
        )
    return scores.kthvalue(math.ceil((n + 1) * share), dim=0).values


def _log_probs(p: Prediction) -> Tensor:
    """The log-probabilities (N, C) of classes, or of no and yes."""
    if isinstance(p, BinaryPrediction) and p.log_probs.shape[1:].numel() == 1:
        return torch.stack([p.log_not_probs.flatten(), p.log_probs.flatten()], 1)
    if isinstance(p, Classification) and p.log_probs.dim() == 2:
        return p.log_probs
    raise BayesifyError(
        f"conformal: probabilities of shape {tuple(p.probs.shape)}; expected one class for each row, as "  # type: ignore[attr-defined]
        "several labels, pixels or steps of one row are not exchangeable"
    )


def _classes(targets: Any, known: Tensor) -> Tensor:
    """The classes (N,) of the rows of what is known (N, C); raises unless they are."""
    y = torch.as_tensor(targets, device=known.device)
    y = y.squeeze(1) if y.dim() == 2 else y
    if y.shape != known.shape[:1]:
        raise BayesifyError(f"conformal: targets of shape {tuple(y.shape)}; expected {len(known)} classes")
    wrong = y[~((y >= 0) & (y < known.shape[1]) & (y == y.floor()))]
    if len(wrong):
        raise BayesifyError(f"conformal: the target {wrong[0].item()} is none of the classes 0 to {known.shape[1] - 1}")
    return y.long()


def _reals(targets: Any, known: Tensor) -> Tensor:
    """The values in the shape of what is known; raises unless they have it and are finite."""
    y = torch.as_tensor(targets, device=known.device).to(known)
    if y.shape != known.shape:
        raise BayesifyError(f"conformal: targets of shape {tuple(y.shape)}; expected {tuple(known.shape)}")
    if not bool(y.isfinite().all()):
        raise BayesifyError(
            f"conformal: {int((~y.isfinite()).sum())} targets are NaN or infinite; leave out their rows"
        )
    return y
