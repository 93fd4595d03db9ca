"""`Choice`: the candidate with the lowest validation NLL, the table behind it, and why it was chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.lab.metrics import INTERVAL
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression


class TuneError(BayesifyError):
    """Candidates that can't be tried or compared as asked."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A candidate, and how well it predicts the validation rows: the NLL of each row, and the accuracy or coverage."""

    name: str
    nll: Tensor
    share: float
    failure: str = ""  # why it has no NLL

    @classmethod
    def failed(cls, name: str, failure: str) -> Trial:
        """A candidate that could not be trained, or whose predictions are not finite."""
        return cls(name, torch.full((1,), torch.inf), 0.0, failure)

    @property
    def mean(self) -> float:
        """The mean NLL; infinite if it failed."""
        return float(self.nll.mean())

    def above(self, other: Trial) -> tuple[float, float]:
        """How much higher its NLL is than another's, and the standard error of that, from the differences of the rows.

        >>> one, other = Trial("one", torch.tensor([3.0, 1.0]), 1.0), Trial("other", torch.tensor([1.0, 1.0]), 1.0)
        >>> one.above(other)
        (1.0, 1.0)
        """
        difference = (self.nll - other.nll).double()
        return float(difference.mean()), float(difference.std() / math.sqrt(len(difference)))


@dataclass(frozen=True)
class Choice:
    """Which of several candidates to use: the one with the lowest validation NLL, or the first if that is as good.

    The first candidate, which is the default, stays unless another is better by more than one standard error of the
    difference, which is computed from the differences of the rows.

    Attributes:
        trials: The trials, the default first.
        shares: What `Trial.share` is, "accuracy" or "coverage".

    >>> rows = {"noise=0.35": [0.5, 0.6, 0.9], "noise=0.2": [0.3, 0.4, 0.6], "noise=1": [0.9, 0.9, 1.6]}
    >>> print(Choice(tuple(Trial(name, torch.tensor(nll), 0.5) for name, nll in rows.items())))
                   NLL     above lowest  accuracy
    noise=0.2   0.4333                      50.0%  chosen
    noise=0.35  0.6667  0.2333 ± 0.0333     50.0%
    noise=1     1.1333  0.7000 ± 0.1528     50.0%
    <BLANKLINE>
    noise=0.2: validation NLL 0.4333, 0.2333 ± 0.0333 lower than noise=0.35; the other one was not better.
    """

    trials: tuple[Trial, ...]
    shares: str = "accuracy"

    @property
    def default(self) -> Trial:
        """The candidate that stays unless another is better."""
        return self.trials[0]

    @property
    def lowest(self) -> Trial:
        """The candidate with the lowest NLL."""
        lowest = min(self.trials, key=lambda trial: trial.mean)
        if not math.isfinite(lowest.mean):
            reasons = "; ".join(f"{trial.name}: {_failure(trial)}" for trial in self.trials)
            raise TuneError(f"no candidate has a finite validation NLL: {reasons}")
        return lowest

    @property
    def chosen(self) -> Trial:
        """The candidate with the lowest NLL, or the default if that is higher by at most one standard error."""
        lowest, default = self.lowest, self.default
        if lowest is default or not math.isfinite(default.mean):
            return lowest
        above, error = default.above(lowest)
        return lowest if above > error else default

    @property
    def why(self) -> str:
        """One sentence about the choice."""
        lowest, default, chosen = self.lowest, self.default, self.chosen
        others = len(self.trials) - len({chosen, default, lowest})
        rest = {0: "", 1: "; the other one was not better"}.get(others, f"; the {others} others were not better")
        text = f"{chosen.name}: validation NLL {chosen.mean:.4f}"
        if lowest is default:
            return f"{text}; no other was lower."
        if not math.isfinite(default.mean):
            return f"{text}; {default.name} failed{rest}."
        difference = "{:.4f} ± {:.4f} lower".format(*default.above(lowest))
        if chosen is default:
            return f"{text}; {lowest.name} is {difference}, which is within chance{rest}."
        return f"{text}, {difference} than {default.name}{rest}."

    def rows(self) -> list[dict[str, Any]]:
        """The trials as plain values, by their NLL."""
        return [self._row(trial) for trial in sorted(self.trials, key=lambda trial: trial.mean)]

    def _row(self, trial: Trial) -> dict[str, Any]:
        if not math.isfinite(trial.mean):
            return {"name": trial.name, "failure": _failure(trial), "chosen": False}
        above, error = trial.above(self.lowest)
        figures = {"nll": trial.mean, "above": above, "standard_error": error, self.shares: trial.share}
        return {"name": trial.name, **figures, "chosen": trial is self.chosen}

    def __str__(self) -> str:
        """The table, and the sentence below it."""
        rows = self.rows()
        width = max(len(row["name"]) for row in rows)
        lines = [f"{'':{width}}  {'NLL':>7}  {'above lowest':>16}  {self.shares:>8}"]
        for row in rows:
            if "failure" in row:
                lines.append(f"{row['name']:{width}}  failed: {row['failure']}")
            else:
                above = f"{row['above']:.4f} ± {row['standard_error']:.4f}" if row["above"] else ""
                figures = f"{row['nll']:7.4f}  {above:>16}  {row[self.shares]:8.1%}"
                lines.append(f"{row['name']:{width}}  {figures}{'  chosen' if row['chosen'] else ''}")
        return "\n".join([*lines, "", self.why])


def _failure(trial: Trial) -> str:
    return trial.failure or "its NLL is not finite"


def row_nll(p: Prediction, y: Tensor) -> Tensor:
    """-log p(y) of each row, where p is the mean over draws; of the mean of its labels, if a row has several.

    >>> import bayesify as by
    >>> row_nll(by.Categorical().predictive(torch.zeros(3, 2, 4)), torch.tensor([0, 3])).exp()
    tensor([4.0000, 4.0000], dtype=torch.float64)
    """
    if isinstance(p, Regression):
        return -p.log_prob(y).double()
    if isinstance(p, BinaryPrediction):
        each = torch.where(y > 0.5, p.log_probs, p.log_not_probs)
    else:
        assert isinstance(p, Classification)
        each = p.log_probs.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
    return -each.double().flatten(1).mean(1) if each.dim() > 1 else -each.double()


def row_shares(p: Prediction, y: Tensor) -> Tensor:
    """For each row, the share of labels that are right, or of real targets inside their central 90% intervals."""
    if isinstance(p, Regression):
        low, high = p.interval(INTERVAL)
        right = (low <= y) & (y <= high)
    else:
        assert isinstance(p, (Classification, BinaryPrediction))
        right = p.label == y
    return right.double().flatten(1).mean(1) if right.dim() > 1 else right.double()
