"""Turn layers into Bayesian ones in place, and back."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import nn

from .copies import plain_again
from .errors import ConversionError
from .families import MCDropout
from .family import Family
from .layers import LAYERS, BayesianDropout, BayesianLayer, Posterior, bayesian_layers, bayesian_type
from .layers.hooked import keep_what_hooks_make
from .layers.scope import CloseScope, OpenScope, Scope, remove_scope
from .memory import COPIES
from .selection import Families, own_parameters, plan, unwrapped
from .skeleton import freeze_dropout, holder
from .values import Wanted, draws_into, mean_into, one_of

Model = TypeVar("Model", bound=nn.Module)


def convert(model: Model, families: Families, *, batch_dim: int | None = None, keep_dropout: bool = False) -> Model:
    """Make a network Bayesian in place: pretrained weights, names and the class of the model stay.

    >>> import bayesify as by
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> model = by.convert(net, {"1": by.ECMP(5), "*": by.Rank1(4)})
    >>> model is net, model(torch.randn(6, 4)).shape
    (True, torch.Size([6, 3]))

    A family alone converts its paper's layers. A dict gives one to each layer by the first key that matches it: a
    pattern for its name or for a part of the model that holds it, a layer type, or a predicate of name and module;
    None leaves layers out. `batch_dim` is the dimension of the rows in sequences of features (0 unless given);
    `keep_dropout` keeps the network's own dropout modules alive in evaluation.
    """
    _refuse_wrappers(model)
    if batch_dim is not None and (not isinstance(batch_dim, int) or batch_dim < 0):
        raise ConversionError(f"batch_dim={batch_dim!r}: expected 0 (batch first) or the dimension of the rows")
    chosen = plan(model, families)
    layers = dict(model.named_modules())
    _refuse_a_part_of_a_converted_model(model)
    made = {name: _posterior(layers[name], family) for name, family in chosen.chosen.items()}
    dropouts = _dropout_families(layers) if keep_dropout else {}
    scope = _scope_of(model, batch_dim)
    scope.skipped = {**scope.skipped, **chosen.skipped}
    for name, family in chosen.chosen.items():
        _swap(layers[name], name, family, scope, made[name])
        scope.skipped.pop(name, None)
    for name, family in dropouts.items():
        _swap(layers[name], name, family, scope, Posterior({}))
    _avoid_fast_paths(model)
    return model


def revert(model: Model, seed: int | None = None, *, index: int = 0) -> Model:
    """Make a Bayesian network plain again, in place: its mean, or with a seed one draw.

    >>> import bayesify as by
    >>> by.revert(by.convert(nn.Linear(3, 2), by.MeanField()))
    Linear(in_features=3, out_features=2, bias=True)
    """
    layers = bayesian_layers(model)
    if not layers:
        raise ConversionError("the model has no Bayesian layer to revert")
    with torch.no_grad():
        values = {
            name: mean_into(layer) if seed is None else one_of(draws_into(layer, Wanted(seed, [index])), 0)
            for name, layer in layers.items()
        }
        for layer in layers.values():
            keep_what_hooks_make(layer)
        tied = _tied_parameters(model)
        for name, layer in layers.items():
            for tensor_name, value in values[name].items():
                _write(layer, tensor_name, value, tied)
    if seed is not None:
        freeze_dropout(model, layers, seed, index)
    return unconverted(model)


def unconverted(model: Model) -> Model:
    """Make the layers plain again, in place, with their base tensors as they are."""
    COPIES.pop(model, None)  # it would keep the posterior
    for layer in bayesian_layers(model).values():
        plain_again(layer)
    for module in model.modules():
        remove_scope(module)
        if "_fast_path_before" in module.__dict__:
            module.__dict__.update(module.__dict__.pop("_fast_path_before"))
    return model


def _tied_parameters(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    uses = [id(p) for module in model.modules() for p in own_parameters(module).values()]
    return {use for use in uses if use in seen or seen.add(use)}  # type: ignore[func-returns-value]


def _write(layer: BayesianLayer, name: str, value: torch.Tensor, tied: set[int]) -> None:
    """Put a value into a layer's tensor; one that another layer uses too gets apart, for only this one changes."""
    module, last = holder(layer, name)
    tensor = getattr(module, last)
    if id(tensor) in tied:
        module._parameters[last] = nn.Parameter(value.clone(), requires_grad=tensor.requires_grad)
    else:
        tensor.copy_(value)


def _refuse_wrappers(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConversionError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError("a scripted module's layers can't be changed; convert the original network")
    if unwrapped(model) is not model:
        raise ConversionError(
            f"{type(model).__name__} wraps the network: convert the network first, then compile or distribute it"
        )


def _posterior(layer: nn.Module, family: Family) -> Posterior:
    made = {suffix: family.init(site) for suffix, site in _type_of(layer).sites_of(layer).items()}
    posterior = Posterior({name + suffix: tensor for suffix, part in made.items() for name, tensor in part.items()})
    posterior.train(layer.training)
    tensors = [*own_parameters(layer).values(), *layer.buffers(recurse=False)]
    if tensors:
        posterior = posterior.to(tensors[0].device)
        _warn_of_low_resolution(tensors[0], list(made.values()), family)
    return posterior


def _warn_of_low_resolution(like: torch.Tensor, posteriors: list[dict[str, torch.Tensor]], family: Family) -> None:
    """Per-row factors are cast to the network's dtype; noise below its resolution is lost."""
    if like.dtype not in (torch.float16, torch.bfloat16) or family.grain == "batch":
        return
    scales = [scale for tensors in posteriors if (scale := family.smallest_noise(tensors)) is not None]
    smallest = min(scales, default=float("inf"))
    if smallest < torch.finfo(like.dtype).eps:
        warnings.warn(
            f"{family}: a posterior scale of {smallest:.2g} is below the resolution of {like.dtype} "
            f"({torch.finfo(like.dtype).eps:.2g}), so training noise is rounded away; train in float32 "
            "or use a larger dropout_rate",
            stacklevel=4,
        )


def _type_of(layer: nn.Module) -> type[BayesianLayer]:
    found = bayesian_type(layer)
    assert not isinstance(found, str), found
    return found


def _swap(layer: nn.Module, name: str, family: Family, scope: Scope, posterior: Posterior) -> None:
    layer.__class__ = _type_of(layer)
    assert isinstance(layer, BayesianLayer)
    layer.family, layer.scope, layer.site_name = family, scope, name
    layer.posterior = posterior


def _dropout_families(layers: dict[str, nn.Module]) -> dict[str, Family]:
    kinds = {plain for plain, bayesian in LAYERS.items() if issubclass(bayesian, BayesianDropout)}
    found = {name: float(layer.p) for name, layer in layers.items() if type(layer) in kinds}  # type: ignore[arg-type]
    for name, layer in layers.items():
        if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise ConversionError(f"layer {name!r} is an {type(layer).__name__}, which keep_dropout can't keep alive")
        if isinstance(layer, nn.RNNBase) and layer.dropout > 0 and layer.num_layers > 1:
            raise ConversionError(
                f"layer {name!r} has dropout={layer.dropout} between its recurrent layers, which keep_dropout can't "
                "keep alive; use dropout=0 and MCDropout on the layer"
            )
        if isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0:
            raise ConversionError(
                f"layer {name!r} has dropout={layer.dropout} on its attention weights, which keep_dropout can't keep "
                "alive; set its dropout to 0"
            )
    for name, p in found.items():
        if p >= 1:
            raise ConversionError(f"layer {name!r} is a dropout with p={p}, which leaves nothing; expected p < 1")
    return {name: MCDropout(p) for name, p in found.items()}


def _refuse_a_part_of_a_converted_model(model: nn.Module) -> None:
    opened = {hook.scope for m in model.modules() for hook in m._forward_hooks.values() if isinstance(hook, CloseScope)}
    for name, layer in bayesian_layers(model).items():
        if layer.scope not in opened:
            raise ConversionError(
                f"layer {name!r} was converted as part of a larger model, whose rows it follows; convert that model "
                "again with a pattern for this part"
            )


def _scope_of(model: nn.Module, batch_dim: int | None) -> Scope:
    """The model's one scope: layers converted before, here or in a part of it, move into it."""
    scope = Scope(batch_dim or 0)
    for name, module in model.named_modules():
        before = remove_scope(module)
        if before is not None:
            scope.batch_dim = before.batch_dim if batch_dim is None else batch_dim
            prefix = f"{name}." if name else ""
            scope.skipped |= {prefix + part: reason for part, reason in before.skipped.items()}
    for name, layer in bayesian_layers(model).items():
        layer.scope, layer.site_name = scope, name
    model.register_forward_pre_hook(OpenScope(scope), prepend=True, with_kwargs=True)
    model.register_forward_hook(CloseScope(scope), always_call=True)
    return scope


def _avoid_fast_paths(model: nn.Module) -> None:
    """A transformer's fast path reads its layers' weights without calling them, so a draw would be passed by."""
    switches = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
    for module in model.modules():
        switch = next((name for kind, name in switches.items() if isinstance(module, kind)), None)
        if switch and bayesian_layers(module) and "_fast_path_before" not in module.__dict__:
            module.__dict__["_fast_path_before"] = {switch: getattr(module, switch)}
            setattr(module, switch, 0)
