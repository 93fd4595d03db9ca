"""What a network's outputs mean: a density of the targets, and how to average over draws."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.errors import BayesifyError
from bayesify.prediction.accumulate import Accumulator, BinaryAccumulator, ClassAccumulator, GaussianAccumulator
from bayesify.prediction.results import Prediction, gaussian_log_prob


class Likelihood(nn.Module):
    """A density p(target | output); a module, so that what it learns can be optimized and saved."""

    keeps_draws: bool = False
    """Whether `predict` keeps the draws unless told otherwise."""

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """log p(target | output) of each row."""
        raise NotImplementedError

    def accumulator(self, keep: bool) -> Accumulator:
        """Running sums over draws for one batch, empty at first."""
        raise NotImplementedError

    def add(self, accumulator: Accumulator, outputs: Tensor) -> None:
        """Add the outputs (M, B, …) of some draws to an accumulator."""
        accumulator.add(outputs)

    def predictive(self, outputs: Tensor, *, keep: bool = False) -> Prediction:
        """The predictive of S stacked outputs (S, B, …)."""
        accumulator = self.accumulator(keep)
        for output in outputs.split(1):
            self.add(accumulator, output)
        return accumulator.result()


class Categorical(Likelihood):
    """One of C classes; outputs are logits with the classes in `class_dim` (1 for segmentation maps).

    >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])

    Logits are divided by the `temperature`: above 1 the same classes are predicted with less confidence.
    """

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
        each = logits.float().log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return each.flatten(1).sum(1) if each.dim() > 1 else each

    def accumulator(self, keep: bool) -> Accumulator:
        return ClassAccumulator(keep)

    def add(self, accumulator: Accumulator, outputs: Tensor) -> None:
        accumulator.add(self._logits(outputs, stacked=True))

    def _logits(self, output: Tensor, stacked: bool = False) -> Tensor:
        """The logits with the classes last, divided by the temperature, in float32, as half precision would round."""
        logits = output.movedim(self.class_dim + (stacked and self.class_dim >= 0), -1)
        if logits.shape[-1] == 0:
            raise BayesifyError(f"outputs of shape {tuple(output.shape)} have no classes in dimension {self.class_dim}")
        return logits if self.temperature == 1 else logits.float() / self.temperature


class Bernoulli(Likelihood):
    """Yes or no, once (B,) or for each of several labels (B, L); outputs are logits of yes.

    Labels are 0 or 1, or probabilities of yes (soft labels), for which `log_prob` is the negative cross-entropy.

    >>> Bernoulli().log_prob(torch.zeros(1, 3), torch.tensor([[1, 0, 1]])).exp()
    tensor([0.1250])
    """

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

    def accumulator(self, keep: bool) -> Accumulator:
        return BinaryAccumulator(keep)


class Gaussian(Likelihood):
    """Real targets with a precision: a number (fixed), "learned" (one for the data) or "input" (one per input).

    >>> Gaussian(precision=4.0).log_prob(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([-0.2258])

    With "input" the outputs hold the means and, after them in the last dimension, as many log-precisions. Draws are
    kept unless told otherwise, for the exact density and quantiles of their mixture.
    """

    keeps_draws = True

    def __init__(self, precision: float | Literal["learned", "input"] = 1.0) -> None:
        super().__init__()
        if isinstance(precision, str) and precision not in ("learned", "input"):
            raise BayesifyError(f"Gaussian(precision={precision!r}): expected a number, 'learned' or 'input'")
        if not isinstance(precision, str) and not 0 < precision < float("inf"):
            raise BayesifyError(f"Gaussian(precision={precision!r}): expected a number > 0")
        self.per_input = precision == "input"
        self.log_precision: Tensor
        if precision == "learned":
            self.log_precision = nn.Parameter(torch.zeros(()))
        else:
            fixed = 0.0 if isinstance(precision, str) else math.log(precision)
            self.register_buffer("log_precision", torch.tensor(fixed))

    def split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the standard deviation that an output stands for."""
        output = output.float() if output.dtype != torch.float64 else output
        if not self.per_input:
            return output, (-0.5 * self.log_precision).exp().to(output).expand_as(output)
        if output.dim() == 0 or output.shape[-1] % 2:
            raise BayesifyError(
                f"outputs of shape {tuple(output.shape)}: with precision='input' the last dimension holds as many "
                "log-precisions as means, so it must be even"
            )
        mean, log_precision = output.chunk(2, -1)
        return mean, (-0.5 * log_precision).exp()

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        mean, std = self.split(output)
        if mean.shape != target.shape:
            raise BayesifyError(f"means have shape {tuple(mean.shape)}, targets {tuple(target.shape)}")
        return gaussian_log_prob(target, mean, std)

    def accumulator(self, keep: bool) -> Accumulator:
        return GaussianAccumulator(keep)

    def add(self, accumulator: Accumulator, outputs: Tensor) -> None:
        assert isinstance(accumulator, GaussianAccumulator)
        accumulator.add_gaussian(*self.split(outputs))
