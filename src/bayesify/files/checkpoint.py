"""`save` and `load`: tensors in safetensors, the methods as JSON in its header, never pickle."""

from __future__ import annotations

import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bayesify.conversion.convert import convert, unconvert
from bayesify.errors import BayesifyError, CheckpointError
from bayesify.layers import BayesianDropout, bayesian_layers
from bayesify.layers.base import unwrapped
from bayesify.methods import METHODS
from bayesify.methods.base import Method

Model = TypeVar("Model", bound=nn.Module)
FORMAT = 1


def save(model: nn.Module, path: str | Path, *, frozen: bool = True) -> None:
    """Write a Bayesian model to one file, atomically.

    >>> import bayesify as by, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> by.save(by.convert(nn.Linear(4, 3), by.Rank1(4)), file)
    >>> by.load(nn.Linear(4, 3), file).method
    Rank1(components=4, factors='both', posterior='normal', prior=None, prior_mean=1.0, prior_std=0.1, mean_std=0.1, \
signs=None, dropout_rate=None, clip=None, bias='shared', divergence='average', kl_samples=64)

    Args:
        model: A converted network.
        path: The file, in the format of safetensors.
        frozen: False leaves out the network's own parameters with `requires_grad=False`, such as those under an
            adapter; the network that the file is loaded into must then have them.
    """
    model = unwrapped(model)
    state = _state(model)
    left_out = {} if frozen else {name: list(state[name].shape) for name in _frozen(model)}
    tensors, aliases = _without_aliases({name: tensor for name, tensor in state.items() if name not in left_out})
    header = json.dumps({"format": FORMAT, **_description(model), "aliases": aliases, "left_out": left_out})
    path = Path(path)
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: the folder {str(path.parent)!r} does not exist")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"bayesify": header})
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes a private file; give it the usual permissions
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(model: Model, path: str | Path) -> Model:
    """Convert a fresh plain network as the saved one was, in place, and fill it with the saved tensors.

    Args:
        model: A plain network of the saved one's architecture.
        path: A file of `save`.

    Returns:
        The same network.

    Raises:
        CheckpointError: `save` did not write the file, or for another architecture. The network is left unchanged.
    """
    header, tensors = _read(Path(path))
    if bayesian_layers(model):
        raise CheckpointError(
            f"{path}: load into a plain network; this one is Bayesian already (by.revert makes it plain)"
        )
    methods = {name: _method(saved, path) for name, saved in header["families"].items()}
    _compare_layers(model, methods, header["layers"], path)
    added = tuple(f"{name}.posterior." if name else "posterior." for name in _all_names(model, methods))
    shapes = {**{name: tensor.shape for name, tensor in tensors.items()}, **header.get("left_out", {})}
    _compare_names(set(_state(model)), {name for name in shapes if not name.startswith(added)}, path)
    _compare_shapes(_state(model), shapes, path)
    chosen: dict[Any, Method | None] = {_is_named(name): method for name, method in methods.items()}
    convert(model, chosen, batch_dim=header["batch_dim"], keep_dropout=header["keep_dropout"])
    try:
        _compare_names(set(_state(model)), set(shapes), path)
        _compare_shapes(_state(model), shapes, path)
    except CheckpointError:
        unconvert(model)
        raise
    state = OrderedDict(tensors)
    state._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # versions, which some modules read
    model.load_state_dict(state, strict=tensors.keys() == shapes.keys())
    return model


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _is_named(name: str) -> Any:
    return lambda other, _: other == name


def _description(model: nn.Module) -> dict[str, Any]:
    layers = bayesian_layers(model)
    if not layers:
        raise CheckpointError("the model has no Bayesian layer; save a plain one with safetensors or torch.save")
    dropout = {name for name, layer in layers.items() if isinstance(layer, BayesianDropout)}
    kept = {name: layer for name, layer in layers.items() if name not in dropout}
    for layer in kept.values():
        layer.sites()  # raises if a weight is computed by something added after conversion
    return {
        "families": {
            name: {"name": type(layer.method).__name__, "options": layer.method.options()}
            for name, layer in kept.items()
        },
        "layers": {name: layer.plain.__name__ for name, layer in kept.items()},
        "batch_dim": next(iter(layers.values())).scope.batch_dim,
        "keep_dropout": bool(dropout),
    }


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(f"{odd[0]!r} is extra state that is not a tensor, which a safetensors file can't hold")
    return state


def _frozen(model: nn.Module) -> list[str]:
    """The names of the parameters that are not trained, without those that conversion added."""
    added = {id(p) for layer in bayesian_layers(model).values() for p in layer.posterior.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, p in named if not p.requires_grad and id(p) not in added]


def _without_aliases(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors with tied ones only once, and the other names of these, for the header."""
    first: dict[tuple[Any, ...], str] = {}
    tensors, aliases = {}, {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensors, aliases


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("bayesify", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a complete safetensors file ({error}); it may be truncated, or written by torch.save"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: a safetensors file that by.save did not write: its header names no methods")
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {header.get('format')!r}; this version of bayesify reads {FORMAT}")
    lacking = {"families", "layers", "batch_dim", "keep_dropout", "aliases"} - set(header)
    if lacking:
        raise CheckpointError(f"{path}: its header lacks {', '.join(sorted(lacking))}, so by.save did not write it")
    lost = set(header["aliases"].values()) - set(tensors)
    if lost:
        raise CheckpointError(f"{path}: missing {_listed(sorted(lost))}, to which its header ties others")
    return header, {**tensors, **{name: tensors[first] for name, first in header["aliases"].items()}}


def _method(saved: dict[str, Any], path: str | Path) -> Method:
    if saved["name"] not in METHODS:
        raise CheckpointError(f"{path}: unknown method {saved['name']!r}; this version has {', '.join(METHODS)}")
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in saved["options"].items()}
    try:
        return METHODS[saved["name"]](**options)
    except (TypeError, BayesifyError) as error:
        raise CheckpointError(f"{path}: {saved['name']} with {options} can't be created: {error}") from error


def _compare_layers(model: nn.Module, methods: Mapping[str, Method], kinds: Mapping[str, str], path: Any) -> None:
    modules = dict(model.named_modules())
    for name in methods:
        if name not in modules:
            raise CheckpointError(f"{path}: wrong architecture: the file has a layer {name!r}, this network has none")
        if type(modules[name]).__name__ != kinds[name]:
            raise CheckpointError(
                f"{path}: wrong architecture: layer {name!r} is a {kinds[name]} in the file and a "
                f"{type(modules[name]).__name__} in this network"
            )


def _all_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """All names of these modules: a network may hold a module in several places."""
    modules = dict(model.named_modules())
    chosen = {id(modules[name]) for name in names}
    return [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in chosen]


def _compare_names(expected: set[str], found: set[str], path: Any) -> None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing:
        raise CheckpointError(f"{path}: missing {_listed(missing)}, which this network has")
    if extra:
        raise CheckpointError(f"{path}: extra {_listed(extra)}, which this network does not have")


def _compare_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], path: Any) -> None:
    for name, tensor in state.items():
        if name in shapes and tuple(shapes[name]) != tuple(tensor.shape):
            raise CheckpointError(
                f"{path}: wrong architecture: {name!r} has shape {tuple(shapes[name])} in the file and "
                f"{tuple(tensor.shape)} in this network"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"{len(names)} tensor{'s' * (len(names) > 1)}: {shown}{'…' if len(names) > 3 else ''}"
