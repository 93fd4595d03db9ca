"""As many draws for each input as it needs: a sequential test decides when its prediction is precise enough."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from bayesify.batches import check_count, chosen_rows, row_count
from bayesify.errors import BayesifyError
from bayesify.prediction.likelihood import Likelihood
from bayesify.prediction.plan import Plan
from bayesify.prediction.results import Prediction, Regression

Claims = Literal["prediction", "mean"]
MOST_DRAWS = 1000
"""How many draws `predict(…, tolerance=…)` makes at most."""


@dataclass(frozen=True)
class Adaptive:
    """Draw until an input's label and uncertainty are known, at most `max` times: `predict(…, samples=by.Adaptive())`.

    >>> Adaptive(max=100).stopping_points(block=12)
    (12, 24, 36, 60, 96)

    After each of these numbers of draws, all of them complete blocks (see `methods/draw_design.py`), an input is done
    if confidence intervals around the means so far show all of this: no class is more probable than its label by
    `tolerance` or more; the label's probability is known to ±`tolerance`; the total entropy is known to ±`tolerance` of
    its maximum. For real targets: the mean is known to ±`tolerance` standard deviations, and the standard deviation to
    ±`tolerance` of itself. If an input has several targets, this must hold for all.

    The intervals are Student's: that from the means of blocks, or that from all draws, taken for independent within
    components, whichever is narrower. `error` is split between them, and over the tests in proportion to their draws
    (Bonferroni). So each of these claims fails for an input with probability at most `error`, if means of blocks are
    roughly normal. (Bounds that hold for any distribution would need hundreds of draws.) In simulations the claims on
    label and probability hold for every kind of input; that on entropy, which rare draws dominate, only on average.

    With `claims="mean"`, an input is done once `p.margin(1 - error)`, of all its probabilities or of its mean in
    predictive standard deviations, is at most `tolerance`; `predict` warns of inputs for which `max` draws are not
    enough. Sampling stops by how narrow a margin is, not by where it lies, so tests need no correction: with normal
    means, a margin fails in at most `error` of the cases, wherever sampling stops.
    """

    max: int = 200
    tolerance: float = 0.1
    error: float = 0.05
    first: int = 16
    claims: Claims = "prediction"

    def __post_init__(self) -> None:
        check_count("max", self.max, of="Adaptive")
        check_count("first", self.first, least=2, of="Adaptive")
        check_tolerance(self.tolerance, "Adaptive(tolerance={!r})")
        if not 0 < self.error < 1:
            raise BayesifyError(f"Adaptive(error={self.error!r}): expected a probability between 0 and 1, like 0.05")
        if self.claims not in get_args(Claims):
            raise BayesifyError(f"Adaptive(claims={self.claims!r}): expected 'prediction' or 'mean'")

    def stopping_points(self, block: int) -> tuple[int, ...]:
        """The numbers of draws after which inputs may be done: about `first`, each about 1.5 times the one before.

        All are complete blocks, as a part of one is less precise than none, unless `max` is less than a block.
        """
        last = self.max // block * block or self.max
        found, count = [], max(round(self.first / block), 1) * block
        while count < last:
            found.append(count)
            count += max(-(-count // 2 // block), 1) * block
        return (*found, last)


def check_tolerance(tolerance: Any, words: str = "tolerance={!r}") -> None:
    """Raise unless a tolerance is a number above 0."""
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if not (is_number and 0 < tolerance < float("inf")):
        raise BayesifyError(f"{words.format(tolerance)}: expected a number > 0, like 0.1")


def predict_adaptively(
    plan: Plan, batch: Any, likelihood: Likelihood, rule: Adaptive, stops: tuple[int, ...]
) -> Prediction:
    """The prediction for one batch: at each stopping point, rows known precisely enough are done; the others go on."""
    accumulator, done, batch_dim = likelihood.accumulator(False, plan.blocks), [], plan.drawn.batch_dim
    keys = plan.keys_with_rows(batch) if isinstance(batch, Mapping) else ()
    count = row_count(batch[keys[0]] if keys else batch, batch_dim)
    for begin, end in pairwise((0, *stops)):
        for stack in plan.outputs(batch, range(begin, end)):
            dim = plan.row_dim
            if stack.shape[dim + 1] != count:
                found = f"the network gave {stack.shape[dim + 1]} rows (shape {tuple(stack.shape[1:])}) for {count}"
                raise BayesifyError(f"samples=Adaptive(…): {found}; use a fixed number of samples, or give batch_dim")
            likelihood.add(accumulator, stack)
        if begin == 0:
            places = torch.arange(count, device=stack.device)
        enough = torch.ones_like(places, dtype=torch.bool)
        if end < stops[-1]:
            if rule.claims == "mean":
                known = accumulator.mean_within_tolerance(rule.error, rule.tolerance)
            else:
                known = accumulator.within_tolerance(rule.error * end / sum(stops[:-1]), rule.tolerance)
            enough = known.movedim(dim, 0).unsqueeze(1).flatten(1).all(1)  # in all elements of a row
        (now,), (left,) = enough.nonzero(as_tuple=True), (~enough).nonzero(as_tuple=True)
        done.append((accumulator.rows(now, dim).result(dim), places[now]))
        if not len(left):
            break
        if len(now):
            batch = chosen_rows(batch, left, len(places), batch_dim, keys)
            accumulator, places, count = accumulator.rows(left, dim), places[left], len(left)
    parts, order = [part for part, _ in done], torch.cat([each for _, each in done])
    return type(parts[0]).join(parts, dim).rows(order.argsort(), dim)


def warn_of_margins(p: Prediction, rule: Adaptive, dim: int) -> None:
    """Warn of inputs that had as many draws as allowed and whose margins are still larger than the tolerance."""
    margin = p.margin(1 - rule.error) / (p.std if isinstance(p, Regression) else 1.0)
    if margin.is_meta or not margin.numel():
        return
    rows = margin.movedim(dim, 0).unsqueeze(1).flatten(1).amax(1)
    missed = int((rows > rule.tolerance).sum())
    if missed:
        warnings.warn(
            f"{missed} of {len(rows)} inputs have a margin above tolerance={rule.tolerance:g} after {p.samples} draws, "
            f"the largest {float(rows.max()):.2g}: allow more with samples=by.Adaptive(max=…, "
            f"tolerance={rule.tolerance:g}, claims='mean'), or use a larger tolerance",
            stacklevel=4,
        )
