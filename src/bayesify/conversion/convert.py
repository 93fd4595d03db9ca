"""Turn layers into Bayesian ones in place, and back."""

import warnings
from collections import Counter
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from bayesify.conversion.check import check_call
from bayesify.conversion.drawn_network import DrawnNetwork, make_plain
from bayesify.conversion.select import Methods, Selection, own_parameters, select
from bayesify.conversion.weight_reads import arguments_of, bypassed_layers
from bayesify.errors import ConversionError
from bayesify.layers import LAYERS, BayesianDropout, BayesianLayer, Posterior, bayesian_layers, bayesian_type
from bayesify.layers.base import remove_scope, unwrapped
from bayesify.layers.call_scope import CloseScope, OpenScope, Scope
from bayesify.layers.dropout import FrozenDropout
from bayesify.methods import MCDropout
from bayesify.methods.base import Method

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    methods: Methods,
    *,
    batch_dim: int | None = None,
    keep_dropout: bool = False,
    example: Any = None,
) -> Model:
    """Make a network Bayesian in place; its pretrained weights, parameter names and class are kept.

    >>> import bayesify as by
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> model = by.convert(net, {"1": by.ECMP(5), "*": by.Rank1(4)})
    >>> model is net, model(torch.randn(6, 4)).shape
    (True, torch.Size([6, 3]))

    Args:
        model: The network.
        methods: A method, which converts the layers that its paper converts; or a dict of keys to methods, in which the
            first key that matches a layer decides: a pattern for its name or for the name of a module that contains
            it, a layer type, or a predicate of name and module. The value None leaves layers out.
        batch_dim: The dimension of the batch in sequences of features; 0 by default.
        keep_dropout: Keep the network's own dropout modules active in evaluation; with `methods={}`, that alone.
        example: A batch. With it, `convert` leaves out layers whose weights another module reads without calling the
            layer, as draws would not reach that module; without it, `check` finds such layers.

    Returns:
        The same network.

    Raises:
        ConversionError: A selector matches nothing, or a method can't be applied to what it names.
    """
    _check_arguments(model, batch_dim)
    chosen = Selection() if keep_dropout and methods == {} else select(model, methods)
    layers = dict(model.named_modules())
    opened = {hook.scope for m in layers.values() for hook in m._forward_hooks.values() if isinstance(hook, CloseScope)}
    for name, layer in bayesian_layers(model).items():
        if layer.scope not in opened:
            raise ConversionError(
                f"layer {name!r} was converted as part of a larger model, on whose rows it depends; convert that "
                "model again, with a pattern for this part"
            )
    if example is not None:
        _leave_out_bypassed(chosen, model, example)
    sized = {name: method.sized(len(chosen.methods)) for name, method in chosen.methods.items()}
    by_name = sized | (_dropout_methods(layers) if keep_dropout else {})
    if not by_name:
        raise ConversionError("keep_dropout=True alone needs a dropout module, but the network has none")
    posteriors = {name: _posterior(layers[name], method) for name, method in by_name.items()}
    scope = _scope_of(model, batch_dim)
    skipped = scope.skipped | chosen.skipped
    scope.skipped = {name: reason for name, reason in skipped.items() if name not in by_name}
    for name, method in by_name.items():
        layer = layers[name]
        layer.__class__ = _type_of(layer)
        assert isinstance(layer, BayesianLayer)
        layer.method, layer.scope, layer.site_name, layer.posterior = method, scope, name, posteriors[name]
    _avoid_fast_paths(model)
    return model


def revert(model: Model, seed: int | None = None, *, index: int = 0) -> Model:
    """Make a Bayesian network plain again, in place: its mean, or with a seed one draw.

    >>> import bayesify as by
    >>> by.revert(by.convert(nn.Linear(3, 2), by.MeanField()))
    Linear(in_features=3, out_features=2, bias=True)

    Args:
        model: The Bayesian network.
        seed: The seed of the draw; None for the mean.
        index: Which draw of the seed.

    Returns:
        The same network, with ordinary layers.
    """
    if not bayesian_layers(model):
        raise ConversionError("the model has no Bayesian layer to revert")
    drawn = DrawnNetwork(model)
    tensors = drawn.mean() if seed is None else drawn.draws(seed, range(index, index + 1))
    uses = Counter(id(p) for module in model.modules() for p in own_parameters(module).values())
    with torch.no_grad():
        for name, (value,) in tensors.items():
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            tensor = getattr(module, last)
            if uses[id(tensor)] > 1:  # tied to another layer, which must not change
                setattr(module, last, nn.Parameter(value.clone(), requires_grad=tensor.requires_grad))
            else:
                tensor.copy_(value)
    if seed is not None:
        drawn.freeze_dropout(seed, index, model)
    return unconvert(model)


def unconvert(model: Model) -> Model:
    """Make the layers plain again, in place, without changing their base tensors."""
    for layer in bayesian_layers(model).values():
        make_plain(layer)
    for module in model.modules():
        remove_scope(module)
        has_masks = any(isinstance(part, FrozenDropout) for part in module.modules())  # which the fast path would skip
        if "_fast_path_before" in module.__dict__ and not has_masks:
            module.__dict__.update(module.__dict__.pop("_fast_path_before"))
    return model


def _check_arguments(model: nn.Module, batch_dim: int | None) -> None:
    if batch_dim is not None and (not isinstance(batch_dim, int) or batch_dim < 0):
        raise ConversionError(f"batch_dim={batch_dim!r}: expected 0 (batch first) or another dimension of the batch")
    if not isinstance(model, nn.Module):
        raise ConversionError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError("a scripted module's layers can't be changed; convert the original network")
    if unwrapped(model) is not model:
        raise ConversionError(
            f"{type(model).__name__} wraps the network: convert the network first, then compile or distribute it"
        )


def _leave_out_bypassed(chosen: Selection, model: nn.Module, example: Any) -> None:
    """Leave out layers whose weights the example shows to be read without calling them."""
    for name in bypassed_layers(model, arguments_of(example), chosen.methods):
        del chosen.methods[name]
        chosen.skipped[name] = "another module reads its weight without calling it, so no draw would reach that module"
    if not chosen.methods:
        raise ConversionError("no chosen layer is called on the example: other modules read their weights directly")


def _posterior(layer: nn.Module, method: Method) -> Posterior:
    made = {suffix: method.init(site) for suffix, site in _type_of(layer).sites_of(layer).items()}
    posterior = Posterior({name + suffix: tensor for suffix, part in made.items() for name, tensor in part.items()})
    posterior.train(layer.training)
    tensors = [*own_parameters(layer).values(), *layer.buffers(recurse=False)]
    if not tensors:
        return posterior
    dtype = tensors[0].dtype
    if dtype in (torch.float16, torch.bfloat16) and method.draws_per != "batch":  # to which factors per row are cast
        scales = [scale for part in made.values() if (scale := method.smallest_noise(part)) is not None]
        smallest, least = min(scales, default=float("inf")), torch.finfo(dtype).eps
        if smallest < least:
            warnings.warn(
                f"{method}: a posterior scale of {smallest:.2g} is below the resolution of {dtype} ({least:.2g}), so "
                "training noise is rounded away; train in float32 or use a larger dropout_rate",
                stacklevel=3,
            )
    return posterior.to(tensors[0].device)


def _type_of(layer: nn.Module) -> type[BayesianLayer]:
    found = bayesian_type(layer)
    assert not isinstance(found, str), found
    return found


def _dropout_methods(layers: dict[str, nn.Module]) -> dict[str, Method]:
    found: dict[str, Method] = {}
    for name, layer in layers.items():
        known = LAYERS.get(type(layer))
        if known is not None and issubclass(known, BayesianDropout):
            p = float(layer.p)  # type: ignore[arg-type]
            if not p < 1:
                raise ConversionError(f"layer {name!r} is a dropout with p={p}, which drops everything; expected p < 1")
            found[name] = MCDropout(p)
        elif unsupported := _random_without_masks(layer):
            what, instead = unsupported
            raise ConversionError(f"layer {name!r} {what}, which keep_dropout does not support; {instead}")
    return found


def _random_without_masks(layer: nn.Module) -> tuple[str, str] | None:
    """What dropout a layer has that can't be kept, and what to use instead."""
    if isinstance(layer, _DropoutNd) and not isinstance(layer, BayesianDropout):
        return f"is an {type(layer).__name__}", "use nn.Dropout, nn.Dropout1d, nn.Dropout2d or nn.Dropout3d"
    if isinstance(layer, nn.RNNBase) and layer.dropout > 0 and layer.num_layers > 1:
        what = f"has dropout={layer.dropout} between its recurrent layers"
        return what, "use dropout=0 and MCDropout on the layer"
    if isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0:
        return f"has dropout={layer.dropout} on its attention weights", "set its dropout to 0"
    return None


def _scope_of(model: nn.Module, batch_dim: int | None) -> Scope:
    """A new scope for the model; layers converted earlier, in the model or in a part of it, move into it."""
    scope = Scope(batch_dim or 0)
    for name, module in model.named_modules():
        before = remove_scope(module)
        if before is not None:
            scope.batch_dim = before.batch_dim if batch_dim is None else batch_dim
            prefix = f"{name}." if name else ""
            scope.skipped |= {prefix + part: reason for part, reason in before.skipped.items()}
    for name, layer in bayesian_layers(model).items():
        layer.scope, layer.site_name = scope, name
    model.register_forward_pre_hook(OpenScope(scope, check_call), prepend=True, with_kwargs=True)
    model.register_forward_hook(CloseScope(scope), always_call=True)
    return scope


def _avoid_fast_paths(model: nn.Module) -> None:
    """Switch off the fast path of transformers, which reads layers' weights without calling them, bypassing draws."""
    switches = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
    for module in model.modules():
        switch = next((name for kind, name in switches.items() if isinstance(module, kind)), None)
        if switch and bayesian_layers(module) and "_fast_path_before" not in module.__dict__:
            module.__dict__["_fast_path_before"] = {switch: getattr(module, switch)}
            setattr(module, switch, 0)
