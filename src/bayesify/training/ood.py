"""Uncertainty regularisation on out-of-distribution inputs (BayesAdapter, section 3)."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.batches import first_tensor, run
from bayesify.conversion.drawn_network import require_layers
from bayesify.errors import BayesifyError
from bayesify.layers.base import unwrapped
from bayesify.layers.call_scope import START_BOUND
from bayesify.methods.base import Method
from bayesify.methods.distributions import entropy
from bayesify.methods.draw_design import component_cycle
from bayesify.prediction.samples import are_points, methods_of

GAMMA, ALPHA, DRAWS = 0.5, 1.0, 4
PAPER = {"gamma": 0.75, "alpha": 3.0, "draws": 2}
"""The settings of BayesAdapter, with which gamma is out of reach: two draws have at most ln 2."""


def uniform_noise(x: Tensor, epsilon: float = 0.031, *, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Inputs with noise from Uniform(±epsilon), clamped to their range: a cheap stand-in for attacks.

    >>> bool((uniform_noise(torch.ones(2, 3)) <= 1).all())
    True

    Args:
        x: Inputs.
        epsilon: The largest change.
        low: The smallest value of an input.
        high: The largest value of an input.

    Returns:
        Inputs of the same shape.
    """
    if not x.is_floating_point():
        raise BayesifyError(f"inputs of type {x.dtype} can't have noise; expected floats: for images pass x / 255")
    _require_number("epsilon", epsilon)
    if not low < high:
        raise BayesifyError(f"low={low!r}, high={high!r}: expected the smallest and the largest value of an input")
    return (x + epsilon * (2 * torch.rand_like(x) - 1)).clamp(low, high)


def uncertainty_loss(
    model: nn.Module, x: Any, *, gamma: float = GAMMA, alpha: float = ALPHA, draws: int = DRAWS
) -> Tensor:
    """alpha · relu(gamma - MI).mean(): on out-of-distribution inputs, mutual information should reach gamma (eq. 9).

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.LowRankEnsemble(20))
    >>> by.uncertainty_loss(model, torch.randn(8, 4)) > 0
    tensor(True)

    The mutual information is at most the logarithm of the number of draws, of classes, and of components that are
    points. A gamma above that is warned of: no input can reach it, so the loss pushes all of them for ever.

    Args:
        model: A converted classifier.
        x: A batch of out-of-distribution inputs.
        gamma: The mutual information to reach, in nats.
        alpha: The weight of the loss.
        draws: The number of draws, at least 2. Each uses a different component, as long as there are any left.

    Returns:
        A scalar to add to the training loss.

    Raises:
        BayesifyError: If an option is out of range, the batch is empty, or the network has one output for each input.
    """
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise BayesifyError(f"draws={draws!r}: the mutual information needs at least 2 draws")
    _require_number("gamma", gamma)
    _require_number("alpha", alpha)
    first = first_tensor(x)
    if first is not None and first.numel() == 0:
        raise BayesifyError(f"the batch has no rows: its input has shape {tuple(first.shape)}. Skip empty batches")
    log_probs = _log_probs_of_draws(model, x, draws)
    _warn_if_out_of_reach(gamma, draws, log_probs.shape[-1], methods_of(model))
    mean = log_probs.logsumexp(0) - math.log(draws)
    information = entropy(mean) - entropy(log_probs).mean(0)
    return alpha * torch.relu(gamma - information).mean()


def _log_probs_of_draws(model: nn.Module, x: Any, draws: int) -> Tensor:
    """The log-probabilities (draws, rows, …, classes) of several calls, in which a row never has the same component."""
    scopes, start = {layer.scope for layer in require_layers(model).values()}, int(torch.randint(START_BOUND, ()))
    outputs = []
    with _norms_as_in_evaluation(unwrapped(model)):
        try:
            for index in range(draws):
                for scope in scopes:  # a row has the next component in each call
                    scope.start = torch.tensor([start + index])
                outputs.append(run(model, x))
        finally:
            for scope in scopes:
                scope.start = None
    if outputs[0].dim() < 2 or outputs[0].shape[-1] < 2:
        raise BayesifyError(
            f"the network's output has shape {tuple(outputs[0].shape)}; expected logits of at least 2 classes in the "
            "last dimension, since the loss is the mutual information of draws and classes"
        )
    return torch.stack([logits.float().log_softmax(-1) for logits in outputs])


def _warn_if_out_of_reach(gamma: float, draws: int, classes: int, methods: Sequence[Method]) -> None:
    """Warn if the mutual information of so many draws, or of so many classes, can't reach gamma."""
    distinct = min(draws, component_cycle(methods)) if are_points(methods) else draws
    bound = math.log(min(distinct, classes))
    if gamma <= bound:
        return
    most = f"{classes} classes" if classes <= distinct else f"{draws} draws" if distinct == draws else ""
    most = most or f"{distinct} components without noise"
    enough = math.ceil(math.exp(gamma)) if gamma < math.log(classes) else 0
    more = f"take draws={enough} or more, or " if enough and distinct == draws else ""
    warnings.warn(
        f"gamma={gamma:g} is out of reach: the mutual information of {most} is at most ln {min(distinct, classes)} = "
        f"{bound:.3f}, so the loss never becomes 0 and pushes all inputs for ever, whatever gamma is; {more}choose a "
        f"gamma well below {bound:.3f}",
        stacklevel=3,
    )


def _require_number(name: str, value: float) -> None:
    """Raise unless an option is a positive number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BayesifyError(f"{name}={value!r}: expected a number above 0")


@contextmanager
def _norms_as_in_evaluation(model: nn.Module) -> Iterator[None]:
    """Normalise by running statistics, which describe the training data, and leave these as they are.

    Out-of-distribution inputs would look familiar if they were normalised by their own statistics, and an input's loss
    would depend on the others in its batch; in evaluation neither is so.
    """
    norms = [each for each in model.modules() if isinstance(each, _NormBase) and each.track_running_stats]
    before = [norm.training for norm in norms]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm, was_training in zip(norms, before, strict=True):
            norm.training = was_training
