"""Counts: a Poisson distribution whose rate a draw gives, and the sums over draws that give a mixture of them."""

from dataclasses import fields

import torch
from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.methods.base import at_least_float32
from bayesify.prediction.gaussian import GaussianAccumulator
from bayesify.prediction.likelihood import Likelihood
from bayesify.prediction.results import CountPrediction, Prediction, poisson_log_prob


class CountAccumulator(GaussianAccumulator):
    """Mean and variance of the draws' rates, which are also the variances of their counts."""

    def result(self, dim: int = 0) -> Prediction:
        found = super().result(dim)
        return CountPrediction(**{each.name: getattr(found, each.name) for each in fields(found)})


class Poisson(Likelihood):
    """Counts: 0, 1, 2, …; outputs are the logarithms of the rates at which they are expected.

    >>> Poisson().log_prob(torch.zeros(1, 1), torch.tensor([[2.0]])).exp()  # a rate of 1: exp(-1) / 2!
    tensor([0.1839])

    Draws are kept unless told otherwise, for the exact probabilities and quantiles of their mixture.
    """

    keeps_draws = True
    sums = CountAccumulator

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        rates = at_least_float32(outputs).exp()
        return rates, rates.sqrt()

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        if output.shape != target.shape:
            raise BayesifyError(
                f"outputs have shape {tuple(output.shape)}, counts {tuple(target.shape)}; they must be the same"
            )
        is_count = (target >= 0) & (target == target.round())
        if target.device.type == "cpu" and not bool(is_count.all()):
            raise BayesifyError(
                f"counts from {float(target.min()):g} to {float(target.max()):g}: expected whole numbers from 0 on; "
                "for other real targets use likelihood=by.Gaussian()"
            )
        output = at_least_float32(output)
        each = poisson_log_prob(target, output)
        each = torch.where(is_count, each, torch.nan)  # elsewhere asking would make the host wait
        return each.flatten(1).sum(1) if each.dim() > 1 else each
