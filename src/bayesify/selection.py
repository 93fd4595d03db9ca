"""Which layers become Bayesian, and by which family."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from .errors import ConversionError
from .family import Family, Role
from .layers import LAYERS, REFUSED, BayesianLayer, Posterior, bayesian_type, known_type
from .layers.base import plain_type
from .reading import handed_over, read_not_called

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Families = Family | Mapping[Selector, Family | None]


@dataclass
class Plan:
    """What `convert` will do: a family for each chosen layer, a reason for each that stays."""

    chosen: dict[str, Family] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def plan(model: nn.Module, families: Families) -> Plan:
    """Choose the layers of a model for a family, or for the first selector that matches each."""
    layers = {name: layer for name, layer in model.named_modules() if not isinstance(layer, Posterior)}
    if isinstance(families, Family):
        result = _by_default(layers, families)
    elif isinstance(families, Mapping) and families:
        result = _by_selectors(layers, families)
    else:
        raise ConversionError(
            "expected a family such as Rank1(4), or a dict of pattern, layer type or predicate to family; got "
            f"{families!r}"
        )
    _say_why_not(layers, result)
    return result


def _by_default(layers: dict[str, nn.Module], family: Family) -> Plan:
    result = Plan()
    wanted = _of_roles(layers, family.roles)
    if family.spares_input and len(wanted) > 1 and _role(layers[wanted[0]]) in ("linear", "conv"):
        wanted = wanted[1:]
    for name in wanted:
        reason = refusal(layers, name, family)
        if reason is None:
            result.chosen[name] = family
        else:
            result.skipped[name] = reason
    if not result.chosen:
        _say_why_not(layers, result)
        reasons = "; ".join(f"{name or 'the model itself'}: {why}" for name, why in list(result.skipped.items())[:3])
        kinds = ", ".join(family.roles)
        raise ConversionError(f"{family} found no layer to convert ({kinds} by default). {reasons}".strip())
    for name, layer in layers.items():
        role = _role(layer)
        if role is not None and name not in wanted and own_parameters(layer):
            kind = "the input layer" if role in family.roles else f"{role} layers"
            result.skipped[name] = f"{type(family).__name__} leaves {kind} shared by default"
    return result


def _of_roles(layers: dict[str, nn.Module], roles: tuple[Role, ...]) -> list[str]:
    """The layers in the roles; the input and output layers are the first and last that are no norm or embedding."""
    kinds = {name: _role(layer) for name, layer in layers.items()}
    maps = [name for name, kind in kinds.items() if kind in ("linear", "conv", "recurrent", "attention")]
    ends = {name for role, name in zip(("input", "output"), (maps[:1] + maps[-1:]), strict=False) if role in roles}
    return [name for name, kind in kinds.items() if kind in roles or name in ends]


def _role(layer: nn.Module) -> Role | None:
    if isinstance(layer, BayesianLayer):
        return layer.role
    if type(layer) not in LAYERS and (not own_parameters(layer) or structural_refusal(layer) is not None):
        return None
    found = bayesian_type(layer)
    return None if isinstance(found, str) else found.role


def _by_selectors(layers: dict[str, nn.Module], families: Mapping[Selector, Family | None]) -> Plan:
    result = Plan()
    taken: set[str] = set()
    for selector, family in families.items():
        if not isinstance(selector, str | type) and not callable(selector):
            raise ConversionError(f"{selector!r}: expected a pattern, a layer type or a predicate of name and module")
        if family is not None and not isinstance(family, Family):
            raise ConversionError(f"pattern {selector!r}: expected a family such as Rank1(4) or None, got {family!r}")
        matched = [name for name, layer in layers.items() if _matches(selector, name, layer, layers)]
        if not matched:
            raise ConversionError(_nothing_matches(selector, layers))
        fresh = [name for name in matched if name not in taken]
        if not fresh:
            raise ConversionError(f"{selector!r}: all it matches is taken by keys before it; put it before them")
        taken.update(fresh)
        _assign(result, layers, selector, family, fresh)
    if not result.chosen:
        raise ConversionError("every key has None for a family, so nothing would be converted")
    return result


def _assign(
    result: Plan, layers: dict[str, nn.Module], selector: Selector, family: Family | None, names: list[str]
) -> None:
    """Give the matched layers their family; a layer named outright must take it, one of many may be skipped."""
    if family is None:
        result.skipped |= dict.fromkeys(names, f"left out by {selector!r}")
        return
    reasons = {name: refusal(layers, name, family, _is_named(selector, name, layers[name])) for name in names}
    result.chosen |= {name: family for name, reason in reasons.items() if reason is None}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    result.skipped |= refused
    outright = {name: reason for name, reason in refused.items() if _is_named(selector, name, layers[name])}
    if outright or (names and len(refused) == len(names)):
        shown = [f"{name or 'the model itself'}: {reason}" for name, reason in (outright or refused).items()]
        raise ConversionError(f"{selector!r}: {family} can't be applied. {'; '.join(shown[:3])}")


def _is_named(selector: Selector, name: str, layer: nn.Module) -> bool:
    """Whether a selector means just this layer, not the layers inside it or others like it."""
    return isinstance(selector, type) or (selector == name and not any(True for _ in layer.children()))


def _matches(selector: Selector, name: str, layer: nn.Module, layers: dict[str, nn.Module]) -> bool:
    """A pattern matches a layer's name or that of a part of the model that holds it."""
    if _role(layer) == "dropout":
        return False
    if isinstance(selector, type):
        return type(layer) is selector or (isinstance(layer, BayesianLayer) and layer.plain is selector)
    if _role(layer) is None and not own_parameters(layer):
        return False
    if isinstance(selector, str):
        parts = name.split(".")
        return any(fnmatchcase(".".join(parts[:end]), selector) for end in range(len(parts), 0, -1))
    return bool(selector(name, layer))


def _nothing_matches(selector: Selector, layers: dict[str, nn.Module]) -> str:
    names = [name for name, layer in layers.items() if name and _role(layer)]
    if isinstance(selector, type):
        if selector in LAYERS and LAYERS[selector].role == "dropout":
            return f"{selector.__name__} has nothing to draw but its mask; use convert(…, keep_dropout=True)"
        kinds = sorted({type(layer).__name__ for layer in layers.values() if _role(layer)})
        return f"no layer is of type {selector.__name__}; the model has {', '.join(kinds) or 'no convertible layer'}"
    if not isinstance(selector, str):
        return f"the predicate {selector!r} chose no layer of the model"
    if any(_role(layer) == "dropout" and fnmatchcase(name, selector) for name, layer in layers.items()):
        return f"pattern {selector!r} matches dropout modules only; use convert(…, keep_dropout=True) for them"
    without = [type(layer).__name__ for name, layer in layers.items() if name and fnmatchcase(name, selector)]
    if without:
        return f"pattern {selector!r} matches only modules without parameters ({', '.join(sorted(set(without)))})"
    near = difflib.get_close_matches(selector.replace("*", ""), [*layers], n=3, cutoff=0.3) or names[:3]
    return f"pattern {selector!r} matches no layer; the nearest names are {', '.join(map(repr, near))}"


def refusal(layers: dict[str, nn.Module], name: str, family: Family, named: bool = False) -> str | None:
    """Why a family can't be applied to a layer, or should not be unless the layer is named outright, or None."""
    layer = layers[name]
    reason = _read_by_holder(layers, name, named) or structural_refusal(layer)
    if reason is not None:
        return reason
    bayesian = bayesian_type(layer)
    if isinstance(bayesian, str):
        return bayesian
    _refuse_bad_numbers(name, layer)
    sharing = _sharing(layers, name) if family.covers_base else []
    if sharing:
        return (
            f"its weight is tied to {', '.join(map(repr, sharing))}, and {type(family).__name__} would draw them "
            "apart; a family of factors (Rank1, IBNN, BatchEnsemble) keeps them tied"
        )
    reason = bayesian.refusal(layer)
    if reason is not None:
        return reason
    return next(filter(None, map(family.refusal, bayesian.sites_of(layer).values())), None)


def _read_by_holder(layers: dict[str, nn.Module], name: str, named: bool) -> str | None:
    """Why a layer can't be converted whose weight a module around it reads without calling it, or None.

    A layer that it calls, too, may be named: `check` tells whether it is called.
    """
    parts = name.split(".")
    for end in range(len(parts)):
        holder, inner = layers.get(".".join(parts[:end])), ".".join(parts[end:])
        if holder is not None and inner in read_not_called(plain_type(holder)):
            said = f"its {plain_type(holder).__name__} reads its weight without calling it"
            drawn = inner in parts_of(holder)
            return f"{said} and draws it as its own: convert that" if drawn else f"{said}, so draws would pass it by"
        if holder is not None and not named and inner in handed_over(plain_type(holder)):
            return f"its {plain_type(holder).__name__} may read its weight without calling it; name it if it is called"
    return None


def structural_refusal(layer: nn.Module) -> str | None:
    """Why no family can apply to a layer as it is built, or None."""
    kind = type(layer)
    if isinstance(layer, BayesianLayer):
        return f"already Bayesian ({layer.family}); use by.revert(model) first to choose another family"
    if isinstance(layer, LazyModuleMixin) or any(nn.parameter.is_lazy(p) for p in own_parameters(layer).values()):
        return "its shape is not known yet: call the model once with a batch before converting"
    if kind in REFUSED:
        return REFUSED[kind]
    if parametrize.is_parametrized(layer):
        return "it uses torch.nn.utils.parametrize; remove the parametrization before converting"
    if "forward" in layer.__dict__:
        return "its forward method was bound to the instance, so a new class would not be called"
    if {"weight_g", "weight_orig"} & set(layer._parameters):
        return (
            "it uses the old-style weight_norm or spectral_norm, or is pruned, which makes the weight at each call; "
            "remove it first (torch.nn.utils.prune.remove keeps the zeros)"
        )
    found = bayesian_type(layer)
    return found if isinstance(found, str) else None


def own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that are not its children's."""
    return {name: p for name, p in layer._parameters.items() if p is not None}


def drawn_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a layer draws, or would: its own and those of its parts."""
    parts = [(f"{name}.", part) for name, part in parts_of(layer).items()]
    return {prefix + name: p for prefix, module in [("", layer), *parts] for name, p in own_parameters(module).items()}


def parts_of(layer: nn.Module) -> dict[str, nn.Module]:
    """The submodules whose tensors a layer draws, or would draw, as its own."""
    kind = type(layer) if isinstance(layer, BayesianLayer) else known_type(type(layer))
    return {name: layer.get_submodule(name) for name in kind.parts} if kind else {}


def _refuse_bad_numbers(name: str, layer: nn.Module) -> None:
    for tensor_name, p in drawn_parameters(layer).items():
        if not p.is_floating_point():
            raise ConversionError(f"{name}.{tensor_name} has dtype {p.dtype}; expected floating point")
        if p.device.type != "meta" and not bool(torch.isfinite(p.detach()).all()):
            bad = int((~torch.isfinite(p.detach())).sum())
            raise ConversionError(
                f"{name or 'model'}.{tensor_name} has {bad} values that are NaN or infinite of {p.numel()}; a "
                "posterior around them would be too. Load sound weights before converting"
            )


def _sharing(layers: dict[str, nn.Module], name: str) -> list[str]:
    mine = {id(p) for p in drawn_parameters(layers[name]).values()}
    itself = [layers[name], *parts_of(layers[name]).values()]
    return [
        other
        for other, layer in layers.items()
        if layer not in itself and mine & {id(p) for p in own_parameters(layer).values()}
    ]


def _say_why_not(layers: dict[str, nn.Module], result: Plan) -> None:
    """Every module with parameters of its own is either chosen or has a reason."""
    for name, layer in layers.items():
        if name not in result.chosen and name not in result.skipped and own_parameters(layer):
            if isinstance(layer, BayesianLayer):
                continue
            reason = _read_by_holder(layers, name, named=False) or structural_refusal(layer)
            result.skipped[name] = reason or "not selected"


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside `torch.compile`, `DistributedDataParallel` or `DataParallel`."""
    while True:
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model
