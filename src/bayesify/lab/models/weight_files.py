"""Read tensors by name from a safetensors or torch file, without running code in it."""

import json
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bayesify.lab.models.errors import ModelError, first_few, suggestion

WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params")
"""Keys under which training scripts save the tensors, beside epochs and optimizers."""

NOT_WEIGHTS = "{}: not a safetensors or torch.save file, or truncated"

FOREIGN = re.compile(r"GLOBAL ([\w.]+)")
"""How torch's error names what the file would import."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, unwrapped from nested dictionaries."""
    if not path.is_file():
        raise ModelError(_no_file(path))
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise ModelError(f"{path}: the file is empty")
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path}: a Git LFS pointer, not the weights; fetch them with git lfs pull")
    if start[8:9] == b"{":  # the JSON header of a safetensors file follows its length in 8 bytes
        return _read_safetensors(path)
    return unwrapped_tensors(_read_torch(path), path)


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, from its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: not a complete safetensors file ({error})") from error


def _no_file(path: Path) -> str:
    if path.is_dir():
        files = sorted(child.name for child in path.iterdir() if child.is_file())
        return f"{path}: a folder; expected one of its files{': ' + first_few(files) if files else ', but it has none'}"
    if not path.parent.is_dir():
        return f"{path}: no such file, and no folder {str(path.parent)!r}"
    return f"{path}: no such file{suggestion(path.name, [child.name for child in path.parent.iterdir()])}"


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: not a complete safetensors file ({error})") from error
    if "bayesify" in header:
        raise ModelError(
            f"{path}: a Bayesian network saved with by.save{_methods(header)}; expected plain weights. "
            "Continue a run with --resume; in Python, by.load(model, path) reads this file"
        )
    if not tensors:
        raise ModelError(f"{path}: a safetensors file without tensors")
    return tensors


def _methods(header: Mapping[str, str]) -> str:
    try:
        description = json.loads(header["bayesify"])
        methods = (description.get("methods") or description["families"]).values()
        return f" ({', '.join(sorted({method['name'] for method in methods}))})"
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):  # a header that can't be read only shortens the message
        return ""


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols and TorchScript
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if foreign := FOREIGN.search(str(error)):
            raise ModelError(_has_code(path, foreign[1].rstrip("."))) from error
        raise ModelError(NOT_WEIGHTS.format(path)) from error
    except Exception as error:  # torch raises many kinds of errors for other files
        raise ModelError(NOT_WEIGHTS.format(path)) from error


def _has_code(path: Path, name: str) -> str:
    inner = "saved.state_dict()" if name.startswith("torch.nn.") else 'saved["state_dict"]'
    return (
        f"{path}: contains {name}, not only tensors; reading it could run code in the file, so it was not loaded. If "
        f"you trust its source, convert it once: saved = torch.load(path, weights_only=False); "
        f'torch.save({inner}, "weights.pt")'
    )


def unwrapped_tensors(saved: Any, path: Path) -> dict[str, Tensor]:
    """The dictionary of tensors in what a training script saved.

    >>> unwrapped_tensors({"epoch": 3, "model": {"state_dict": {"weight": torch.ones(1)}}}, Path("x.pt"))
    {'weight': tensor([1.])}
    """
    if not isinstance(saved, Mapping):
        raise ModelError(f"{path}: holds a {type(saved).__name__}, not a state dict of tensors by name")
    try:
        tensors = _innermost(saved)
    except RecursionError:
        raise ModelError(f"{path}: its dictionaries are nested too deeply, or contain themselves") from None
    if not tensors:
        keys = first_few([str(key) for key in saved])
        raise ModelError(f"{path}: no named tensors under its keys {keys}" if keys else f"{path}: empty")
    return tensors


def _innermost(saved: Mapping[Any, Any]) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        inner = saved.get(wrapper)
        if isinstance(inner, Mapping) and (tensors := _innermost(inner)):
            return tensors
    return {name: value for name, value in saved.items() if isinstance(name, str) and isinstance(value, Tensor)}
