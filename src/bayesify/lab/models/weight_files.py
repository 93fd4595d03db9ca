"""Read tensors by name from a file, of safetensors or of torch, without running any code that is in it."""

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

from bayesify.lab.models.errors import ModelError, some, suggestion

WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params")
"""Keys under which training scripts put the tensors, beside epochs and optimizers."""

NOT_WEIGHTS = "{}: neither a safetensors file nor one of torch.save, or not the whole of it"

FOREIGN = re.compile(r"GLOBAL ([\w.]+)")
"""How torch names what a file would have imported."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, out of whatever dictionaries they are wrapped in."""
    if not path.is_file():
        raise ModelError(_no_file(path))
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise ModelError(f"{path}: the file is empty")
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path}: only the pointer of Git LFS, not the weights; fetch them with git lfs pull")
    if start[8:9] == b"{":  # after the eight bytes of its length comes a safetensors file's header
        return _read_safetensors(path)
    return unwrapped_tensors(_read_torch(path), path)


def _no_file(path: Path) -> str:
    if path.is_dir():
        files = sorted(child.name for child in path.iterdir() if child.is_file())
        return f"{path}: a folder; give one of its files{': ' + some(files) if files else ', though it has none'}"
    if not path.parent.is_dir():
        return f"{path}: no such file, nor the folder {str(path.parent)!r}"
    return f"{path}: no such file{suggestion(path.name, [child.name for child in path.parent.iterdir()])}"


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error}); it may be truncated") from error
    if "bayesify" in header:
        raise ModelError(
            f"{path}: a Bayesian network of by.save{_families(header)}, where a plain network's weights are expected; "
            "a run goes on with --resume, and in Python by.load(model, path) reads such a file"
        )
    if not tensors:
        raise ModelError(f"{path}: a safetensors file without tensors")
    return tensors


def _families(header: Mapping[str, str]) -> str:
    try:
        families = json.loads(header["bayesify"])["families"].values()
        return f" ({', '.join(sorted({family['name'] for family in families}))})"
    except (ValueError, LookupError, TypeError, AttributeError):  # whatever it is, it is not ours to read here
        return ""


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols and TorchScript, before the error below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if foreign := FOREIGN.search(str(error)):
            raise ModelError(_has_code(path, foreign[1].rstrip("."))) from error
        raise ModelError(NOT_WEIGHTS.format(path)) from error
    except Exception as error:  # torch tells a file that is not its own by errors of many kinds
        raise ModelError(NOT_WEIGHTS.format(path)) from error


def _has_code(path: Path, name: str) -> str:
    inner = "saved.state_dict()" if name.startswith("torch.nn.") else 'saved["state_dict"]'
    return (
        f"{path}: holds {name}, not only tensors, and reading that could run code of the file, so it was refused. If "
        f"you trust where it comes from, convert it once: saved = torch.load(path, weights_only=False); "
        f'torch.save({inner}, "weights.pt")'
    )


def unwrapped_tensors(saved: Any, path: Path) -> dict[str, Tensor]:
    """The dictionary of tensors inside what a training script saved.

    >>> unwrapped_tensors({"epoch": 3, "model": {"state_dict": {"weight": torch.ones(1)}}}, Path("x.pt"))
    {'weight': tensor([1.])}
    """
    if not isinstance(saved, Mapping):
        raise ModelError(f"{path}: holds a {type(saved).__name__}, not a state dict of tensors by name")
    tensors = _innermost(saved)
    if not tensors:
        keys = some([str(key) for key in saved])
        raise ModelError(f"{path}: no tensors by name under its keys {keys}" if keys else f"{path}: holds nothing")
    return tensors


def _innermost(saved: Mapping[Any, Any]) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        inner = saved.get(wrapper)
        if isinstance(inner, Mapping) and (tensors := _innermost(inner)):
            return tensors
    return {name: value for name, value in saved.items() if isinstance(name, str) and isinstance(value, Tensor)}
