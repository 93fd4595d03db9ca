"""As many draws for each input as it needs: a sequential test decides when its prediction is precise enough."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import torch

from bayesify.batches import check_count, chosen_rows, row_count
from bayesify.errors import BayesifyError
from bayesify.prediction.likelihood import Likelihood
from bayesify.prediction.plan import Plan
from bayesify.prediction.results import Prediction


@dataclass(frozen=True)
class Adaptive:
    """Draw until an input's label and uncertainty are known, at most `max` times: `predict(…, samples=by.Adaptive())`.

    >>> Adaptive(max=100).stopping_points(cycle=4)
    (16, 24, 36, 56, 84, 100)

    After each of these numbers of draws, an input is done if confidence intervals around the means so far show all
    of this: no class is more probable than its label by `tolerance` or more; the label's probability is known to
    ±`tolerance`; the total entropy is known to ±`tolerance` of its maximum. For real targets: the mean is known to
    ±`tolerance` standard deviations, and the standard deviation to ±`tolerance` of itself. If an input has several
    targets, this must hold for all.
    The intervals are Student's, and `error` is split over the tests in proportion to their draws (Bonferroni). So each
    of these claims fails for an input with probability at most `error`, if means of `first` draws are roughly normal.
    (Bounds that hold for any distribution would need hundreds of draws.) In simulations the claims on label and
    probability hold for every kind of input; that on entropy, which rare draws dominate, only on average.
    """

    max: int = 200
    tolerance: float = 0.1
    error: float = 0.05
    first: int = 16

    def __post_init__(self) -> None:
        check_count("max", self.max, of="Adaptive")
        check_count("first", self.first, least=2, of="Adaptive")
        if not 0 < self.tolerance < float("inf"):
            raise BayesifyError(f"Adaptive(tolerance={self.tolerance!r}): expected a number > 0, like 0.1")
        if not 0 < self.error < 1:
            raise BayesifyError(f"Adaptive(error={self.error!r}): expected a probability between 0 and 1, like 0.05")

    def stopping_points(self, cycle: int) -> tuple[int, ...]:
        """The numbers of draws after which inputs may be done: each about 1.5 times the one before, and `max`.

        Those before `max` are complete cycles through the components, as a partial cycle would be biased.
        """
        if self.max < cycle:
            raise BayesifyError(f"Adaptive(max={self.max}): components take {cycle} draws; use max={cycle} or more")
        found, count = [], _up(self.first, cycle)
        while count < self.max:
            found.append(count)
            count += _up(count // 2, cycle)
        return (*found, self.max)

    def width(self, count: int, stops: tuple[int, ...]) -> float:
        """How many standard errors an interval extends to either side, at a stopping point before the last."""
        return student_quantile(1 - self.error * count / sum(stops[:-1]) / 2, count - 1)


def student_quantile(p: float, freedom: int) -> float:
    """Student's t by its expansion around the normal (Abramowitz & Stegun 26.7.5).

    >>> round(student_quantile(0.975, 15), 3)
    2.131
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))


def predict_adaptively(
    plan: Plan, batch: Any, likelihood: Likelihood, rule: Adaptive, stops: tuple[int, ...]
) -> Prediction:
    """The prediction for one batch: at each stopping point, rows known precisely enough are done; the others go on."""
    accumulator, done, batch_dim = likelihood.accumulator(keep=False), [], plan.drawn.batch_dim
    keys = plan.keys_with_rows(batch) if isinstance(batch, Mapping) else ()
    given = row_count(batch[keys[0]] if keys else batch, batch_dim)
    for begin, end in pairwise((0, *stops)):
        for stack in plan.outputs(batch, range(begin, end)):
            likelihood.add(accumulator, stack)
        if begin == 0:
            dim, rows = plan.row_dim, stack.shape[plan.row_dim + 1]
            if rows != given:
                found = f"the network gave {rows} rows (shape {tuple(stack.shape[1:])}) for {given}"
                raise BayesifyError(f"samples=Adaptive(…): {found}; use a fixed number of samples")
            places = torch.arange(rows, device=stack.device)
        enough = torch.ones_like(places, dtype=torch.bool)
        if end < stops[-1]:
            known = accumulator.within_tolerance(rule.width(end, stops), rule.tolerance)
            enough = known.movedim(dim, 0).unsqueeze(1).flatten(1).all(1)  # in all elements of a row
        (now,), (left,) = enough.nonzero(as_tuple=True), (~enough).nonzero(as_tuple=True)
        done.append((accumulator.rows(now, dim).result(dim), places[now]))
        if not len(left):
            break
        if len(now):
            batch = chosen_rows(batch, left, len(places), batch_dim, keys)
            accumulator, places = accumulator.rows(left, dim), places[left]
    parts, order = [part for part, _ in done], torch.cat([each for _, each in done])
    return type(parts[0]).join(parts, dim).rows(order.argsort(), dim)


def _up(count: int, cycle: int) -> int:
    """The smallest multiple of a cycle that is at least `count`."""
    return max(-(-count // cycle), 1) * cycle
