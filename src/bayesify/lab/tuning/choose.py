"""`choose`: choose among methods in a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.conversion.explain_not_finite import NotFiniteError
from bayesify.lab.tuning.choice import Choice, Trial, TuneError, row_nll, row_shares
from bayesify.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Chosen(Choice):
    """A choice with its method, and the model that was trained with it."""

    method: Method
    model: nn.Module

    __str__ = Choice.__str__


def choose(
    fit: Callable[[Any], nn.Module],
    methods: Sequence[Method],
    validation: tuple[Any, Tensor] | Iterable[tuple[Any, Tensor]],
    *,
    seed: int = 0,
    **options: Any,
) -> Chosen:
    """Train a model with each of several methods, and choose the one with the lowest validation NLL.

    Args:
        fit: Makes and trains a model for a method: converts a fresh network, trains it and returns it.
        methods: The methods to try, such as one method with several sizes of noise. The first stays unless another is
            better by more than one standard error of the paired difference.
        validation: Rows that `fit` does not train on: inputs and targets, or batches of them.
        seed: What torch is seeded with before each fit, so that all start from the same weights.
        **options: Options of `by.predict`, such as `likelihood` or `samples`.

    Returns:
        The choice, with its `method` and its `model`; `print` shows the table and the reason.

    Raises:
        TuneError: If there are fewer than two methods or two validation rows, or if no prediction is finite.

    >>> x, y = torch.randn(60, 4), torch.randint(3, (60,))
    >>> def fit(method):
    ...     model = by.convert(nn.Linear(4, 3), method)
    ...     optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         by.elbo(model, x[:40], y[:40], n=40).loss.backward()
    ...         optimizer.step()
    ...     return model
    >>> choice = choose(fit, [by.MCDropout(0.1), by.MCDropout(0.5)], (x[40:], y[40:]))
    >>> choice.method in (by.MCDropout(0.1), by.MCDropout(0.5)), len(choice.trials)
    (True, 2)
    """
    is_pair = isinstance(validation, (tuple, list)) and len(validation) == 2 and isinstance(validation[1], Tensor)
    batches: list[Any] = [validation] if is_pair else list(validation)  # read once: a loader may shuffle
    y = torch.cat([targets.cpu() for _, targets in batches]) if batches else torch.empty(0)
    if len(methods) < 2 or len(y) < 2:
        raise TuneError(f"{len(methods)} methods and {len(y)} validation rows: expected at least 2 of each")
    trials: list[Trial] = []
    models: list[nn.Module] = []
    for method in methods:
        torch.manual_seed(seed)
        models.append(fit(method))
        try:
            p = by.predict(models[-1], batches, **options)
            own = y.to(p.standard_error.device)
            trials.append(Trial(str(method), row_nll(p, own).cpu(), float(row_shares(p, own).mean())))
        except NotFiniteError as error:
            trials.append(Trial.failed(str(method), str(error)))
    shares = "coverage" if isinstance(options.get("likelihood"), by.Gaussian) else "accuracy"
    at = trials.index(Choice(tuple(trials), shares).chosen)
    return Chosen(tuple(trials), shares, method=methods[at], model=models[at])
