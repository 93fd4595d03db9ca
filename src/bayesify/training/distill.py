"""`distill`: train one ordinary network to predict what all draws of a Bayesian one together predict."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.batches import batches, check_count, input_of, mapped, run
from bayesify.conversion.explain_not_finite import NotFiniteError
from bayesify.errors import BayesifyError
from bayesify.layers import bayesian_layers
from bayesify.layers.base import unwrapped
from bayesify.prediction.dirichlet import Dirichlet, log_precision_of
from bayesify.prediction.gaussian import Gaussian
from bayesify.prediction.likelihood import Categorical, Likelihood, likelihood_of
from bayesify.prediction.plan import Call, Plan
from bayesify.prediction.predict import draw
from bayesify.prediction.results import BinaryPrediction, Classification, CountPrediction, Prediction, Regression
from bayesify.prediction.samples import methods_of, number_of_draws

INFORMATION_WEIGHT = 10.0  # of a squared difference in mutual information against a KL divergence, both in nats
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def distill(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    epochs: int = 20,
    lr: float = 1e-3,
    samples: int | None = None,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    into: Dirichlet | None = None,
    start: nn.Module | None = None,
    cache: bool = False,
    optimizer: MakeOptimizer | None = None,
    call: Call | None = None,
    progress: Callable[[int, float], Any] | None = None,
) -> nn.Module:
    """Train an ordinary network whose single output predicts what many draws of the model together predict.

    >>> import bayesify as by
    >>> model, x = by.convert(nn.Linear(4, 3), by.Rank1(4)), torch.randn(64, 4)
    >>> student = by.distill(model, [x[:32], x[32:]], epochs=2)
    >>> student
    Linear(in_features=4, out_features=3, bias=True)

    The loss is the KL divergence of the student's prediction from the model's, averaged over rows: of class or label
    probabilities from the draws' mean, or of a Gaussian from one with the draws' mean and total variance. (Where the
    noise is the same for all inputs, the student learns the mean only: the epistemic uncertainty is lost.) No label
    is used. Every epoch has draws of another seed, so their noise averages out over epochs. The learning rate falls to
    0 along a cosine. The student is trained in evaluation mode, so norms keep their statistics and dropout is off.

    Args:
        model: A converted network; it stays as it is.
        loader: Inputs in batches, as `predict` takes them, that can be read once per epoch. Any inputs like those of
            later use, with labels or without: the more, the better.
        epochs: How often to go through the loader.
        lr: The learning rate of Adam.
        samples: The number of draws for each batch, as in `predict`; each costs a call of the network.
        seed: The seed of the draws of the first epoch.
        likelihood: What the outputs of model and student mean; `by.Categorical()` unless given.
        into: `by.Dirichlet()` if the student is to learn the epistemic part of the uncertainty of classes, too.
        start: A network to start from, which is copied; by default the mean network, `by.draw(model, None)`.
        cache: Whether to keep the batches and their predictions of the first pass through the loader for all epochs.
            It saves most of the time, but needs the memory, and sees only the augmentations of the first pass.
        optimizer: A function from a list of parameters to an optimizer, in place of Adam; `lr` is not used then.
        call: As in `predict`.
        progress: A function that is called with the number of each epoch, from 1, and its mean loss.

    Returns:
        A network like the one before conversion, frozen and in evaluation mode. `likelihood.interpret(student(x))`, or
        `by.Dirichlet().interpret(student(x))`, is its prediction. Parameters that the model does not train, outside
        its Bayesian layers, are those of the mean network.
    """
    likelihood = likelihood_of(likelihood)
    _check(model, loader, epochs, samples, seed, likelihood, into)
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        student = draw(model, None) if start is None else copy.deepcopy(start).eval()
        stack.enter_context(_recurrent_layers_in_training(student))
        trained = _trained_parameters(student, model)
        steps = optimizer(trained) if optimizer else torch.optim.Adam(trained, lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(steps, epochs)
        kept = list(_targets(Plan(model, seed, call), loader, samples, likelihood)) if cache else None
        for epoch in range(epochs):
            if kept is None:
                pairs = _targets(Plan(model, seed + epoch, call), loader, samples, likelihood)
            else:
                order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed + epoch))
                pairs = (kept[place] for place in order.tolist())
            losses = []
            for given, target in pairs:
                loss = divergence((call or run)(student, given), target, likelihood, into)
                steps.zero_grad()
                loss.backward(inputs=trained)  # a learned precision of the likelihood stays as it is
                steps.step()
                losses.append(torch.stack([loss.detach(), _is_finite(target).to(loss)]))
            _report(epoch, losses, progress)
            schedule.step()
    return student.requires_grad_(False)


def divergence(output: Tensor, target: Prediction, likelihood: Likelihood, into: Dirichlet | None = None) -> Tensor:
    """The mean KL divergence of what an output (B, …) predicts from a target, with `into` also of the precision.

    That is 20 I² times the Huber loss of log α₀ against the precision with the target's mutual information I: near it,
    10 times the squared difference in mutual information, but with a gradient however far off the start is.
    """
    first, second = (part.squeeze(0) for part in (into or likelihood).split(output.unsqueeze(0)))
    expected = target.mean if isinstance(target, Regression) else target.log_probs  # type: ignore[attr-defined]
    if first.shape != expected.shape:
        raise BayesifyError(
            f"distill: the student's output has shape {tuple(first.shape)}, the model's {tuple(expected.shape)}"
        )
    if isinstance(target, CountPrediction):  # of Poisson distributions with these means
        return (torch.xlogy(target.mean, target.mean / first) - target.mean + first).mean()
    if isinstance(target, Regression):
        is_free = isinstance(likelihood, Gaussian) and likelihood.per_input
        std = target.std if is_free else second
        ratio = (std.square() + (target.mean - first).square()) / second.square()
        return 0.5 * (ratio - 1).mean() + (second / std).log().mean()
    if isinstance(target, BinaryPrediction):
        expected = torch.stack([target.log_probs, target.log_not_probs], -1)
    lowest = torch.finfo(second.dtype).min / 2  # a class that is masked everywhere has log-probability -inf
    own, expected = second.clamp_min(lowest), expected.clamp_min(lowest)
    loss = (expected.exp() * (expected - own)).sum(-1).mean()
    if into is not None and isinstance(target, Classification):
        goal = log_precision_of(expected, target.epistemic)
        off = nn.functional.huber_loss(first.float().logsumexp(-1), goal, reduction="none")
        loss = loss + INFORMATION_WEIGHT * (2 * target.epistemic.square() * off).mean()
    return loss


def _check(
    model: nn.Module,
    loader: Any,
    epochs: int,
    samples: int | None,
    seed: int,
    likelihood: Likelihood,
    into: Dirichlet | None,
) -> None:
    if not isinstance(model, nn.Module):
        raise BayesifyError(f"distill: expected a converted network, got {type(model).__name__}")
    if isinstance(loader, tuple):
        raise BayesifyError("distill: a tuple may be batches, or an input and its labels; give a list of batches")
    check_count("epochs", epochs, of="distill")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise BayesifyError(f"distill(seed={seed!r}): expected an integer")
    draws = number_of_draws(methods_of(model), samples)
    if into is None:
        return
    if not isinstance(into, Dirichlet):
        raise BayesifyError(f"distill(into={into!r}): expected by.Dirichlet(), or None for the mean alone")
    if type(likelihood) is not Categorical or likelihood.class_dim != into.class_dim:
        raise BayesifyError(
            f"distill(likelihood={likelihood!r}, into={into!r}): a Dirichlet is a distribution over the probabilities "
            "of classes; expected likelihood=by.Categorical() with the same class_dim"
        )
    if draws < 2:
        raise BayesifyError(f"distill(samples={draws}, into={into!r}): one draw has no epistemic part; use 2 or more")


def _trained_parameters(student: nn.Module, model: nn.Module) -> list[nn.Parameter]:
    """The student's parameters but those that the model keeps fixed outside its Bayesian layers; others are frozen."""
    inner = unwrapped(model)
    drawn = {id(p) for layer in bayesian_layers(inner).values() for p in layer.parameters()}
    fixed = {name for name, p in inner.named_parameters() if not p.requires_grad and id(p) not in drawn}
    for name, p in student.named_parameters():
        p.requires_grad_(p.is_floating_point() and name not in fixed)
    trained = [p for p in student.parameters() if p.requires_grad]
    if not trained:
        raise BayesifyError("distill: every parameter of the model is fixed; set requires_grad of some to True")
    return trained


@contextmanager
def _recurrent_layers_in_training(student: nn.Module) -> Iterator[None]:
    """Put recurrent layers in training mode without dropout: cuDNN's have no gradients in evaluation mode."""
    layers = [(module, module.dropout) for module in student.modules() if isinstance(module, nn.RNNBase)]
    for module, _ in layers:
        module.training, module.dropout = True, 0.0
    try:
        yield
    finally:
        for module, dropout in layers:
            module.training, module.dropout = False, dropout


def _targets(plan: Plan, loader: Any, samples: int | None, likelihood: Likelihood) -> Iterator[tuple[Any, Prediction]]:
    """Each batch of a loader as the network takes it, and what the draws of a plan predict for it."""
    draws = range(number_of_draws(plan.drawn.methods, samples))
    for batch in batches(loader, None):
        given = mapped(batch if plan.call is not run else input_of(batch), _for_autograd)
        accumulator = likelihood.accumulator(keep=False)
        with torch.no_grad():
            for outputs in plan.outputs(given, draws):
                likelihood.add(accumulator, outputs)
        yield given, accumulator.result(plan.row_dim)


def _for_autograd(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _is_finite(target: Prediction) -> Tensor:
    if isinstance(target, Regression):
        return target.std.isfinite().all() & target.mean.isfinite().all()
    assert isinstance(target, (Classification, BinaryPrediction))
    return ~target.log_probs.isnan().any()


def _report(epoch: int, losses: list[Tensor], progress: Callable[[int, float], Any] | None) -> None:
    """Raise if an epoch had no batch or a loss that is not finite, else report its mean loss."""
    if not losses:
        reason = "it is empty" if epoch == 0 else "it can be read only once; use cache=True or a list of batches"
        raise BayesifyError(f"distill: the loader gave no batch in epoch {epoch + 1}: {reason}")
    loss, is_target_finite = torch.stack(losses).unbind(1)
    if loss.is_meta:
        return
    bad = (~loss.isfinite()).nonzero().flatten().tolist()
    if bad and is_target_finite[bad[0]]:
        advice = "the student diverged. Lower lr, or give an optimizer with smaller steps"
    elif bad:
        advice = "the model's prediction is not finite. by.predict(model, batch) names the layer"
    if bad:
        raise NotFiniteError(f"distill: the loss is not finite in batch {bad[0]} of epoch {epoch + 1}: {advice}")
    if progress:
        progress(epoch + 1, float(loss.mean()))
