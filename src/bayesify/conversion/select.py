"""Which layers become Bayesian, and by which method."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from bayesify.errors import ConversionError
from bayesify.layers import LAYERS, REFUSED, BayesianLayer, Posterior, bayesian_type, forget_trials, known_type
from bayesify.layers.base import plain_type
from bayesify.methods.base import Method, Role

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Methods = Method | Mapping[Selector, Method | None]


@dataclass
class Selection:
    """What `convert` will do: a method for each chosen layer, a reason for each that stays plain."""

    methods: dict[str, Method] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def select(model: nn.Module, methods: Methods) -> Selection:
    """Choose the layers of a model for a method, or for the first selector that matches each."""
    forget_trials()
    layers = {name: layer for name, layer in model.named_modules() if not isinstance(layer, Posterior)}
    result = Selection()
    if isinstance(methods, Method):
        nothing = f"{methods} found no layer to convert ({', '.join(methods.roles)} by default)"
        _by_default(result, layers, methods)
    elif isinstance(methods, Mapping) and methods:
        nothing = "every key maps to None, so nothing would be converted"
        _by_selectors(result, layers, methods)
    else:
        raise ConversionError(
            "expected a method such as Rank1(4), or a dict of pattern, layer type or predicate to method; got "
            f"{methods!r}"
        )
    known = {*result.methods, *result.skipped}
    for name, layer in layers.items():
        if name not in known and own_parameters(layer) and not isinstance(layer, BayesianLayer):
            result.skipped[name] = _structural_refusal_of(layers, name) or "not selected"
    if not result.methods:
        raise ConversionError(f"{nothing}. {_shown(result.skipped)}".strip())
    return result


def _by_default(result: Selection, layers: dict[str, nn.Module], method: Method) -> None:
    roles = {name: _role(layer) for name, layer in layers.items()}
    wanted = _of_roles(roles, method.roles)
    if method.skips_input and len(wanted) > 1 and roles[wanted[0]] in ("linear", "conv"):
        wanted = wanted[1:]
    _assign(result, layers, method, wanted)
    others = {name: role for name, role in roles.items() if role is not None and name not in wanted}
    for name, role in others.items():
        if own_parameters(layers[name]):
            kind = "the input layer" if role in method.roles else f"{role} layers"
            result.skipped[name] = f"{type(method).__name__} leaves {kind} shared by default"


def _of_roles(kinds: dict[str, Role | None], roles: tuple[Role, ...]) -> list[str]:
    """The layers with these roles; input and output are the first and last layer that is no norm or embedding."""
    maps = [name for name, kind in kinds.items() if kind in ("linear", "conv", "recurrent", "attention")]
    ends = {name for role, name in zip(("input", "output"), (maps[:1] + maps[-1:]), strict=False) if role in roles}
    return [name for name, kind in kinds.items() if kind in roles or name in ends]


def _assign(result: Selection, layers: dict[str, nn.Module], method: Method, names: list[str]) -> dict[str, str]:
    """Give layers a method; those that refuse it are skipped, and returned with their reasons."""
    reasons = {name: refusal(layers, name, method) for name in names}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    result.methods |= {name: method for name in names if name not in refused}
    result.skipped |= refused
    return refused


def _shown(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in list(reasons.items())[:3])


def _role(layer: nn.Module) -> Role | None:
    if isinstance(layer, BayesianLayer):
        return layer.role
    if type(layer) not in LAYERS and (not own_parameters(layer) or structural_refusal(layer) is not None):
        return None
    found = bayesian_type(layer)
    return None if isinstance(found, str) else found.role


def _by_selectors(result: Selection, layers: dict[str, nn.Module], methods: Mapping[Selector, Method | None]) -> None:
    taken: set[str] = set()
    for selector, method in methods.items():
        if method is not None and not isinstance(method, Method):
            raise ConversionError(f"pattern {selector!r}: expected a method such as Rank1(4) or None, got {method!r}")
        fresh = [name for name in _matched(selector, layers) if name not in taken]
        if not fresh:
            raise ConversionError(f"{selector!r}: earlier keys already take all layers it matches; move it before them")
        taken.update(fresh)
        if method is None:
            result.skipped |= dict.fromkeys(fresh, f"left out by {selector!r}")
            continue
        refused = _assign(result, layers, method, fresh)
        named = {name: reason for name, reason in refused.items() if _is_named(selector, name, layers[name])}
        if named or len(refused) == len(fresh):  # one of many layers may be skipped
            raise ConversionError(f"{selector!r}: {method} can't be applied. {_shown(named or refused)}")


def _is_named(selector: Selector, name: str, layer: nn.Module) -> bool:
    """Whether a selector means just this layer, not the layers inside it or others like it."""
    return isinstance(selector, type) or (selector == name and not list(layer.children()))


def _matched(selector: Selector, layers: dict[str, nn.Module]) -> list[str]:
    if not isinstance(selector, str | type) and not callable(selector):
        raise ConversionError(f"{selector!r}: expected a pattern, a layer type or a predicate of name and module")
    matched = [name for name, layer in layers.items() if _matches(selector, name, layer)]
    if not matched:
        raise ConversionError(_nothing_matches(selector, layers))
    return matched


def _matches(selector: Selector, name: str, layer: nn.Module) -> bool:
    """A pattern matches a layer's name or that of a module that contains it."""
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


def _no_layer_of_type(kind: type[nn.Module], layers: dict[str, nn.Module]) -> str:
    if kind in LAYERS and LAYERS[kind].role == "dropout":
        return f"{kind.__name__} has nothing but its mask to draw; use convert(…, keep_dropout=True)"
    kinds = sorted({type(layer).__name__ for layer in layers.values() if _role(layer)})
    return f"no layer is of type {kind.__name__}; the model has {', '.join(kinds) or 'no convertible layer'}"


def _nothing_matches(selector: Selector, layers: dict[str, nn.Module]) -> str:
    if isinstance(selector, type):
        return _no_layer_of_type(selector, layers)
    if not isinstance(selector, str):
        return f"the predicate {selector!r} chose no layer of the model"
    matched = {name: layer for name, layer in layers.items() if name and fnmatchcase(name, selector)}
    if any(_role(layer) == "dropout" for layer in matched.values()):
        return f"pattern {selector!r} matches dropout modules only; use convert(…, keep_dropout=True) for them"
    if matched:
        kinds = sorted({type(layer).__name__ for layer in matched.values()})
        return f"pattern {selector!r} matches only modules without parameters ({', '.join(kinds)})"
    names = [name for name, layer in layers.items() if name and _role(layer)]
    near = difflib.get_close_matches(selector.replace("*", ""), [*layers], n=3, cutoff=0.3) or names[:3]
    return f"pattern {selector!r} matches no layer; the nearest names are {', '.join(map(repr, near))}"


def refusal(layers: dict[str, nn.Module], name: str, method: Method) -> str | None:
    """Why a method can't be applied to a layer, or None."""
    layer = layers[name]
    reason = _structural_refusal_of(layers, name)
    if reason is not None:
        return reason
    bayesian = bayesian_type(layer)
    assert not isinstance(bayesian, str)
    _refuse_bad_numbers(name, layer)
    sharing = _sharing(layers, name) if method.covers_base else []
    if sharing:
        return (
            f"its weight is tied to {', '.join(map(repr, sharing))}, and {type(method).__name__} would draw each "
            "separately; a method of factors (Rank1, IBNN, BatchEnsemble) keeps them tied"
        )
    return bayesian.refusal(layer) or next(filter(None, map(method.refusal, bayesian.sites_of(layer).values())), None)


def _structural_refusal_of(layers: dict[str, nn.Module], name: str) -> str | None:
    path, _, last = name.rpartition(".")
    parent = layers.get(path)
    if parent is not None and parent is not layers[name] and last in parts_of(parent):
        return f"its parent {plain_type(parent).__name__} draws its weight: convert the parent"
    return structural_refusal(layers[name])


def structural_refusal(layer: nn.Module) -> str | None:
    """Why no method can apply to a layer as it is built, or None."""
    kind = type(layer)
    if isinstance(layer, BayesianLayer):
        return f"already Bayesian ({layer.method}); use by.revert(model) first to choose another method"
    if isinstance(layer, LazyModuleMixin) or any(nn.parameter.is_lazy(p) for p in own_parameters(layer).values()):
        return "its shape is not known yet: call the model once with a batch before converting"
    if kind in REFUSED:
        return REFUSED[kind]
    if parametrize.is_parametrized(layer):
        return "it uses torch.nn.utils.parametrize; remove the parametrization before converting"
    if "forward" in layer.__dict__:
        return "its forward is set on the instance, so that of a new class would not be called"
    originals = [name for name in layer._parameters if name.endswith(("_g", "_orig"))]
    if any(isinstance(layer.__dict__.get(name.rpartition("_")[0]), Tensor) for name in originals):
        return (
            "it uses the old-style weight_norm or spectral_norm, or is pruned, so a tensor is computed at each call; "
            "remove it first (torch.nn.utils.prune.remove keeps the zeros)"
        )
    found = bayesian_type(layer)
    return found if isinstance(found, str) else None


def own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that are not its children's."""
    return {name: p for name, p in layer._parameters.items() if p is not None}


def drawn_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a layer draws, or would draw: its own and those of its parts."""
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
        bad = 0 if p.is_meta else int((~torch.isfinite(p.detach())).sum())
        if bad:
            raise ConversionError(
                f"{name or 'model'}.{tensor_name} has {bad} NaN or infinite values of {p.numel()}, and a posterior "
                "around them would have them too; load valid weights before converting"
            )


def _sharing(layers: dict[str, nn.Module], name: str) -> list[str]:
    mine = {id(p) for p in drawn_parameters(layers[name]).values()}
    others = {
        other: layer for other, layer in layers.items() if layer not in (layers[name], *parts_of(layers[name]).values())
    }
    return [other for other, layer in others.items() if mine & {id(p) for p in own_parameters(layer).values()}]
