"""What a network's outputs mean: a density of the targets, and which sums over draws give a prediction."""

import math
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.errors import BayesifyError
from bayesify.methods.base import at_least_float32
from bayesify.methods.draw_design import Blocks
from bayesify.prediction.accumulators import Accumulator, BinaryAccumulator, ClassAccumulator, GaussianAccumulator
from bayesify.prediction.calibrate import noise_factor, temperature_factor
from bayesify.prediction.results import (
    Prediction,
    Regression,
    gaussian_log_prob,
)


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
            f"likelihood={given!r}: expected what a call of by.Categorical(), by.Bernoulli() or by.Gaussian() returns; "
            f"{hint}"
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
        if not (accumulator.count or outputs.is_meta or torch.compiler.is_compiling()):
            _warn_of_probabilities(self._logits(outputs, stacked=True)[0])
        super().add(accumulator, outputs)

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


class Gaussian(Likelihood):
    """Real targets; the `precision` is a number (fixed), "learned" (one for the data) or "input" (one per input).

    >>> Gaussian(precision=4.0).log_prob(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([-0.2258])

    With "input" the outputs hold the means and, after them in the last dimension, as many log-precisions. Draws are
    kept unless told otherwise, for the exact density and quantiles of their mixture.
    """

    keeps_draws = True
    sums = GaussianAccumulator

    def __init__(self, precision: float | Literal["learned", "input"] = 1.0) -> None:
        super().__init__()
        if precision not in ("learned", "input") and (isinstance(precision, str) or not 0 < precision < float("inf")):
            raise BayesifyError(f"Gaussian(precision={precision!r}): expected a number > 0, 'learned' or 'input'")
        self.per_input = precision == "input"
        value = torch.tensor(0.0 if isinstance(precision, str) else math.log(precision))
        self.log_precision = nn.Parameter(value) if precision == "learned" else nn.Buffer(value)

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = at_least_float32(outputs)
        if not self.per_input:
            return outputs, (-0.5 * self.log_precision).exp().to(outputs).expand_as(outputs)
        if outputs.dim() == 0 or outputs.shape[-1] % 2:
            needed = "with precision='input' the last dimension has means and log-precisions, so it must be even"
            raise BayesifyError(f"outputs of shape {tuple(outputs.shape)}: {needed}")
        mean, log_precision = outputs.chunk(2, -1)
        return mean, (-0.5 * (log_precision + self.log_precision.to(outputs))).exp()

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        mean, std = self.split(output)
        if mean.shape != target.shape:
            raise BayesifyError(f"means have shape {tuple(mean.shape)}, targets {tuple(target.shape)}")
        return gaussian_log_prob(target, mean, std)

    @torch.no_grad()
    def calibrate(self, p: Regression, target: Tensor) -> None:
        """Set the noise by held-out rows, in place: its standard deviation is multiplied by one factor for all inputs.

        The variance is n / (n - 2) times the one with which n targets are most probable, as that one is an estimate:
        for Gaussian residuals, new rows then have the highest expected density.

        Args:
            p: The prediction of held-out rows with this likelihood, from `by.predict`.
            target: Their targets.

        >>> p, y = (likelihood := Gaussian(1.0)).predictive(torch.zeros(1, 5, 1)), torch.arange(-2.0, 3.0)[:, None]
        >>> likelihood.calibrate(p, y)
        >>> round(1 / float(likelihood.log_precision.exp()), 2)  # the mean square, 2, times 5 / (5 - 2)
        3.33
        """
        self.log_precision.sub_(2 * math.log(noise_factor(p, target)))
