"""`save` and `load`: tensors in safetensors, the methods as JSON in its header, never pickle."""

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesify.conversion.convert import convert
from bayesify.conversion.untrained_posterior import warn_if_untrained
from bayesify.errors import BayesifyError, CheckpointError
from bayesify.layers import BayesianDropout, bayesian_layers, bayesian_type
from bayesify.layers.base import unwrapped
from bayesify.layers.call_scope import CloseScope
from bayesify.methods import METHODS
from bayesify.methods.base import Method
from bayesify.tensor_files import write_tensors

Model = TypeVar("Model", bound=nn.Module)
FORMAT = 1
LARGEST = 100_000
"""The largest integer that an option of a method may have in a file."""
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OTHERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES = {**FLOATS, **OTHERS, "BOOL": torch.bool}
"""The types of tensors by their names in safetensors."""
Kind = tuple[tuple[int, ...], torch.dtype | str | None]
"""The shape and the type of a tensor: torch's, the file's name of another type, or None for a tensor left out."""


def save(model: nn.Module, path: str | Path, *, frozen: bool = True) -> None:
    """Write a Bayesian model to one file, atomically.

    >>> import bayesify as by, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> by.save(by.convert(nn.Linear(4, 3), by.Rank1(4)), file)
    >>> by.load(nn.Linear(4, 3), file)
    BayesianLinear(
      in_features=4, out_features=3, bias=True, Rank1(4)
      (posterior): Posterior()
    )

    Args:
        model: A converted network.
        path: The file, in the format of safetensors.
        frozen: False leaves out the network's own parameters with `requires_grad=False`, such as those under an
            adapter; the network that the file is loaded into must then have them.
    """
    model = unwrapped(model)
    warn_if_untrained(model)
    state = _state(model)
    added = {id(p) for layer in bayesian_layers(model).values() for p in layer.posterior.parameters()}
    untrained = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
    left_out = {name: list(p.shape) for name, p in untrained if not frozen and id(p) not in added}
    tensors, aliases = _without_aliases({name: tensor for name, tensor in state.items() if name not in left_out})
    header = json.dumps({"format": FORMAT, **_description(model), "aliases": aliases, "left_out": left_out})
    path = Path(path)
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: the folder {str(path.parent)!r} does not exist")
    write_tensors(tensors, path, {"bayesify": header})


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
    unwrapped(model)  # raises if it is no network
    path = Path(path)
    header, kinds = require_fit(model, path)
    with _named(path):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors |= {name: tensors[first] for name, first in header["aliases"].items()}
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for name, tensor in tensors.items():  # a buffer may be infinite, such as the mask of an attention
            if bool(tensor.isnan().any()) or (name not in buffers and not bool(tensor.isfinite().all())):
                raise CheckpointError(f"{name!r} holds NaN or infinity; the training that it comes from diverged")
        rates = header["dropout_rates"]
        for part, batch_dim in header["parts"].items():
            chosen: dict[Any, Method | None] = {
                partial(_is_layer, name[len(part) :].removeprefix(".")): _method(saved)
                for name, saved in header["families"].items()
                if _is_inside(name, part)
            }
            keeps = header["keep_dropout"] and (not rates or any(_is_inside(name, part) for name in rates))
            convert(model.get_submodule(part), chosen, batch_dim=batch_dim, keep_dropout=keeps)
    for name, rate in rates.items():
        model.get_submodule(name).p = rate
    state = OrderedDict(tensors)
    state._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # versions, which some modules read
    model.load_state_dict(state, strict=tensors.keys() == kinds.keys())
    return model


def require_fit(model: nn.Module, path: Path) -> tuple[dict[str, Any], dict[str, Kind]]:
    """The header of a file and the shape and type of each tensor; raises unless the file fits a plain network.

    It reads only the header and allocates nothing; the network may be on the meta device.
    """
    with _named(path):
        if bayesian_layers(model):
            raise CheckpointError("load into a plain network; this one is Bayesian already (by.revert makes it plain)")
        header, kinds = _read_header(path)
        modules = dict(model.named_modules())
        for name in header["dropout_rates"]:
            if not isinstance(modules.get(name), _DropoutNd):
                raise CheckpointError(f"wrong architecture: the file has a dropout {name!r}, this network has none")
        expected: dict[str, Kind] = {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _state(model).items()
        }
        if lost := header["parts"].keys() - modules.keys():
            raise CheckpointError(f"wrong architecture: the file has a part {min(lost)!r}, this network has none")
        for name, saved in header["families"].items():
            method, layer, kind = _method(saved), modules.get(name), header["layers"][name]
            if layer is None:
                raise CheckpointError(f"wrong architecture: the file has a layer {name!r}, this network has none")
            if type(layer).__name__ != kind:
                own = type(layer).__name__
                raise CheckpointError(f"wrong architecture: layer {name!r} is a {kind} in the file and a {own} here")
            # A network may hold a module in several places.
            names = [each for each, module in model.named_modules(remove_duplicate=False) if module is layer]
            prefixes = [f"{each}.posterior." if each else "posterior." for each in names]
            sizes = [math.prod(shape) for key, (shape, _) in kinds.items() if key.startswith(prefixes[0])]
            if method.components > max(sizes, default=0) + 1:  # each has numbers of its own, but for the first
                raise CheckpointError(
                    f"layer {name!r} has {method.components} components in the header, for which the file has too few "
                    "numbers; it was edited or damaged"
                )
            added = _posterior_kinds(layer, method)
            expected |= {prefix + key: kind for prefix in prefixes for key, kind in added.items()}
        _compare(expected, kinds)
        return header, kinds


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let errors name the file."""
    try:
        yield
    except BayesifyError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _is_layer(name: str, other: str, module: nn.Module) -> bool:
    return other == name


def _is_inside(name: str, part: str) -> bool:
    return not part or name == part or name.startswith(f"{part}.")


def _number_of_parts(name: str, parts: Collection[str]) -> int:
    return sum(_is_inside(name, part) for part in parts)


def _is_dimension(value: Any) -> bool:
    return type(value) is int and 0 <= value < 100


def _description(model: nn.Module) -> dict[str, Any]:
    layers = bayesian_layers(model)
    if not layers:
        raise CheckpointError("the model has no Bayesian layer; save a plain one with safetensors or torch.save")
    dropout = {name for name, layer in layers.items() if isinstance(layer, BayesianDropout)}
    kept = {name: layer for name, layer in layers.items() if name not in dropout}
    for layer in kept.values():
        layer.sites()  # raises if a weight is computed by something added after conversion
    hooks = [(name, hook) for name, module in model.named_modules() for hook in module._forward_hooks.values()]
    parts = {name: hook.scope.batch_dim for name, hook in hooks if isinstance(hook, CloseScope)}
    whole = next(iter(layers.values())).scope.batch_dim
    return {
        "parts": parts if all(_number_of_parts(name, parts) for name in layers) else {"": whole},
        "families": {
            name: {"name": type(layer.method).__name__, "options": layer.method.options()}
            | ({"derived": sorted(layer.method.derived)} if layer.method.derived else {})
            for name, layer in kept.items()
        },
        "layers": {name: layer.plain.__name__ for name, layer in kept.items()},
        "batch_dim": whole,
        "keep_dropout": bool(dropout),
        "dropout_rates": {name: layers[name].p for name in sorted(dropout)},
    }


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(f"{odd[0]!r} is extra state that is not a tensor, which a safetensors file can't hold")
    return state


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
        raise CheckpointError("no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("bayesify", "null"))
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            forms = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not a complete safetensors file ({error}); it may be truncated, or written by torch.save"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError("a safetensors file that by.save did not write: its header names no methods")
    if header.get("format") != FORMAT:
        raise CheckpointError(f"format {header.get('format')!r}; this version of bayesify reads {FORMAT}")
    lacking = {"families", "layers", "batch_dim", "keep_dropout", "aliases"} - set(header)
    if lacking:
        raise CheckpointError(f"its header lacks {', '.join(sorted(lacking))}, so by.save did not write it")
    header = {"left_out": {}, "dropout_rates": {}, "parts": {"": header["batch_dim"]}, **header}
    _check_header(header)
    kinds = {name: (shape, DTYPES.get(dtype, dtype)) for name, (shape, dtype) in forms.items()}
    lost = set(header["aliases"].values()) - set(kinds)
    if lost:
        raise CheckpointError(f"missing {_listed(lost)}, to which its header ties others")
    tied = {name: kinds[first] for name, first in header["aliases"].items()}
    left_out: dict[str, Kind] = {name: (tuple(shape), None) for name, shape in header["left_out"].items()}
    twice = (kinds.keys() & tied.keys()) | (left_out.keys() & (kinds | tied).keys())
    if twice:
        raise CheckpointError(f"its header ties or leaves out {_listed(twice)}, which the file has")
    return header, kinds | tied | left_out


def _check_header(header: Mapping[str, Any]) -> None:
    """Raise if an entry of the header does not have the form in which `save` writes it."""
    values: dict[str, Callable[[Any], bool]] = {
        "families": lambda saved: (
            isinstance(saved, dict) and isinstance(saved.get("name"), str) and isinstance(saved.get("options"), dict)
        ),
        "layers": lambda kind: isinstance(kind, str),
        "dropout_rates": lambda rate: type(rate) in (int, float) and 0 <= rate < 1,
        "aliases": lambda name: isinstance(name, str),
        "parts": _is_dimension,
        "left_out": lambda shape: isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape),
    }
    right = {"batch_dim": _is_dimension(header["batch_dim"])} | {
        key: isinstance(header[key], dict) and all(map(is_right, header[key].values()))
        for key, is_right in values.items()
    }
    right["layers"] = right["families"] and right["layers"] and header["layers"].keys() == header["families"].keys()
    right["parts"] = right["parts"] and all(_number_of_parts(name, header["parts"]) == 1 for name in header["layers"])
    right["keep_dropout"] = isinstance(header["keep_dropout"], bool)
    for key, is_right in right.items():
        if not is_right:
            raise CheckpointError(f"its header has {key}={repr(header[key])[:80]}, which by.save does not write")


def _method(saved: dict[str, Any]) -> Method:
    name, options = saved["name"], saved["options"]
    if name not in METHODS:
        raise CheckpointError(f"unknown method {name!r}; this version has {', '.join(METHODS)}")
    try:
        method = bounded_method(METHODS[name], options).sized(1)  # files of earlier versions leave options out
        return method.with_derived(map(str, saved["derived"])) if isinstance(saved.get("derived"), list) else method
    except (TypeError, BayesifyError) as error:
        raise CheckpointError(f"{name} with {repr(options)[:200]} can't be created: {error}") from error


def bounded_method(kind: type[Method], options: Mapping[str, Any]) -> Method:
    """A method with options from a file or a recipe; raises for integers that can only be a mistake."""
    for name, value in options.items():
        if isinstance(value, int) and value > LARGEST:
            raise BayesifyError(f"{kind.__name__}({name}={value}): expected an integer of at most {LARGEST:,}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})


def _posterior_kinds(layer: nn.Module, method: Method) -> dict[str, Kind]:
    """The shapes and types of the tensors that a method adds to a layer, without creating them."""
    kind = bayesian_type(layer)
    sites = {} if isinstance(kind, str) else kind.sites_of(layer)
    refused = [kind] if isinstance(kind, str) else [reason for s in sites.values() if (reason := method.refusal(s))]
    if refused:
        raise CheckpointError(f"{method} can't apply to a layer of this network: {refused[0]}")
    found: dict[str, Kind] = {}
    for suffix, site in sites.items():
        base, statistics = (
            {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
            for tensors in (site.base, site.statistics)
        )
        with torch.device("meta"):
            made = method.init(replace(site, base=base, statistics=statistics, reset=partial(dict, base)))
        found |= {name + suffix: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}
    return found


def _compare(expected: Mapping[str, Kind], found: Mapping[str, Kind]) -> None:
    """Raise unless a file has the names, shapes and types of tensors that the network will have."""
    if missing := expected.keys() - found.keys():
        raise CheckpointError(f"missing {_listed(missing)}, which this network has")
    if extra := found.keys() - expected.keys():
        raise CheckpointError(f"extra {_listed(extra)}, which this network does not have")
    for name, (shape, dtype) in expected.items():
        other_shape, other = found[name]
        if other_shape != shape:
            raise CheckpointError(f"wrong architecture: {name!r} has shape {other_shape} in the file and {shape} here")
        both_floats = other in FLOATS.values() and dtype in FLOATS.values()
        if other not in (dtype, None) and not both_floats:
            raise CheckpointError(f"{name!r} has the type {other} in the file and {dtype} in this network")


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(map(repr, sorted(names)[:3])) + "…" * (len(names) > 3)
    return f"{len(names)} tensor{'s' * (len(names) > 1)}: {shown}"
