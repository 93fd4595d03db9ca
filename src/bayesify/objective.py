"""All that a training loop of one's own needs: the KL, the ELBO, annealing, the gradient edit, parameter groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .batches import repeated, run
from .errors import BayesifyError
from .family import Family, Site, precise, whole
from .layers import BayesianLayer, bayesian_layers
from .layers.hooked import leaves
from .layers.scope import Scope
from .likelihood import Categorical, Likelihood
from .selection import unwrapped


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

    `shared_std` adds ‖t‖² / (2 shared_std²) for every trained tensor that no family has a prior on: the L2 that weight
    decay would otherwise supply.
    """
    terms = [family.total_kl(sites) for family, sites in _by_family(model).items()]
    if shared_std is not None:
        terms += [precise(p).square().sum() / (2 * shared_std**2) for p in _shared(model, shared_std)]
    device = terms[0].device
    return torch.stack([term.to(device) for term in terms]).sum()


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
    shared_std: float | None = None,
) -> Elbo:
    """The negative ELBO per training example of a batch, for n training examples.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.Rank1(4))
    >>> by.elbo(model, torch.randn(8, 4), torch.zeros(8).long(), n=1000).loss.backward()

    `mixture="assign"` splits the batch over the K components; "replicate" sends every row through every one. With
    `samples` each row is drawn that often. `bound="mixture"` is the log of the components' mean likelihood, which needs
    "replicate"; "average" is the mean of their log-likelihoods (Rank-1, section 3.4).
    """
    _check_objective(n, samples, mixture, bound)
    copies = samples * (_tied_components(model) if mixture == "replicate" else 1)
    if copies > 1 and any(scope.batch_dim for scope in _scopes(model)):
        raise BayesifyError("samples and 'replicate' repeat rows of the first dimension; this model has batch_dim > 0")
    with _draws_by_row(model):
        log_probs = _log_probs(model, x, y, likelihood or Categorical(), copies, side_by_side=mixture == "replicate")
    mixed = log_probs.logsumexp(1) - math.log(copies)
    log_likelihood = (mixed if bound == "mixture" else log_probs).mean()
    divergence = kl(model, shared_std=shared_std)
    loss = beta * divergence / n - log_likelihood if beta else -log_likelihood  # 0·kl would still run backward
    return Elbo(loss, log_likelihood, divergence)


def anneal(step: float, over: float, *, start: float = 0.0, end: float = 1.0) -> float:
    """A weight that grows linearly from `start` to `end` over so many steps or epochs, then stays.

    >>> [anneal(epoch, over=200) for epoch in (0, 50, 200, 250)]
    [0.0, 0.25, 1.0, 1.0]
    """
    if over < 0:
        raise BayesifyError(f"anneal(over={over!r}): expected a number of steps or epochs >= 0")
    done = min(max(step / over, 0.0), 1.0) if over else 1.0
    return start + (end - start) * done


def add_kl_grad_(model: nn.Module, *, n: int, beta: float = 1.0, shared_std: float | None = None) -> None:
    """Add the gradient of beta · kl / n to what backward left, without a graph (BayesAdapter, eq. 5-6).

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.MeanField())
    >>> by.add_kl_grad_(model, n=1000)
    >>> model.posterior.weight_log_std.grad.shape
    torch.Size([3, 4])

    Call it after `loss.backward()` (and after unscaling, where gradients are scaled) and before the optimizer's step.
    """
    _check_objective(n, 1, "assign", "average")
    with torch.enable_grad():  # or a part of a parameter would not know that it is trained
        families = _by_family(model)
    gradients = [each for family, sites in families.items() for each in family.kl_grad(sites)]
    if shared_std is not None:
        gradients += [(p, p.detach(), 1 / shared_std**2) for p in _shared(model, shared_std)]
    by_factor: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
    with torch.no_grad():
        for tensor, direction, factor in gradients:
            if whole(tensor).grad_fn is not None:  # made of parameters, by a hook
                tensor.backward((direction * (beta / n * factor)).to(tensor.dtype))
                continue
            old = _grad_of(tensor)
            if old is None:
                tensor.grad = (direction * (beta / n * factor)).to(tensor.dtype)
            else:
                olds, directions = by_factor.setdefault(factor, ([], []))
                olds.append(old)
                directions.append(direction.to(old.dtype))
        for factor, (olds, directions) in by_factor.items():
            torch._foreach_add_(olds, directions, alpha=beta / n * factor)


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

    Weight decay is the prior on shared tensors. Base tensors that a family's KL already has a prior on form a group of
    their own, "covered", whose decay is `covered_weight_decay`. Frozen parameters are left out.
    """
    posterior = {id(p) for layer in _layers(model) for p in layer.posterior.parameters()}
    covered = {id(t) for layer in _layers(model) if layer.family.covers_base for t in _base(layer)}
    groups: dict[str, dict[str, Any]] = {
        "base": {"lr": lr, "weight_decay": weight_decay},
        "covered": {"lr": lr, "weight_decay": covered_weight_decay},
        "posterior": {
            "lr": lr if posterior_lr is None else posterior_lr,
            "weight_decay": posterior_weight_decay,
        },
    }
    for p in model.parameters():
        if p.requires_grad:
            name = "posterior" if id(p) in posterior else "covered" if id(p) in covered else "base"
            groups[name].setdefault("params", []).append(p)
    return [{"name": name, **group} for name, group in groups.items() if "params" in group]


@contextmanager
def _draws_by_row(model: nn.Module) -> Iterator[None]:
    """In evaluation too every row has its own draw, so that the bound is the one that training optimises."""
    scopes = [] if model.training else _scopes(model)
    for scope in scopes:
        scope.by_rows = True
    try:
        yield
    finally:
        for scope in scopes:
            scope.by_rows = False


def _scopes(model: nn.Module) -> list[Scope]:
    return list({id(layer.scope): layer.scope for layer in _layers(model)}.values())


def _layers(model: nn.Module) -> list[BayesianLayer]:
    layers = list(bayesian_layers(unwrapped(model)).values())
    if not layers:
        raise BayesifyError("the model has no Bayesian layer: use by.convert(model, family) first")
    return layers


def _by_family(model: nn.Module) -> dict[Family, list[Site]]:
    groups: dict[Family, list[Site]] = {}
    for layer in _layers(model):
        groups.setdefault(layer.family, []).extend(layer.sites())
    return groups


def _base(layer: BayesianLayer) -> list[Tensor]:
    """The parameters that its family sees, or sees something made of."""
    with torch.enable_grad():
        return [leaf for site in layer.sites() for tensor in site.base.values() for leaf in leaves(tensor)]


def _grad_of(tensor: Tensor) -> Tensor | None:
    """Its gradient so far; of rows of a parameter, those of the parameter's, which begins with zeros."""
    p = whole(tensor)
    if p is tensor:
        return tensor.grad
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    start = (tensor.storage_offset() - p.storage_offset()) // p.stride(0)
    return p.grad.narrow(0, start, tensor.shape[0])


def _shared(model: nn.Module, shared_std: float) -> list[nn.Parameter]:
    """The trained tensors that no family's KL has a prior on."""
    if not shared_std > 0:
        raise BayesifyError(f"shared_std={shared_std!r}: expected a standard deviation > 0")
    layers = _layers(model)
    covered = {id(p) for layer in layers for p in layer.posterior.parameters()}
    covered |= {id(t) for layer in layers if layer.family.covers_base for t in _base(layer)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in covered]


def _tied_components(model: nn.Module) -> int:
    counts = {layer.family.components for layer in _layers(model) if layer.family.tied}
    if len(counts - {1}) > 1:
        raise BayesifyError(
            f"mixture='replicate' needs one number of components in all layers, got {sorted(counts)}; use 'assign'"
        )
    return max(counts, default=1)


def _log_probs(
    model: nn.Module, x: Any, y: Tensor, likelihood: Likelihood, copies: int, *, side_by_side: bool
) -> Tensor:
    """log p(y | x) of each row in each of its copies: (n, copies).

    Copies that stand side by side get consecutive components; copies of the whole batch one after another keep a row's
    component where K divides the batch.
    """
    if copies == 1:
        return likelihood.log_prob(run(model, x), y).unsqueeze(1)
    each = likelihood.log_prob(run(model, repeated(x, copies, side_by_side)), repeated(y, copies, side_by_side))
    return each.reshape(-1, copies) if side_by_side else each.reshape(copies, -1).T


def _check_objective(n: int, samples: int, mixture: str, bound: str) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BayesifyError(f"n={n!r}: expected the number of training examples, a whole number >= 1")
    if not isinstance(samples, int) or samples < 1:
        raise BayesifyError(f"samples={samples!r}: expected a whole number >= 1")
    if mixture not in ("assign", "replicate"):
        raise BayesifyError(f"mixture={mixture!r}: expected 'assign' or 'replicate'")
    if bound not in ("average", "mixture"):
        raise BayesifyError(f"bound={bound!r}: expected 'average' or 'mixture'")
    if bound == "mixture" and mixture == "assign":
        raise BayesifyError(
            "bound='mixture' averages the likelihood of a row over all components, but mixture='assign' gives each row "
            "one; use mixture='replicate'"
        )
