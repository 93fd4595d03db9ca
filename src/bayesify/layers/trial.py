"""What a layer of an unknown type computes, found out by trying a copy of it on a few numbers."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..family import Perturbation
from .base import BayesianLayer
from .custom import Custom, CustomBatchNorm, Traits, derived_type
from .kernel import Kernel
from .rows import Rows

ROWS = 2
TOLERANCE = 1e-3
"""Relative to the largest output; the trial's factors change outputs by half."""
HARMLESS = {"reset_parameters", "extra_repr"}
"""What a subclass may say otherwise and still compute the same."""


def inherits_all(kind: type[nn.Module], known: type[nn.Module]) -> bool:
    """Whether a subclass leaves everything as it is that makes the layer's output.

    >>> class Named(nn.Linear):
    ...     def extra_repr(self):
    ...         return "mine"
    >>> inherits_all(Named, nn.Linear)
    True
    """
    own = (name for part in kind.__mro__ if part not in known.__mro__ for name in vars(part))
    return not any(hasattr(known, name) and not name.startswith("__") and name not in HARMLESS for name in own)


def clash(layer: nn.Module) -> str | None:
    """Why a layer can't be Bayesian that has something under a name that Bayesian layers need, or None."""
    parts = type(layer).__mro__[: -len(nn.Module.__mro__)]
    taken = NAMES & (set(vars(layer)) | {name for part in parts for name in vars(part)})
    return (
        f"{type(layer).__name__} has an attribute {min(taken)!r}, a name that a Bayesian layer needs" if taken else None
    )


@torch.no_grad()
def tried(layer: nn.Module, known: type[BayesianLayer] | None) -> Traits | str:
    """The traits of a layer, or why it can't be Bayesian; `known` is the supported layer that it inherits from."""
    reason = _unfit(layer, known)
    if reason is not None:
        return reason
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            trial = _copy(layer)
        except Exception as error:
            return f"{type(layer).__name__} could not be copied for a trial ({_short(error)})"
        return _found(trial, known)


def _unfit(layer: nn.Module, known: type[BayesianLayer] | None) -> str | None:
    kind = type(layer)
    if known is not None and known.role in ("recurrent", "attention", "dropout"):
        return f"{kind.__name__} is a subclass of {known.plain.__name__} that computes something else"
    if any(True for child in layer.children() for _ in child.parameters()):
        names = ", ".join(name for name, p in layer._parameters.items() if p is not None)
        return f"{names}: bare in a module that holds layers of its own, so shared by all draws"
    needed = [p for p in inspect.signature(kind.forward).parameters.values() if p.default is p.empty and p.kind < 2]
    if len(needed) != 2:
        return f"{kind.__name__}.forward takes {len(needed) - 1} inputs, so there are no rows of one input to follow"
    return None


def _copy(layer: nn.Module) -> nn.Module:
    """A copy on the CPU in single precision with numbers that make every parameter count."""
    on_meta = any(p.is_meta for p in layer.parameters())
    trial = copy.deepcopy(layer)
    trial = (trial.to_empty(device="cpu") if on_meta else trial.cpu()).float().eval()
    for tensor in trial.buffers() if on_meta else ():
        tensor.fill_(1)
    for p in trial.parameters():
        p.uniform_(0.5, 1.5)
    return trial


def _found(trial: nn.Module, known: type[BayesianLayer] | None) -> Traits | str:
    kind = type(trial)
    own = [name for name, p in trial._parameters.items() if p is not None]
    weight, bias = "weight" if "weight" in own else own[0], "bias" if "bias" in own else None
    x, features_last = next(_inputs_that_work(trial, known, weight), (None, True))
    if x is None:
        return f"{kind.__name__} took no input of a trial, or its rows are not independent of each other"
    traits = Traits(known.role if known else "custom", weight, bias, None, features_last)
    if not _depends(trial, x, weight):
        return f"{kind.__name__}: its output does not depend on its {weight}"
    if known is not None and issubclass(known, _BatchNorm):
        return traits if _is_batch_norm_and_more(trial, known, traits, x) else _OTHER_NORM.format(kind.__name__)
    if _meets_rows_in_training(trial, x):
        return f"{kind.__name__}: in training a row's output depends on the other rows"
    return _with_ways(trial, known, traits, x)


_OTHER_NORM = "{} is a batch norm that computes something else before or inside of it"


def _with_ways(trial: nn.Module, known: type[BayesianLayer] | None, traits: Traits, x: Tensor) -> Traits:
    """The traits with its role, where it is not inherited, and with what holds for several draws."""
    if known is None:
        traits = _as_map(trial, traits, x)
        if traits.in_axis is None and _forgets_scale(trial, x):
            traits = replace(traits, role="norm")
    else:
        traits = replace(traits, scales=known.role in ("linear", "conv") and _scales(trial, known, traits, x))
    return replace(traits, vmaps=_vmaps(trial, known, traits, x))


def _as_map(trial: nn.Module, traits: Traits, x: Tensor) -> Traits:
    """A matrix whose factors act as factors on inputs and outputs makes a linear layer, either way round."""
    if trial._parameters[traits.weight].dim() != 2:  # type: ignore[union-attr]
        return traits
    for axis in (1, 0):
        as_map = replace(traits, role="linear", in_axis=axis, features_last=True, scales=True)
        if _scales(trial, None, as_map, x):
            return as_map
    return traits


def _inputs_that_work(
    trial: nn.Module, known: type[BayesianLayer] | None, weight: str
) -> Iterator[tuple[Tensor, bool]]:
    for x, features_last in _inputs(trial, known, weight):
        try:
            y = type(trial).forward(trial, x.clone())
            apart = [type(trial).forward(trial, row.clone()) for row in x.split(1)]
        except Exception:
            continue
        has_rows = isinstance(y, Tensor) and y.dim() and y.shape[0] == ROWS and bool(y.isfinite().all())
        if has_rows and _close(torch.cat(apart), y):
            yield x, features_last


def _inputs(trial: nn.Module, known: type[BayesianLayer] | None, weight: str) -> Iterator[tuple[Tensor, bool]]:
    """Inputs of the shapes that a layer with such a weight may take, and whether their features are last."""
    if isinstance(trial, nn.Embedding):
        yield torch.randint(trial.num_embeddings, (ROWS, 3)), True
    if isinstance(trial, _ConvNd):
        each = zip(trial.kernel_size, trial.dilation, trial.stride, strict=True)
        yield torch.randn(ROWS, trial.in_channels, *(d * (k - 1) + 1 + s for k, d, s in each)), False
    shape = tuple(trial._parameters[weight].shape)  # type: ignore[union-attr]
    for size in dict.fromkeys(reversed(shape or (3,))):
        if known is None or known.features_last:
            yield from ((torch.randn(ROWS, *dims), True) for dims in ((3, size), (size,), (3, 4, size)))
        yield from ((torch.randn(ROWS, size, *[4] * dims), False) for dims in (2, 1, 3, 0))
    yield from ((torch.randn(ROWS, *shape[first:]), True) for first in range(len(shape)))


def _depends(trial: nn.Module, x: Tensor, weight: str) -> bool:
    parameter = trial._parameters[weight]
    assert parameter is not None
    before, y = parameter.clone(), type(trial).forward(trial, x.clone())
    parameter.uniform_(0.5, 1.5)
    after = type(trial).forward(trial, x.clone())
    parameter.copy_(before)
    return not _close(y, after)


def _meets_rows_in_training(trial: nn.Module, x: Tensor) -> bool:
    """Whether rows depend on each other in training; where it is random there, that can't be seen."""
    trial = copy.deepcopy(trial).train()
    try:
        first, second = (type(trial).forward(trial, x.clone()) for _ in range(2))
        return _close(first, second) and not _close(
            first, torch.cat([type(trial).forward(trial, r) for r in x.split(1)])
        )
    except Exception:
        return True


def _forgets_scale(trial: nn.Module, x: Tensor) -> bool:
    """A norm's output does not change when its input grows."""
    return _close(type(trial).forward(trial, 30 * x), type(trial).forward(trial, 10 * x))


def _scales(trial: nn.Module, known: type[BayesianLayer] | None, traits: Traits, x: Tensor) -> bool:
    layer = _made(trial, known, replace(traits, scales=True))
    site = layer.site_of(layer)
    assert isinstance(layer, Custom) and site.in_size is not None and site.out_size is not None
    p = Perturbation(ROWS, in_scale=_factor(site.in_size), out_scale=_factor(site.out_size))
    try:
        return _close(Kernel.term(layer, x, p, Rows(ROWS), site.base), _folded_apart(layer, p, x))
    except Exception:
        return False


def _vmaps(trial: nn.Module, known: type[BayesianLayer] | None, traits: Traits, x: Tensor) -> bool:
    layer = _made(trial, known, replace(traits, scales=False, vmaps=True))
    p = Perturbation(ROWS, weight=_factor(*layer.weight.shape))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = layer.perturbed(x.clone(), p, Rows(ROWS), layer.site_of(layer).base)
        return _close(found, _folded_apart(layer, p, x))
    except Exception:
        return False


def _is_batch_norm_and_more(trial: nn.Module, known: type[BayesianLayer], traits: Traits, x: Tensor) -> bool:
    layer = _made(trial, known, traits)
    assert isinstance(layer, CustomBatchNorm)
    try:
        y = layer.perturbed(x.clone(), Perturbation(ROWS), Rows(ROWS), layer.site_of(layer).base)
        return _close(y, type(trial).forward(trial, x.clone()))
    except Exception:
        return False


def _made(trial: nn.Module, known: type[BayesianLayer] | None, traits: Traits) -> Any:
    """The trial as the Bayesian layer that it would be."""
    layer = copy.deepcopy(trial)
    layer.__class__ = derived_type(type(trial), known, traits)
    return layer


def _folded_apart(layer: Any, p: Perturbation, x: Tensor) -> Tensor:
    return torch.cat([layer.own(layer.folded(p, row), x[row : row + 1].clone()) for row in range(ROWS)])


def _factor(*shape: int) -> Tensor:
    return 0.5 + torch.rand(ROWS, *shape)


def _close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    return float((first - second).abs().max()) <= TOLERANCE * float(second.abs().max())


def _short(error: Exception) -> str:
    return str(error).split("\n")[0][:80]


NAMES = {
    name
    for part in (*CustomBatchNorm.__mro__, *Custom.__mro__)
    if part.__module__.partition(".")[0] == __name__.partition(".")[0]
    for name in (*vars(part), *getattr(part, "__annotations__", ()))
    if not name.startswith("__") and name not in ("weight", "bias", "forward", "extra_repr", *vars(nn.Module))
}
"""What a layer's type or instance must not have under the same name."""
