"""`load_weights`: load a file of weights into a network, completely or not at all."""

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor, nn

from bayesify.lab.models.errors import ModelError, first_few, suggestion
from bayesify.lab.models.third_party import Logits
from bayesify.lab.models.weight_files import read_weights, shapes_of
from bayesify.layers.base import unwrapped

WRAPPINGS = ("module", "model", "_orig_mod", "network", "net")
"""Prefixes that wrappers add to the names of tensors."""

INSIDE = ("module", "_orig_mod")
"""Wrappers that can also be inside a name, if only a part of the network was parallel or compiled."""

log = logging.getLogger("bayesify")


def load_weights(model: nn.Module, path: str | Path, *, strict: bool = True, ignore: Sequence[str] = ()) -> None:
    """Load a safetensors file, or a `state_dict` saved by torch, into a network in place.

    The tensors may be wrapped (`{"state_dict": ...}`) and their names prefixed (`module.`).

    Args:
        model: The network.
        path: The file.
        strict: Whether file and network must have the same tensors.
        ignore: Patterns of names, such as `"fc.*"` for a new head; matching tensors keep the network's own values.

    Raises:
        ModelError: If the file does not fit; the network is then unchanged.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "weights.pt"
    >>> torch.save({"epoch": 3, "state_dict": {"module.weight": torch.ones(1, 2), "module.bias": torch.ones(1)}}, path)
    >>> model = nn.Linear(2, 1)
    >>> load_weights(model, path)
    >>> model.bias.item()
    1.0
    """
    model, path = _unwrap(model), Path(path).expanduser()
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    tensors = strip_prefixes(read_weights(path), own)
    kept = _ignored_names(ignore, own, tensors, path)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in kept}
    _compare(model, {name: value for name, value in own.items() if name not in kept}, tensors, strict, path)
    # All are converted before the first is written, so that an error leaves the network unchanged.
    ready = {name: _convert(name, tensors[name], own[name], path) for name in own if name in tensors}
    model.load_state_dict(ready, strict=False)
    untouched = [name for name in _required(model, own, ready) if name not in ready]
    if untouched:
        log.warning(
            "%s: %d of %d tensors keep the network's own values: %s",
            path,
            len(untouched),
            len(own),
            first_few(untouched),
        )


def require_same_shapes(model: nn.Module, path: Path) -> None:
    """Raise unless a safetensors file has tensors of the network's shapes; reads only the file's header.

    Args:
        model: The network; it may be on the meta device.
        path: The file.
    """
    own, found = {name: tuple(value.shape) for name, value in model.state_dict().items()}, shapes_of(path)
    for name in sorted(own.keys() | found.keys()):
        if own.get(name) != found.get(name):
            raise ModelError(
                f"{path} does not fit: {name!r} has shape {found.get(name)} in the file and {own.get(name)} in the "
                "network"
            )


def strip_prefixes(tensors: Mapping[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """The tensors without the prefixes of wrappers, where that makes more names match the network.

    >>> import torch
    >>> list(strip_prefixes({"module._orig_mod.fc.weight": torch.ones(1)}, ["fc.weight"]))
    ['fc.weight']
    """
    wanted = set(own)
    best = start = tuple(tensors)
    seen, queue = {start}, [start]
    for names in queue:  # breadth-first, so that ties go to the fewest removed prefixes
        if len(wanted.intersection(names)) > len(wanted.intersection(best)):
            best = names
        if wanted.issubset(best):
            break
        fresh = {other: None for other in _removals(names) if other not in seen}
        seen.update(fresh)
        queue.extend(fresh)
    return dict(zip(best, tensors.values(), strict=True))


def _removals(names: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """The names after each way to remove one prefix, if they stay distinct."""
    ways = [tuple(name.removeprefix(f"{word}.") for name in names) for word in WRAPPINGS]
    ways += [tuple(name.replace(f".{word}.", ".") for name in names) for word in INSIDE]
    return [way for way in ways if way != names and len(set(way)) == len(names)]


def _unwrap(model: nn.Module) -> nn.Module:
    model = unwrapped(model)
    return _unwrap(model.network) if isinstance(model, Logits) else model


def _ignored_names(
    ignore: Sequence[str], own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path
) -> set[str]:
    """The names that match a pattern; raises if a pattern matches none."""
    if isinstance(ignore, str):
        raise ModelError(f"ignore must be a list of patterns, such as [{ignore!r}], not one string")
    names = {**own, **tensors}
    kept: set[str] = set()
    for pattern in ignore:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise ModelError(f"{path}: ignore={pattern!r} matches no tensor{suggestion(pattern, names)}")
        kept |= matched
    return kept


def _compare(
    model: nn.Module, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], strict: bool, path: Path
) -> None:
    """Raise one error with everything that does not fit."""
    common = own.keys() & tensors.keys()
    if not common:
        raise ModelError(
            f"{path}: no tensor name matches this network: the file has {first_few(list(tensors)) or 'none'}, "
            f"the network {first_few(list(own)) or 'none'}"
        )
    extra = [name for name in tensors if name not in own]
    missing = [name for name in _required(model, own, tensors) if name not in tensors]
    shapes = [name for name in own if name in common and own[name].shape != tensors[name].shape]
    faults = [*_about_names(own, missing, extra, path)] if strict else []
    faults += _about_shapes(own, tensors, shapes)
    if faults:
        raise ModelError(f"{path} does not fit: " + "; ".join(faults))


def _required(model: nn.Module, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """The names that a file must have: tied tensors once, and without the batch counters that old files lack."""
    identities = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    filled = {identities[name] for name in tensors if name in identities}
    return [
        name for name in own if not name.endswith("num_batches_tracked") and identities.get(name, name) not in filled
    ]


def _about_names(own: Mapping[str, Tensor], missing: list[str], extra: list[str], path: Path) -> Iterable[str]:
    if missing:
        yield f"it lacks {len(missing)} of the network's {len(own)} tensors: {_paired(missing, extra, 'the file has')}"
    if extra:
        plural = "s" * (len(extra) > 1)
        yield f"it has {len(extra)} tensor{plural} that the network lacks: {_paired(extra, missing, 'the network has')}"
    if any("posterior" in name.split(".") for name in missing):
        yield "the network is already Bayesian: load the weights before by.convert"
    if any("posterior" in name.split(".") for name in extra):
        yield "the file is from a Bayesian network: convert this one in the same way, or use by.save and by.load"
    if missing or extra:
        yield "strict=False loads what fits"


def _paired(names: list[str], others: list[str], word: str) -> str:
    """The first few names, each with the most similar other name."""
    shown = []
    for name in names[:3]:
        near = difflib.get_close_matches(name, others, n=1)
        shown.append(f"{name!r} ({word} {near[0]!r})" if near else repr(name))
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _about_shapes(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: list[str]) -> Iterable[str]:
    for name in names[:3]:
        yield f"{name!r} has shape {tuple(tensors[name].shape)} in the file and {tuple(own[name].shape)} in the network"
    if len(names) > 3:
        yield f"and {len(names) - 3} more have other shapes"
    layers = sorted({name.rpartition(".")[0] for name in names})
    if 0 < len(layers) <= 2:
        patterns = [f"{layer}.*" if layer else "*" for layer in layers]
        yield f"use ignore={patterns} to keep the network's own values there, as for a head with other classes"


def _convert(name: str, tensor: Tensor, own: Tensor, path: Path) -> Tensor:
    """The tensor converted to the type and device of the network's own."""
    if own.is_floating_point() and not tensor.is_floating_point():
        raise ModelError(f"{path}: {name!r} holds {tensor.dtype}, which can't be weights; expected {own.dtype}")
    try:
        converted = tensor.to(own)
    except RuntimeError as error:
        raise ModelError(f"{path}: {name!r} of type {tensor.dtype} can't become {own.dtype}: {error}") from error
    if converted.is_floating_point() and not converted.isfinite().all():
        raise ModelError(f"{path}: {name!r} holds values that are NaN, infinite or too large for {own.dtype}")
    return converted
