"""`Choice`: the candidate with the lowest validation NLL, the table behind it, and why it was chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
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
    epochs: int | None = None
    is_final: bool = True  # whether it had all its epochs, so that it can be chosen
    failure: str = ""  # why it has no NLL

    @property
    def mean(self) -> float:
        """The mean NLL, infinite if it failed."""
        value = math.inf if self.failure else float(self.nll.mean())
        return value if math.isfinite(value) else math.inf

    def above(self, other: Trial) -> tuple[float, float]:
        """How much higher its NLL is than another's, and the standard error of that, from the differences of the rows.

        >>> one, other = (Trial(name, torch.tensor(rows), 1.0) for name, rows in (("a", [3.0, 1.0]), ("b", [1.0, 1.0])))
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
        trials: The trials. The default is the first that is final.
        shares: What `Trial.share` is, "accuracy" or "coverage".

    >>> rows = {"noise=0.45": [0.5, 0.6, 0.9], "noise=0.2": [0.3, 0.4, 0.6], "noise=0.9": [0.9, 0.9, 1.6]}
    >>> print(Choice(tuple(Trial(name, torch.tensor(nll), 0.5) for name, nll in rows.items())))
                   NLL        above lowest  accuracy
    noise=0.2   0.4333                         50.0%  chosen
    noise=0.45  0.6667  0.2333 ± 0.0333        50.0%
    noise=0.9   1.1333  0.7000 ± 0.1528        50.0%
    <BLANKLINE>
    noise=0.2: validation NLL 0.4333, 0.2333 ± 0.0333 lower than noise=0.45; the other one was not better.
    """

    trials: tuple[Trial, ...]
    shares: str = "accuracy"

    @property
    def default(self) -> Trial:
        """The candidate that stays unless another is better."""
        return next(trial for trial in self.trials if trial.is_final)

    @property
    def best(self) -> Trial:
        """The candidate with the lowest NLL of those that had all their epochs."""
        best = min((trial for trial in self.trials if trial.is_final), key=lambda trial: trial.mean)
        if math.isinf(best.mean):
            reasons = "; ".join(f"{trial.name}: {trial.failure or 'its NLL is infinite'}" for trial in self.trials)
            raise TuneError(f"no candidate has a finite validation NLL: {reasons}")
        return best

    @cached_property
    def chosen(self) -> Trial:
        """The best candidate, or the default if that is worse by at most one standard error."""
        best, default = self.best, self.default
        if best is default or math.isinf(default.mean):
            return best
        above, error = default.above(best)
        return best if above > error else default

    @property
    def why(self) -> str:
        """One sentence about the choice."""
        best, default, chosen = self.best, self.default, self.chosen
        others = len({trial.name for trial in self.trials} - {chosen.name, default.name})
        rest = {0: "", 1: "; the other one was not better"}.get(others, f"; the {others} others were not better")
        text = f"{chosen.name}: validation NLL {chosen.mean:.4f}"
        if chosen is not default:
            lower = (
                "infinite" if math.isinf(default.mean) else "{:.4f} ± {:.4f} lower than".format(*default.above(best))
            )
            return f"{text}, {lower} {default.name}{rest}."
        if best is default:
            return f"{text}; no other was lower."
        return f"{text}; the lowest, of {best.name}, is {{:.4f}} ± {{:.4f}} lower: within chance.".format(
            *default.above(best)
        )

    def rows(self) -> list[dict[str, Any]]:
        """The trials as plain values, in the order of the table: those with all their epochs first, by their NLL."""
        order = sorted(self.trials, key=lambda trial: (not trial.is_final, trial.mean))
        return [self._row(trial) for trial in order]

    def _row(self, trial: Trial) -> dict[str, Any]:
        lowest = min((each for each in self.trials if each.is_final == trial.is_final), key=lambda each: each.mean)
        if math.isinf(trial.mean):
            return {"name": trial.name, "epochs": trial.epochs, "failure": trial.failure or "its NLL is infinite"}
        above, error = trial.above(lowest)
        figures = {"nll": trial.mean, "above": above, "standard_error": error, self.shares: trial.share}
        return {"name": trial.name, "epochs": trial.epochs, **figures, "chosen": trial is self.chosen}

    def __str__(self) -> str:
        """The table, and the sentence below it."""
        heads = ("", "epochs", "NLL", "above lowest", self.shares, "")
        cells = [heads, *(self._cells(row) for row in self.rows())]
        shown = [i for i in range(len(heads)) if i == 0 or any(row[i] for row in cells[1:])]
        widths = [max(len(row[i]) for row in cells if "failed" not in row[i]) for i in range(len(heads))]
        lines = ("  ".join(_padded(row[i], widths[i], i) for i in shown).rstrip() for row in cells)
        return "\n".join([*lines, "", self.why])

    def _cells(self, row: dict[str, Any]) -> tuple[str, ...]:
        epochs = "" if row["epochs"] is None else str(row["epochs"])
        if "failure" in row:
            return row["name"], epochs, f"failed: {row['failure']}", "", "", ""
        above = f"{row['above']:.4f} ± {row['standard_error']:.4f}" if row["above"] else ""
        return row["name"], epochs, f"{row['nll']:.4f}", above, f"{row[self.shares]:.1%}", "chosen" * row["chosen"]


def _padded(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column in (0, 5) else cell.rjust(width)


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
        each = p.log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1)
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
