"""As many draws of each input as it needs: a sequential test says when its label and uncertainty are settled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from .batches import chosen_rows, row_count
from .errors import BayesifyError
from .likelihood import Likelihood
from .prediction import Prediction

Outputs = Callable[[Any, range], Iterable[Tensor]]


@dataclass(frozen=True)
class Adaptive:
    """Draws until an input's label and uncertainty are settled, at most `max`: `predict(…, samples=by.Adaptive())`.

    >>> Adaptive(max=100).looks(cycle=4)
    (16, 24, 36, 56, 84, 100)

    After each of these numbers of draws, an input is settled if confidence intervals around the means so far show all
    of: no class is more probable than its label by `tolerance` or more; the label's probability is known to
    ±`tolerance`; the total entropy is known to ±`tolerance` of its maximum. For real targets: the mean is known to
    ±`tolerance` standard deviations, and the standard deviation to ±`tolerance` of itself. Where an input has several
    targets, all of them are.
    The intervals are Student's, and `error` is split over the looks in proportion to their draws (Bonferroni), so that
    each of these claims fails for an input with probability at most `error` where means of `first` draws are about
    normal. Bounds that hold for any distribution need hundreds of draws to tell anything. In simulations the claims on
    label and probability hold for every kind of input; that on entropy, which rare draws decide, only on average.
    """

    max: int = 200
    tolerance: float = 0.1
    error: float = 0.05
    first: int = 16

    def __post_init__(self) -> None:
        for name, least in (("max", 1), ("first", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BayesifyError(f"Adaptive({name}={value!r}): expected a whole number of draws >= {least}")
        if not 0 < self.tolerance < float("inf"):
            raise BayesifyError(f"Adaptive(tolerance={self.tolerance!r}): expected a number > 0, like 0.1")
        if not 0 < self.error < 1:
            raise BayesifyError(f"Adaptive(error={self.error!r}): expected a probability between 0 and 1, like 0.05")

    def looks(self, cycle: int) -> tuple[int, ...]:
        """The numbers of draws after which inputs may be done, each half as many again, and `max`.

        Those before `max` are whole cycles through the components, as part of a cycle would be biased.
        """
        if self.max < cycle:
            raise BayesifyError(
                f"Adaptive(max={self.max}): the components take turns over {cycle} draws; use max={cycle} or more"
            )
        found, count = [], _up(self.first, cycle)
        while count < self.max:
            found.append(count)
            count += _up(count // 2, cycle)
        return (*found, self.max)

    def width(self, count: int, looks: tuple[int, ...]) -> float:
        """How many standard errors an interval reaches to either side at one of the looks before the last."""
        return student_quantile(1 - self.error * count / sum(looks[:-1]) / 2, count - 1)


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


def settle(
    outputs: Outputs,
    batch: Any,
    likelihood: Likelihood,
    rule: Adaptive,
    looks: tuple[int, ...],
    *,
    batch_dim: int,
    fewest: float,
) -> Prediction:
    """The prediction of one batch: at each look rows that are settled are done, and draws go on for the others.

    `outputs(batch, draws)` gives the outputs of a range of draws. It is asked again, for fewer rows, when at least the
    share `fewest` of the rows is done.
    """
    tally, done = likelihood.tally(keep=False), []
    stream = outputs(batch, range(looks[-1]))
    for begin, end in pairwise((0, *looks)):
        for output in islice(stream, end - begin):
            likelihood.add(tally, output.unsqueeze(0))
        if begin == 0:
            dim, places = row_dim(output, batch_dim), _places(output, batch, batch_dim)
            waiting = torch.ones_like(places, dtype=torch.bool)
        settled = waiting.clone()
        if end < looks[-1]:
            settled &= _by_row(tally.settled(rule.width(end, looks), rule.tolerance), dim)
        (now,), (left,) = settled.nonzero(as_tuple=True), (waiting & ~settled).nonzero(as_tuple=True)
        done.append((tally.rows(now, dim).result(dim), places[now]))
        waiting[now] = False
        if not len(left):
            break
        if len(left) < len(waiting) and len(left) <= (1 - fewest) * len(waiting):
            batch = chosen_rows(batch, left, len(waiting), batch_dim)
            tally, places, waiting = tally.rows(left, dim), places[left], waiting[left]
            stream = outputs(batch, range(end, looks[-1]))
    parts, order = [part for part, _ in done], torch.cat([each for _, each in done])
    return type(parts[0]).join(parts, dim).rows(order.argsort(), dim)


def row_dim(output: Tensor, batch_dim: int) -> int:
    """The dimension of an output's rows."""
    return batch_dim if output.dim() > 2 else 0


def _places(output: Tensor, batch: Any, batch_dim: int) -> Tensor:
    rows, given = output.shape[row_dim(output, batch_dim)], row_count(batch, batch_dim)
    if rows != given:
        raise BayesifyError(
            f"samples=Adaptive(…) needs one row of output for each row of input, but the network gave {rows} rows "
            f"(shape {tuple(output.shape)}) for {given}; use a fixed number of samples"
        )
    return torch.arange(rows, device=output.device)


def _by_row(settled: Tensor, dim: int) -> Tensor:
    """Whether all of a row is settled."""
    return settled.movedim(dim, 0).unsqueeze(1).flatten(1).all(1)


def _up(count: int, cycle: int) -> int:
    """The least multiple of a cycle that is as much."""
    return max(-(-count // cycle), 1) * cycle
