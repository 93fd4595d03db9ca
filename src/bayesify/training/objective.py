"""What a custom training loop needs: the KL, the ELBO, annealing, the KL's gradient, parameter groups."""

import math
import warnings
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, cast, get_args
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from bayesify.batches import check_count, chosen_rows, first_tensor, repeated, row_count, run
from bayesify.conversion.check import check_call
from bayesify.conversion.drawn_network import require_layers
from bayesify.conversion.explain_not_finite import NotFiniteError, find_nan
from bayesify.conversion.weight_reads import arguments_of
from bayesify.errors import BayesifyError, RowCountError, RowError
from bayesify.layers.base import has_scope, unwrapped
from bayesify.layers.call_scope import Scope
from bayesify.methods.base import Method, Site, at_least_float32, underlying_parameter
from bayesify.methods.draw_design import Design
from bayesify.prediction.likelihood import Likelihood, likelihood_of
from bayesify.prediction.samples import methods_of


class Elbo(NamedTuple):
    """The parts of a variational objective: `loss` = -log_likelihood + beta · kl / n, per training example."""

    loss: Tensor
    log_likelihood: Tensor
    kl: Tensor


def kl(model: nn.Module, *, shared_std: float | None = None) -> Tensor:
    """The divergence of the posterior from the prior, summed over all layers and elements.

    >>> import bayesify as by
    >>> by.kl(by.convert(nn.Linear(4, 3), by.Rank1(4))) > 0
    tensor(True)

    Args:
        model: A converted network.
        shared_std: If given, adds ‖t‖² / (2 shared_std²) for every trained tensor that no method has a prior on: the L2
            penalty that weight decay would otherwise supply.

    Returns:
        A scalar.
    """
    terms = [method.total_kl(sites) for method, sites in _by_method(model).items()]
    if shared_std is not None:
        terms += [at_least_float32(p).square().sum() / (2 * shared_std**2) for p in _shared(model, shared_std)]
    if not terms:  # kept dropout alone has no prior
        return next(model.parameters()).new_zeros((), dtype=torch.float32)
    device = terms[0].device
    total = torch.stack([term.to(device) for term in terms]).sum()
    if total.requires_grad and not unwrapped(model).training and not torch.compiler.is_compiling():
        total.register_hook(lambda _: _warn_of_evaluation_mode(model))
    return total


def elbo(
    model: nn.Module,
    x: Any,
    y: Tensor,
    *,
    n: int,
    likelihood: Likelihood | None = None,
    beta: float = 1.0,
    samples: int = 1,
    mixture: Literal["assign", "replicate"] = "assign",
    bound: Literal["average", "mixture"] = "average",
    design: Design = "balanced",
    shared_std: float | None = None,
) -> Elbo:
    """The negative ELBO per training example of a batch, for n training examples.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.Rank1(4))
    >>> by.elbo(model, torch.randn(8, 4), torch.zeros(8).long(), n=1000).loss.backward()

    Args:
        model: A converted network.
        x: A batch of inputs.
        y: Its targets.
        n: The number of training examples.
        likelihood: What outputs mean; `by.Categorical()` unless given.
        beta: The weight of the KL.
        samples: The number of draws for each row, which keeps its component.
        mixture: "assign" splits the batch over the K components; "replicate" sends every row through every one.
        bound: "average" is the mean of the components' log-likelihoods; "mixture" the log of their mean likelihood,
            which needs "replicate" (Rank-1, section 3.4).
        design: The noise of a row's samples: "balanced" cancels between them, so that gradients vary less; each sample
            alone has the posterior's distribution either way. Or "independent".
        shared_std: As in `kl`.

    Returns:
        `loss` = -log_likelihood + beta · kl / n, and its parts `log_likelihood` and `kl`.
    """
    _check_objective(n, beta, samples, mixture, bound, design)
    copies = samples * (_tied_components(model) if mixture == "replicate" else 1)
    scopes = list({id(layer.scope): layer.scope for layer in require_layers(model).values()}.values())
    if copies > 1 and any(scope.batch_dim for scope in scopes):
        raise BayesifyError("samples > 1 and 'replicate' repeat rows of dimension 0, but this model has batch_dim > 0")
    rows = row_count(x, scopes[0].batch_dim)
    if not 0 < rows <= n:
        problem = "has no rows" if rows == 0 else f"alone has {rows} rows, more than n={n} training examples"
        raise BayesifyError(f"the batch {problem}: its targets have shape {tuple(y.shape)}")
    _check_what_no_scope_does(model, x, rows, scopes)
    with ExitStack() as stack:
        for scope in scopes:  # in evaluation the bound that training has
            scope.calls = 0
            stack.enter_context(scope.drawing(per_row=True, samples=samples, balanced=design == "balanced"))
        log_probs = _log_probs(model, x, y, likelihood_of(likelihood), copies)
    if not has_scope(unwrapped(model)) and max(scope.calls for scope in scopes) > 1:
        raise RowError(f"the network calls a converted part more than once. {ONLY_PARTS}")
    mixed = log_probs.logsumexp(1) - math.log(copies)
    log_likelihood = (mixed if bound == "mixture" else log_probs).mean()
    divergence = kl(model, shared_std=shared_std)
    loss = beta * divergence / n - log_likelihood if beta else -log_likelihood  # 0·kl would still cost a backward pass
    _watch_gradient(loss, (x, y))
    return Elbo(loss, log_likelihood, divergence)


def _watch_gradient(loss: Tensor, batch: Any) -> None:
    """Let the backward pass raise if the loss is not finite because the batch is not."""
    value = loss.detach()

    def refuse(gradient: Tensor) -> None:
        if not bool(value.isfinite()) and (found := find_nan(batch)):
            raise NotFiniteError(f"the loss is {float(value)}, as {found}")

    if loss.requires_grad and loss.device.type == "cpu" and not torch.compiler.is_compiling():
        loss.register_hook(refuse)  # on other devices, asking for the value would make the host wait


def _warn_of_evaluation_mode(model: nn.Module) -> None:
    """Warn once of training a model in evaluation mode."""
    if unwrapped(model).training or unwrapped(model) in _WARNED:
        return
    _WARNED.add(unwrapped(model))
    warnings.warn(
        "the model is trained in evaluation mode, in which dropout is off, norms use their stored statistics, and a "
        "plain call of the model has one draw for all rows: call model.train() before training, and .eval() after it "
        "for modules that are to stay as in evaluation",
        stacklevel=3,
    )


ONLY_PARTS = (
    "Only parts of this network were converted, so that each call of a part is another draw. Convert the whole "
    "network, with the part's name as a pattern: by.convert(network, {'part*': method})"
)
_WARNED: WeakSet[nn.Module] = WeakSet()  # models that were trained in evaluation mode
_CHECKED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many numbers the largest checked batch of a network around converted parts had; these check their own calls."""


def _check_what_no_scope_does(model: nn.Module, x: Any, rows: int, scopes: list[Scope]) -> None:
    """Check a compiled model, and a network of which only parts were converted: no scope sees all of it."""
    inner, numbers = unwrapped(model), cast(Tensor, first_tensor(x)).numel()  # it has rows
    is_due = any(numbers >= scope.check_from[model.training] for scope in scopes)
    if inner is not model and is_due:
        check_call(inner, *arguments_of(x))
    elif model.training and not has_scope(inner) and (is_due or numbers > _CHECKED.get(inner, -1)):
        twice = [chosen_rows(x, torch.zeros(2, dtype=torch.long), 1, scopes[0].batch_dim)] if rows == 1 else []
        try:
            for batch in [*twice, x]:  # in one row no mixing of rows around a part can be seen
                for scope in scopes:
                    scope.check_failed = ""  # the network may not take its only row twice
                check_call(inner, *arguments_of(batch))
        except RowCountError as error:  # parts may get other rows, which they follow themselves
            warnings.warn(f"could not check what is around the converted parts: {error}. {ONLY_PARTS}", stacklevel=3)
        except RowError as error:
            raise RowError(f"{error}. {ONLY_PARTS}") from error
        _CHECKED[inner] = numbers


def anneal(step: float, over: float, *, start: float = 0.0, end: float = 1.0) -> float:
    """A weight that grows linearly from `start` to `end` over a number of steps or epochs, then stays.

    >>> [anneal(epoch, over=200) for epoch in (0, 50, 200, 250)]
    [0.0, 0.25, 1.0, 1.0]

    Args:
        step: The step or epoch.
        over: The number of steps or epochs of growth.
        start: The first weight.
        end: The last weight.

    Returns:
        The weight at this step.
    """
    if over < 0:
        raise BayesifyError(f"anneal(over={over!r}): expected a number of steps or epochs >= 0")
    done = min(max(step / over, 0.0), 1.0) if over else 1.0
    return start + (end - start) * done


def add_kl_grad_(model: nn.Module, *, n: int, beta: float = 1.0, shared_std: float | None = None) -> None:
    """Add the gradient of beta · kl / n to the parameters' `.grad`, without a graph (BayesAdapter, eq. 5-6).

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.MeanField())
    >>> by.add_kl_grad_(model, n=1000)
    >>> model.posterior.weight_log_std.grad.shape
    torch.Size([3, 4])

    Call it after `loss.backward()` (and after unscaling, where gradients are scaled) and before the optimizer's step.

    Args:
        model: A converted network.
        n: The number of training examples.
        beta: The weight of the KL.
        shared_std: As in `kl`.
    """
    _check_objective(n, beta, 1, "assign", "average")
    if not unwrapped(model).training:
        _warn_of_evaluation_mode(model)
    with torch.enable_grad():  # otherwise a slice of a parameter would have requires_grad=False
        methods = _by_method(model)
    gradients = [each for method, sites in methods.items() for each in method.kl_grad(sites)]
    if shared_std is not None:
        gradients += [(p, p.detach(), 1 / shared_std**2) for p in _shared(model, shared_std)]
    with torch.no_grad():
        for tensor, direction, factor in gradients:
            if not underlying_parameter(tensor).requires_grad:
                continue
            old = _grad_of(tensor)
            if old is None:
                tensor.grad = (direction * (beta / n * factor)).to(tensor.dtype)
            else:
                old.add_(direction.to(old.dtype), alpha=beta / n * factor)


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    posterior_lr: float | None = None,
    weight_decay: float = 0.0,
    posterior_weight_decay: float = 0.0,
    covered_weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: base and posterior tensors with their own learning rate and weight decay.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.IBNN(4))
    >>> groups = by.parameter_groups(model, lr=0.05, posterior_lr=1.2, weight_decay=5e-4)
    >>> [(g["name"], g["lr"], g["weight_decay"]) for g in groups]
    [('base', 0.05, 0.0005), ('posterior', 1.2, 0.0)]

    Weight decay is the prior on shared tensors. Frozen parameters are left out.

    Args:
        model: A converted network.
        lr: The learning rate of the network's own tensors.
        posterior_lr: The learning rate of the posterior's tensors; `lr` by default, as SGD may diverge with more. With
            Adam or AdamW ten times `lr` often adapts trained networks better: see docs/choose.md.
        weight_decay: The decay of the network's own tensors.
        posterior_weight_decay: The decay of the posterior's tensors.
        covered_weight_decay: The decay of the network's tensors on which a method's KL already has a prior.

    Returns:
        Groups with their names: "base", "covered" and "posterior".
    """
    options = {
        "base": {"lr": lr, "weight_decay": weight_decay},
        "covered": {"lr": lr, "weight_decay": covered_weight_decay},
        "posterior": {"lr": lr if posterior_lr is None else posterior_lr, "weight_decay": posterior_weight_decay},
    }
    trained = _trained(model)
    return [{"name": name, **options[name], "params": trained[name]} for name in options if trained[name]]


def _trained(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trained parameters: the posterior's, those that a method's KL has a prior on ("covered"), and the others."""
    layers = require_layers(model).values()
    sites = [site for layer in layers if layer.method.covers_base for site in layer.sites().values()]
    kinds = {id(underlying_parameter(tensor)): "covered" for site in sites for tensor in site.base.values()}
    kinds |= {id(p): "posterior" for layer in layers for p in layer.posterior.parameters()}
    groups: dict[str, list[nn.Parameter]] = {"base": [], "covered": [], "posterior": []}
    for p in model.parameters():
        if p.requires_grad:
            groups[kinds.get(id(p), "base")].append(p)
    return groups


def _shared(model: nn.Module, shared_std: float) -> list[nn.Parameter]:
    """The trained tensors that no method's KL has a prior on."""
    if not shared_std > 0:
        raise BayesifyError(f"shared_std={shared_std!r}: expected a standard deviation > 0")
    return _trained(model)["base"]


def _by_method(model: nn.Module) -> dict[Method, list[Site]]:
    groups: dict[Method, list[Site]] = {}
    for layer in require_layers(model).values():
        for site in layer.sites().values():  # kept dropout has none
            groups.setdefault(layer.method, []).append(site)
    return groups


def _grad_of(tensor: Tensor) -> Tensor | None:
    """Its gradient so far; for a slice of a parameter, the slice of the parameter's gradient, zeros at first."""
    p = underlying_parameter(tensor)
    if p is tensor:
        return tensor.grad
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    start = (tensor.storage_offset() - p.storage_offset()) // p.stride(0)
    return p.grad.narrow(0, start, tensor.shape[0])


def _tied_components(model: nn.Module) -> int:
    counts = {method.components for method in methods_of(model) if method.ties_components}
    if len(counts - {1}) > 1:
        raise BayesifyError(f"mixture='replicate' needs one number of components, got {sorted(counts)}; use 'assign'")
    return max(counts, default=1)


def _log_probs(model: nn.Module, x: Any, y: Tensor, likelihood: Likelihood, copies: int) -> Tensor:
    """log p(y | x) of each row in each of its copies: (n, copies)."""
    if copies == 1:
        return likelihood.log_prob(run(model, x), y).unsqueeze(1)
    rows = row_count(x, 0)
    if len(y) != rows:
        raise BayesifyError(
            f"the input has {rows} rows and the targets {len(y)}: with several samples or mixture='replicate' each row "
            "needs its target; give targets of shape (rows, …)"
        )
    inputs, targets = repeated(x, copies, rows), repeated(y, copies, rows)
    return likelihood.log_prob(run(model, inputs), targets).reshape(-1, copies)


def _check_objective(n: int, beta: float, samples: int, mixture: str, bound: str, design: str = "balanced") -> None:
    check_count("n", n, what="the number of training examples, an integer")
    if not isinstance(beta, Tensor) and not (isinstance(beta, (int, float)) and 0 <= beta < math.inf):
        raise BayesifyError(f"beta={beta!r}: expected the weight of the KL, a number >= 0")
    check_count("samples", samples)
    if mixture not in ("assign", "replicate"):
        raise BayesifyError(f"mixture={mixture!r}: expected 'assign' or 'replicate'")
    if bound not in ("average", "mixture"):
        raise BayesifyError(f"bound={bound!r}: expected 'average' or 'mixture'")
    if design not in get_args(Design):
        raise BayesifyError(f"design={design!r}: expected 'balanced' or 'independent'")
    if bound == "mixture" and mixture == "assign":
        raise BayesifyError("bound='mixture' needs every component for each row; use mixture='replicate'")
