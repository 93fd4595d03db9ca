"""`predict`: run draws over batches and average them; `draw` and `members`: draws as ordinary networks."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from bayesify.batches import batches, check_count, in_tensors, input_of
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.conversion.explain_not_finite import NotFiniteError, explain_not_finite
from bayesify.conversion.untrained_posterior import warn_if_untrained
from bayesify.errors import BayesifyError
from bayesify.methods.draw_design import Design
from bayesify.prediction.adaptive import (
    MOST_DRAWS,
    Adaptive,
    check_tolerance,
    predict_adaptively,
    warn_of_margins,
)
from bayesify.prediction.likelihood import Likelihood, likelihood_of
from bayesify.prediction.plan import Call, Plan
from bayesify.prediction.results import Prediction, Regression
from bayesify.prediction.samples import stops_of


def predict(
    model: nn.Module,
    data: Any,
    samples: int | Adaptive | None = None,
    *,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    batch_size: int | None = None,
    draws: bool | None = None,
    call: Call | None = None,
    design: Design = "balanced",
    tolerance: float | None = None,
    familiarity: Any = None,
) -> Any:
    """The posterior predictive of a tensor, or of a loader's batches, from S draws of the whole network.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.Rank1(4))
    >>> p = by.predict(model, torch.randn(10, 4), samples=8)
    >>> p.probs.shape, p.epistemic.shape
    (torch.Size([10, 3]), torch.Size([10]))

    Draw s of a seed is the same function whatever the batches; it uses component s modulo K. The model, its mode and
    the global random state stay as they are, and several threads may predict at once.

    Args:
        model: A converted network, a `lab.Run`, or what its `load()` returns.
        data: A tensor, an array or nested lists of numbers, an (input, target) pair, whose input is used, a dict of
            keyword arguments, or an iterable of these, such as a loader; or a data set, whose rows are such.
        samples: The number S of draws. By default, each component once if components are points (if layers have
            different numbers of them, every combination that occurs), else a multiple of K, at least 20.
            `by.Adaptive()` stops for each input once its prediction is known precisely enough.
        seed: The seed of the draws.
        likelihood: What outputs mean; `by.Categorical()` unless given.
        batch_size: How many rows of a tensor to run at a time; by default all.
        draws: Whether to keep every draw's output; by default, the likelihood decides.
        call: A function `call(network, batch)` that returns the output, if calling the network on the input is not
            enough; it gets the batch unchanged, targets included.
        design: "balanced" draws cancel much of each other's noise, so that their average is as precise as that of
            several times as many "independent" ones. Each alone has the posterior's distribution in both.
        tolerance: In place of `samples`: draw for each input until the 95% margin of all its probabilities, or of its
            mean in predictive standard deviations, is at most this, and warn if 1,000 draws are not enough. It is short
            for `samples=by.Adaptive(max=1000, tolerance=…, claims="mean")`.
        familiarity: A `by.Familiarity`; the prediction then has the inputs' familiarity, at the cost of one more pass.

    Returns:
        A `Prediction`: a classification, a binary prediction or a regression, by the likelihood.
    """
    samples = _rule_of(samples, tolerance, draws)
    if not isinstance(model, nn.Module):
        return _of_trained(
            model, (likelihood, draws, call, familiarity), data, samples, seed=seed, batch_size=batch_size
        )
    likelihood = likelihood_of(likelihood)
    keep = likelihood.keeps_draws if draws is None else draws
    parts: list[Prediction] = []
    with torch.inference_mode(False), torch.no_grad():
        plan = Plan(model, seed, call, design)
        _warn_of_mistakes(model, plan, data)
        stops = stops_of(plan.drawn.methods, samples, plan.blocks.length)
        watch = None if familiarity is None else familiarity.watch(model, call)
        if not isinstance(data, Tensor):
            data = in_tensors(data, model, batch_size, unchanged=call is not None)
        for batch in batches(data, batch_size, plan.drawn.batch_dim, None if call else plan.keys_with_rows):
            given = batch if call else input_of(batch)
            if isinstance(samples, Adaptive):
                parts.append(predict_adaptively(plan, given, likelihood, samples, stops))
            else:
                accumulator = likelihood.accumulator(keep, plan.blocks)
                for outputs in plan.outputs(given, range(stops[-1])):
                    likelihood.add(accumulator, outputs)
                parts.append(accumulator.result(plan.row_dim))
            _refuse_not_finite(parts, model, given)
            if watch is not None:
                parts[-1] = watch.add(parts[-1], given)
    return _joined(parts, samples, plan.row_dim)


def _warn_of_mistakes(model: nn.Module, plan: Plan, data: Any) -> None:
    """Warn of a posterior that training has not moved, and of a loader whose order nobody knows."""
    if isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler):
        problem = "the loader shuffles, so predictions are in an order that is not the data's: use shuffle=False"
        warnings.warn(problem, stacklevel=3)
    if any(layer.scope.norms for layer in plan.drawn.layers.values()):
        warn_if_untrained(model)


def _rule_of(samples: Any, tolerance: float | None, draws: bool | None) -> Any:
    """The number of draws, or the rule that a tolerance stands for."""
    if tolerance is not None and samples is not None:
        raise BayesifyError(
            f"samples={samples!r} and tolerance={tolerance!r}: expected one of them, a number of draws or a tolerance "
            "that decides it; for both use samples=by.Adaptive(max=…, tolerance=…, claims='mean')"
        )
    if tolerance is not None:
        check_tolerance(tolerance)
        samples = Adaptive(max=MOST_DRAWS, tolerance=tolerance, claims="mean")
    if isinstance(samples, Adaptive) and draws:
        raise BayesifyError("draws=True: with samples=Adaptive(…) inputs have different draws, which can't be kept")
    return samples


def _joined(parts: list[Prediction], samples: Any, dim: int) -> Prediction:
    """The prediction of all batches; warns if its margins are not what was asked for."""
    found = parts[0] if len(parts) == 1 else Prediction.join(parts, dim)
    if isinstance(samples, Adaptive) and samples.claims == "mean":
        warn_of_margins(found, samples, dim)
    return found


def _refuse_not_finite(parts: list[Any], model: nn.Module, batch: Any) -> None:
    """Raise where the last prediction is not a number: its label would be one of the classes all the same."""
    result = parts[-1]
    value = result.mean if isinstance(result, Regression) else result.log_probs
    bad = ~value.isfinite() if isinstance(result, Regression) else value.isnan()
    if not bad.is_meta and bool(bad.any()):
        rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
        raise NotFiniteError(
            f"the prediction is not finite in {len(rows)} of {len(bad)} rows of batch {len(parts) - 1}, such as row "
            f"{rows[0]}: {explain_not_finite(model, batch)}"
        )


def _of_trained(trained: Any, own: tuple[Any, ...], data: Any, samples: Any, **options: Any) -> Any:
    """The prediction of a trained model of `bayesify.lab`, which prepares its inputs itself."""
    is_of_lab = hasattr(trained, "model") or hasattr(trained, "load")
    if not (is_of_lab and callable(getattr(trained, "predict", None))):
        raise BayesifyError(
            f"expected a converted network, got {type(trained).__name__}; of a run, give lab.Run(…) or its load()"
        )
    if any(option is not None for option in own):
        raise BayesifyError(
            "a loaded run has a likelihood, a call and a familiarity of its own: leave out likelihood, draws, call and "
            "familiarity, or use by.predict(trained.model, trained.inputs.prepare(x), …)"
        )
    return trained.predict(data, samples, **options)


def draw(model: nn.Module, seed: int | None = 0, *, index: int = 0, design: Design = "balanced") -> nn.Module:
    """One draw (or with `seed=None` the mean) as an ordinary frozen network, to be called many times.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.IBNN(4))
    >>> by.draw(model, seed=1)
    Linear(in_features=4, out_features=3, bias=True)

    Args:
        model: A converted network.
        seed: The seed of the draw, as in `predict`; None for the mean network.
        index: Which draw of the seed.
        design: As in `predict`.

    Returns:
        A network that shares no tensor with the model, so neither changes the other.
    """
    drawn = DrawnNetwork(model, design)
    drawn.write_draw(seed, index)
    return drawn.detached()


def members(model: nn.Module, n: int | None = None, *, seed: int = 0, design: Design = "balanced") -> list[nn.Module]:
    """Ordinary frozen networks: n draws of a seed or, without n, the mean of each of the K components.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.Rank1(6))
    >>> len(by.members(model)), len(by.members(model, n=20, seed=1))
    (6, 20)

    Args:
        model: A converted network.
        n: The number of draws: those that `predict` makes with `samples=n` and the same seed. None for the means.
        seed: The seed of the draws.
        design: As in `predict`.

    Returns:
        Networks that share no tensor with the model or each other.
    """
    if n is not None:
        check_count("n", n, of="members")
        return [draw(model, seed, index=index, design=design) for index in range(n)]
    networks = []
    for tensors in DrawnNetwork(model).members():
        drawn = DrawnNetwork(model)
        drawn.freeze_dropout(None)
        drawn.write(tensors)
        networks.append(drawn.detached())
    return networks
