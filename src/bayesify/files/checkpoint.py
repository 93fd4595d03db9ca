"""`save` and `load`: tensors in safetensors, the methods as JSON in its header, never pickle."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesify.conversion.convert import convert
from bayesify.errors import BayesifyError, CheckpointError
from bayesify.layers import BayesianDropout, bayesian_layers, bayesian_type
from bayesify.layers.base import unwrapped
from bayesify.methods import METHODS
from bayesify.methods.base import Method, Site

Model = TypeVar("Model", bound=nn.Module)
FORMAT = 1
LARGEST = 100_000
"""The largest integer that an option of a method may have in a file."""
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OTHERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES = {**FLOATS, **OTHERS, "BOOL": torch.bool}
"""The types of tensors by their names in safetensors."""


class Kind(NamedTuple):
    """The shape and the type of a tensor: torch's, the file's name of another type, or None for a tensor left out."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str | None


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
    write_tensors(tensors, path, {"bayesify": header})


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically, with the usual permissions.

    Args:
        tensors: Contiguous tensors that share no memory, by name.
        path: The file.
        metadata: Words for its header.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.umask(mask := os.umask(0))
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp and safetensors make private files
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
    path = Path(path)
    if bayesian_layers(model):
        raise CheckpointError(
            f"{path}: load into a plain network; this one is Bayesian already (by.revert makes it plain)"
        )
    header, kinds = require_fit(model, path)
    tensors = _tensors(path, header["aliases"])
    _require_finite(tensors, {name for name, _ in model.named_buffers(remove_duplicate=False)}, path)
    chosen: dict[Any, Method | None] = {
        _is_named(name): _method(saved, path) for name, saved in header["families"].items()
    }
    try:
        convert(model, chosen, batch_dim=header["batch_dim"], keep_dropout=header["keep_dropout"])
    except BayesifyError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name, rate in header["dropout_rates"].items():
        model.get_submodule(name).p = rate
    state = OrderedDict(tensors)
    state._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # versions, which some modules read
    model.load_state_dict(state, strict=tensors.keys() == kinds.keys())
    return model


def require_fit(model: nn.Module, path: Path) -> tuple[dict[str, Any], dict[str, Kind]]:
    """Raise unless a file of `save` fits a plain network; reads only the file's header, and allocates nothing.

    Args:
        model: A plain network; it may be on the meta device.
        path: The file.

    Returns:
        The header, and the shape and type of each tensor by name.
    """
    header, kinds = _read_header(path)
    methods = {name: _method(saved, path) for name, saved in header["families"].items()}
    _compare_layers(model, methods, header["layers"], path)
    own = {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in _state(model).items()}
    _compare_dropout(model, header["dropout_rates"], path)
    added: dict[str, Kind] = {}
    for name, method in methods.items():
        prefixes = [f"{each}.posterior." if each else "posterior." for each in _all_names(model, [name])]
        found = {key: kind for key, kind in kinds.items() if key.startswith(prefixes[0])}
        _compare_components(method, found, name, path)
        posterior = _posterior_kinds(model.get_submodule(name), method, path)
        added |= {prefix + key: kind for prefix in prefixes for key, kind in posterior.items()}
    _compare(own | added, kinds, path)
    return header, kinds


def _compare_dropout(model: nn.Module, rates: Mapping[str, float], path: Path) -> None:
    modules = dict(model.named_modules())
    lost = [name for name in rates if not isinstance(modules.get(name), _DropoutNd)]
    if lost:
        raise CheckpointError(f"{path}: wrong architecture: the file has a dropout {lost[0]!r}, this network has none")


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
        "dropout_rates": {name: layers[name].p for name in sorted(dropout)},
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


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, Kind]]:
    """What a file says about its methods and its tensors, those that it leaves out included."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("bayesify", "null"))
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            types = {name: s.get_dtype() for name, s in slices.items()}
            kinds = {
                name: Kind(tuple(s.get_shape()), DTYPES.get(types[name], types[name])) for name, s in slices.items()
            }
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
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
    header = {"left_out": {}, "dropout_rates": {}, **header}
    _check_header(header, path)
    lost = set(header["aliases"].values()) - set(kinds)
    if lost:
        raise CheckpointError(f"{path}: missing {_listed(sorted(lost))}, to which its header ties others")
    tied = {name: kinds[first] for name, first in header["aliases"].items()}
    left_out = {name: Kind(tuple(shape), None) for name, shape in header["left_out"].items()}
    twice = sorted((kinds.keys() & tied.keys()) | (left_out.keys() & (kinds | tied).keys()))
    if twice:
        raise CheckpointError(f"{path}: its header ties or leaves out {_listed(twice)}, which the file has")
    return header, kinds | tied | left_out


def _check_header(header: Mapping[str, Any], path: Path) -> None:
    """Raise if an entry of the header does not have the form in which `save` writes it."""
    families, left_out, batch_dim = header["families"], header["left_out"], header["batch_dim"]
    right = {
        "families": isinstance(families, dict) and all(_is_method(each) for each in families.values()),
        "layers": _maps_to_words(header["layers"])
        and isinstance(families, dict)
        and {*header["layers"]} == {*families},
        "batch_dim": type(batch_dim) is int and 0 <= batch_dim < 100,
        "keep_dropout": isinstance(header["keep_dropout"], bool),
        "dropout_rates": _maps_to_rates(header["dropout_rates"]),
        "aliases": _maps_to_words(header["aliases"]),
        "left_out": isinstance(left_out, dict) and all(_is_shape(each) for each in left_out.values()),
    }
    for key, is_right in right.items():
        if not is_right:
            short = repr(header[key])[:80]
            raise CheckpointError(f"{path}: its header has {key}={short}, which by.save does not write")


def _maps_to_words(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _maps_to_rates(value: Any) -> bool:
    return isinstance(value, dict) and all(type(each) in (int, float) and 0 <= each < 1 for each in value.values())


def _is_method(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("options"), dict)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _tensors(path: Path, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a file whose header fits the network."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {**tensors, **{name: tensors[first] for name, first in aliases.items()}}


def _require_finite(tensors: Mapping[str, Tensor], buffers: Iterable[str], path: Path) -> None:
    """Raise for NaN, and for infinity unless a buffer of the network has it, such as the mask of an attention."""
    for name, tensor in tensors.items():
        is_right = ~tensor.isnan() if name in buffers else tensor.isfinite()
        if not is_right.all():
            raise CheckpointError(f"{path}: {name!r} holds NaN or infinity; the training that it comes from diverged")


def _method(saved: dict[str, Any], path: Path) -> Method:
    if saved["name"] not in METHODS:
        raise CheckpointError(f"{path}: unknown method {saved['name']!r}; this version has {', '.join(METHODS)}")
    try:
        return bounded_method(METHODS[saved["name"]], saved["options"])
    except (TypeError, BayesifyError) as error:
        options = repr(saved["options"])[:200]
        raise CheckpointError(f"{path}: {saved['name']} with {options} can't be created: {error}") from error


def bounded_method(kind: type[Method], options: Mapping[str, Any]) -> Method:
    """A method with options from a file or a recipe; raises for integers that can only be a mistake.

    Args:
        kind: The method's class.
        options: Its options as plain values, in which tuples may be lists.

    Returns:
        The method.
    """
    for name, value in options.items():
        if isinstance(value, int) and value > LARGEST:
            raise BayesifyError(f"{kind.__name__}({name}={value}): expected an integer of at most {LARGEST:,}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})


def _compare_components(method: Method, posterior: Mapping[str, Kind], name: str, path: Path) -> None:
    """Raise if a layer has more components than numbers in the file: each has some of its own, but for the first."""
    numbers = max((math.prod(kind.shape) for kind in posterior.values()), default=0)
    if method.components > numbers + 1:
        raise CheckpointError(
            f"{path}: layer {name!r} has {method.components} components in the header, for which the file has too few "
            "numbers; it was edited or damaged"
        )


def _posterior_kinds(layer: nn.Module, method: Method, path: Path) -> dict[str, Kind]:
    """The shapes and types of the tensors that a method adds to a layer, without creating them."""
    kind = bayesian_type(layer)
    sites = {} if isinstance(kind, str) else kind.sites_of(layer)
    refused = [kind] if isinstance(kind, str) else [reason for s in sites.values() if (reason := method.refusal(s))]
    if refused:
        raise CheckpointError(f"{path}: {method} can't apply to a layer of this network: {refused[0]}")
    found: dict[str, Kind] = {}
    for suffix, site in sites.items():
        with torch.device("meta"):
            made = method.init(_on_meta(site))
        found |= {name + suffix: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}
    return found


def _on_meta(site: Site) -> Site:
    """The site with tensors that have shapes and types, but no values."""
    base = {name: tensor.detach().to("meta") for name, tensor in site.base.items()}
    statistics = {name: tensor.detach().to("meta") for name, tensor in site.statistics.items()}
    return replace(site, base=base, statistics=statistics, reset=lambda: base)


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


def _compare(expected: Mapping[str, Kind], found: Mapping[str, Kind], path: Path) -> None:
    """Raise unless a file has the names, shapes and types of tensors that the network will have."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise CheckpointError(f"{path}: missing {_listed(missing)}, which this network has")
    if extra:
        raise CheckpointError(f"{path}: extra {_listed(extra)}, which this network does not have")
    for name, (shape, dtype) in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{path}: wrong architecture: {name!r} has shape {found[name].shape} in the file and {shape} in this "
                "network"
            )
        both_floats = found[name].dtype in FLOATS.values() and dtype in FLOATS.values()
        if found[name].dtype not in (dtype, None) and not both_floats:
            raise CheckpointError(
                f"{path}: {name!r} has the type {found[name].dtype} in the file and {dtype} in this network"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"{len(names)} tensor{'s' * (len(names) > 1)}: {shown}{'…' if len(names) > 3 else ''}"
