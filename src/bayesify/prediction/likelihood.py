"""What a network's outputs mean: a density of the targets, and running sums over draws that give a prediction."""

import copy
import math
import warnings
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.errors import BayesifyError
from bayesify.methods.base import at_least_float32
from bayesify.methods.distributions import entropy
from bayesify.methods.draw_design import Blocks, BlockSums, independent_variance, moments
from bayesify.prediction.calibrate import temperature_factor
from bayesify.prediction.results import (
    BinaryPrediction,
    Classification,
    Prediction,
    disagreement_of,
    student_quantile,
)

FEWEST_DEGREES = 3
"""With fewer degrees of freedom, intervals from blocks are wider than those from draws taken for independent."""
BALANCED_SQUARES = 1.5  # how many times as large the variance of a mean over squares of balanced draws may be


class Accumulator:
    """Running sums over the draws for one batch, so that no draw needs to be kept.

    Draws come in stacks (M, B, …). `mean` and `squares` are the running mean of their probabilities or values and the
    sum of squared deviations from it.
    """

    def __init__(self, keep: bool, blocks: Blocks | None = None) -> None:
        self.count = 0
        self.blocks = None if blocks is None else BlockSums(blocks)
        self.mean = self.squares = torch.zeros(())
        self.kept: list[Tensor] | None = [] if keep else None
        self.kept_stds: list[Tensor] = []

    def add(self, outputs: Tensor, meaning: Tensor) -> None:
        """Add some draws: their outputs, and the log-probabilities or the standard deviations that these stand for."""
        raise NotImplementedError

    def result(self, dim: int = 0) -> Prediction:
        """The prediction from all draws so far; rows are in dimension `dim`."""
        raise NotImplementedError

    def unit(self) -> Tensor | float:
        """What the tolerance of a mean is relative to."""
        return 1.0

    def within_tolerance(self, error: float, tolerance: float) -> Tensor:
        """Where label and uncertainty are known to ±tolerance, by intervals that fail with probability `error`."""
        raise NotImplementedError

    def mean_within_tolerance(self, error: float, tolerance: float) -> Tensor:
        """Where the mean is known to ±tolerance, by the prediction's own margin."""
        found, freedom = self.standard_error()
        return found * student_quantile(1 - error / 2, freedom) <= tolerance * self.unit()

    def rows(self, index: Tensor, dim: int) -> Self:
        """The sums of some of the rows; only without kept draws."""
        some = copy.copy(self)
        vars(some).update({k: v.index_select(dim, index) for k, v in vars(self).items() if isinstance(v, Tensor)})
        some.blocks = None if self.blocks is None else self.blocks.rows(index, dim)
        return some

    def variances(self) -> list[tuple[Tensor, int]]:
        """Estimates of the variance of the mean over draws, with their degrees of freedom: see `BlockSums`."""
        if self.blocks is not None:
            return self.blocks.variances(self.count, self.mean, self.squares)
        return [independent_variance(self.squares, self.count)]

    def standard_error(self) -> tuple[Tensor, int]:
        """The standard error of the mean over draws, from blocks if there are enough, and its degrees of freedom."""
        independent, *blocks = self.variances()
        variance, freedom = blocks[0] if blocks and blocks[0][1] >= FEWEST_DEGREES else independent
        return variance.sqrt(), freedom

    def reach(self, error: float) -> Tensor:
        """How far off the mean may be: the smaller of two intervals, which together fail with probability `error`."""
        found = self.variances()
        half = error / 2 / len(found)
        reaches = [variance.sqrt() * student_quantile(1 - half, freedom) for variance, freedom in found]
        return torch.minimum(reaches[0], reaches[-1])

    def _add_values(self, outputs: Tensor, values: Tensor) -> None:
        if self.blocks is not None:
            self.blocks.add(values)
        earlier = (self.mean, self.squares) if self.count else None
        self.count += len(values)
        self.mean, self.squares = moments(values, earlier, self.count)
        if self.kept is not None:
            self.kept.append(outputs)

    def _draws(self, dim: int) -> dict[str, Any]:
        """What every prediction has: the number of draws, their outputs (S, B, …) if kept, and its standard error."""
        used = torch.full((self.mean.shape[dim],), self.count, device=self.mean.device)
        error, freedom = self.standard_error()
        rows = [size if place == dim else 1 for place, size in enumerate(error.shape)]
        return {
            "samples": self.count,
            "draws_used": used,
            "draws": None if self.kept is None else torch.cat(self.kept),
            "standard_error": error,
            "freedom": torch.full(rows, freedom, device=error.device),
        }


class ClassAccumulator(Accumulator):
    """Running log-mean-exp, mean log-probabilities and entropy, and votes; classes are in the last dimension."""

    log_sum, logs, entropies = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(())

    def add(self, outputs: Tensor, meaning: Tensor) -> None:
        probs, labels = meaning.exp(), meaning.argmax(-1).movedim(0, -1)
        if not self.count:
            self.votes = torch.zeros_like(meaning[0], dtype=torch.int32)
        self.log_sum = torch.logaddexp(self.log_sum, meaning.logsumexp(0))
        self.logs, self.entropies = self.logs + meaning.sum(0), self.entropies + entropy(meaning, probs).sum(0)
        self.votes.scatter_add_(-1, labels, torch.ones_like(labels, dtype=torch.int32))
        self._add_values(outputs, probs)

    def result(self, dim: int = 0) -> Prediction:
        return Classification(
            log_probs=self.log_sum - math.log(self.count),
            mean_log_probs=self.logs / self.count,
            aleatoric=self.entropies / self.count,
            votes=self.votes.short() if self.count < 2**15 else self.votes,
            variance=self.squares.mean(-1) / self.count,
            **self._draws(dim),
        )

    def within_tolerance(self, error: float, tolerance: float) -> Tensor:
        """Whether no class can be more probable than the label by the tolerance, and the label's probability and the
        entropy, as a fraction of its maximum, are known.
        """
        reach = self.reach(error)
        label = self.mean.argmax(-1, keepdim=True)
        own = reach.gather(-1, label).squeeze(-1)
        lowest = self.mean.max(-1).values - own
        rival = (self.mean + reach).scatter(-1, label, -math.inf).max(-1).values
        entropy_known = entropy_reach(self.mean, reach) <= tolerance * math.log(self.mean.shape[-1])
        return (rival - lowest <= tolerance) & (own <= tolerance) & entropy_known


class BinaryAccumulator(ClassAccumulator):
    """The same for labels that are each yes or no."""

    def result(self, dim: int = 0) -> Prediction:
        given = self._draws(dim)
        return BinaryPrediction(
            log_probs=self.log_sum[..., 0] - math.log(self.count),
            log_not_probs=self.log_sum[..., 1] - math.log(self.count),
            aleatoric=self.entropies / self.count,
            disagreement=disagreement_of(self.votes),
            **given | {name: given[name][..., 0] for name in ("standard_error", "freedom")},
        )


def entropy_reach(probs: Tensor, reach: Tensor) -> Tensor:
    """How far off the entropy may be, to first order, if each probability may be off by `reach`.

    As probabilities sum to 1, dH = -Σ (log p + H) dp; with two classes the bound is exact.

    >>> entropy_reach(torch.tensor([0.9, 0.1]), torch.tensor([0.01, 0.01]))  # 0.01 log 9
    tensor(0.0220)
    """
    log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return ((log_probs + entropy(log_probs).unsqueeze(-1)).abs() * reach).sum(-1)


# Likelihoods.


class Likelihood(nn.Module):
    """A density p(target | output); a module, so that what it learns can be optimized and saved."""

    sums: type[Accumulator]  # the running sums over its draws
    keeps_draws: bool = False  # whether `predict` keeps the draws unless told otherwise

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """log p(target | output) of each row."""
        raise NotImplementedError

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of some draws' outputs (M, B, …) and their log-probabilities, or means and standard deviations."""
        raise NotImplementedError

    def accumulator(self, keep: bool, blocks: Blocks | None = None) -> Accumulator:
        """Running sums over draws for one batch, empty at first; without blocks, draws are independent."""
        return self.sums(keep, blocks)

    def add(self, accumulator: Accumulator, outputs: Tensor) -> None:
        """Add the outputs (M, B, …) of some draws to an accumulator."""
        accumulator.add(*self.split(outputs))

    def predictive(self, outputs: Tensor, *, keep: bool = False) -> Prediction:
        """The predictive of S stacked outputs (S, B, …)."""
        accumulator = self.accumulator(keep)
        for output in outputs.split(1):
            self.add(accumulator, output)
        return accumulator.result()

    def interpret(self, output: Tensor) -> Prediction:
        """What the output (B, …) of one ordinary network predicts, such as one from `by.distill`."""
        return self.predictive(output.unsqueeze(0))


def _warn_of_probabilities(logits: Tensor) -> None:
    """Warn if what should be logits are probabilities, after which another softmax makes all classes much alike."""
    few = logits.flatten(0, -2)[:8].double()
    if len(few) > 1 and bool((few >= 0).all()) and bool(((few.sum(-1) - 1).abs() < 1e-5).all()):
        warnings.warn(
            "the network's outputs are probabilities (at least 0, with a sum of 1) where logits are expected, so that "
            "classes seem much alike: leave out its softmax, or return log-probabilities",
            stacklevel=4,
        )


def likelihood_of(given: Any) -> Likelihood:
    """The likelihood that a caller gave, or `Categorical()`; raises for a class, a name or a loss function."""
    if given is None:
        return Categorical()
    if isinstance(given, type) or not callable(getattr(given, "log_prob", None)):
        is_class = isinstance(given, type) and issubclass(given, Likelihood)
        hint = f"it is a class, so call it: by.{given.__name__}()" if is_class else "not a name, and not a loss"
        raise BayesifyError(
            f"likelihood={given!r}: expected what a call of by.Categorical(), by.Bernoulli(), by.Gaussian() or "
            f"by.Poisson() returns; {hint}"
        )
    return given  # type: ignore[no-any-return]


class Categorical(Likelihood):
    """One of C classes; outputs are logits with the classes in `class_dim` (1 for segmentation maps).

    >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])

    The logits of each draw are divided by the `temperature`, which `calibrate` sets by held-out rows. Below 1, draws
    are more certain of their classes, as they should be if training had more noise than the network could adapt to.
    """

    sums = ClassAccumulator

    def __init__(self, class_dim: int = -1, *, temperature: float = 1.0) -> None:
        super().__init__()
        if not 0 < temperature < float("inf"):
            raise BayesifyError(f"Categorical(temperature={temperature!r}): expected a number > 0")
        self.class_dim, self.temperature = class_dim, temperature

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        logits = self._logits(output)
        if logits.shape[:-1] != target.shape:
            raise BayesifyError(
                f"outputs of shape {tuple(output.shape)} have classes in dimension {self.class_dim}, so labels "
                f"must have shape {tuple(logits.shape[:-1])}; got {tuple(target.shape)}"
            )
        try:
            each = at_least_float32(logits).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        except RuntimeError as error:  # no check before it, as asking for numbers makes the host wait for accelerators
            if target.device.type != "cpu":
                raise
            raise BayesifyError(
                f"labels of type {target.dtype} from {target.min()} to {target.max()}: expected integers (torch.long) "
                f"from 0 to {logits.shape[-1] - 1}, as outputs of shape {tuple(output.shape)} have {logits.shape[-1]} "
                "classes; map the labels to these, and leave out rows without a label"
            ) from error
        return each.flatten(1).sum(1) if each.dim() > 1 else each

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._logits(outputs, stacked=True)
        return logits, at_least_float32(logits).log_softmax(-1)

    def add(self, accumulator: Accumulator, outputs: Tensor) -> None:
        logits, log_probs = self.split(outputs)
        if not (accumulator.count or outputs.is_meta or torch.compiler.is_compiling()):
            _warn_of_probabilities(logits[0])
        accumulator.add(logits, log_probs)

    @torch.no_grad()
    def calibrate(self, p: Prediction, target: Tensor) -> None:
        """Set the temperature by held-out rows, in place: the one with which their labels are most probable.

        Its logarithm has a standard normal prior, so that a few rows, all of them right, do not make it 0.

        Args:
            p: The prediction of held-out rows with this likelihood, from `by.predict(…, draws=True)`.
            target: Their labels.

        >>> logits, y = torch.tensor([[[9.0, 0.0]] * 400]), torch.tensor([0, 0, 0, 1] * 100)  # sure, and wrong
        >>> likelihood = Categorical()
        >>> likelihood.calibrate(likelihood.predictive(logits, keep=True), y)
        >>> likelihood.interpret(logits[0, :1]).probs.round(decimals=2)
        tensor([[0.7500, 0.2500]])
        """
        self.temperature *= temperature_factor(p, target)

    def _logits(self, output: Tensor, stacked: bool = False) -> Tensor:
        """The logits with the classes last, divided by the temperature, in float32, as half precision would round."""
        logits = output.movedim(self.class_dim + (stacked and self.class_dim >= 0), -1)
        if logits.shape[-1] < 2:
            raise BayesifyError(
                f"outputs of shape {tuple(output.shape)} have {logits.shape[-1]} in dimension {self.class_dim}, where "
                "classes are: a single class always has probability 1. Give the network an output for each class, or "
                "use likelihood=by.Bernoulli() for yes or no, by.Gaussian() for real targets"
            )
        return logits if self.temperature == 1 else at_least_float32(logits) / self.temperature


class Bernoulli(Likelihood):
    """Yes or no, once (B,) or for each of several labels (B, L); outputs are logits of yes.

    Labels are 0 or 1, or probabilities of yes (soft labels), for which `log_prob` is the negative cross-entropy.

    >>> Bernoulli().log_prob(torch.zeros(1, 3), torch.tensor([[1, 0, 1]])).exp()
    tensor([0.1250])
    """

    sums = BinaryAccumulator

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        if output.shape != target.shape:
            raise BayesifyError(
                f"outputs have shape {tuple(output.shape)}, labels {tuple(target.shape)}; they must be the same "
                "(squeeze a single output column)"
            )
        target = target.to(torch.float32)
        is_probability = (target >= 0) & (target <= 1)
        if target.device.type == "cpu" and not bool(is_probability.all()):
            raise BayesifyError(
                f"labels from {float(target.min()):g} to {float(target.max()):g}: expected 0 or 1, or a probability of "
                "yes between them, for every label"
            )
        each = target * F.logsigmoid(output.float()) + (1 - target) * F.logsigmoid(-output.float())
        each = torch.where(is_probability, each, torch.nan)  # elsewhere asking would make the host wait
        return each.flatten(1).sum(1) if each.dim() > 1 else each

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, F.logsigmoid(torch.stack([outputs.float(), -outputs.float()], -1))
