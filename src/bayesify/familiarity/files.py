"""The file of a familiarity: tensors in safetensors, names as JSON in its header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bayesify.errors import CheckpointError
from bayesify.familiarity.density import QUANTILES
from bayesify.familiarity.features import MOST_FEATURES
from bayesify.files.checkpoint import write_tensors

FORMAT = 1
LARGEST = 10_000_000
"""The most numbers that a tensor of the file may have."""


def write_familiarity(tensors: dict[str, Tensor], header: dict[str, Any], path: Path) -> None:
    """Write the tensors and what the header says, atomically."""
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: the folder {str(path.parent)!r} does not exist")
    own = {name: t.detach().float().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    write_tensors(own, path, {"familiarity": json.dumps({"format": FORMAT, **header})})


def read_familiarity(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file; raises unless they have the form in which they are written."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("familiarity", "null"))
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(each.get_shape()) for name, each in slices.items()}
            types = {each.get_dtype() for each in slices.values()}
            problem = _problem(header, shapes, types)
            tensors = {} if problem else {name: file.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a complete safetensors file ({error}); fit the familiarity again"
        ) from error
    problem = problem or _problem_of_values(tensors)
    if problem:
        raise CheckpointError(f"{path}: {problem}, so Familiarity.save did not write it; fit the familiarity again")
    return header, tensors


def _problem(header: Any, shapes: dict[str, tuple[int, ...]], types: set[str]) -> str | None:
    """What is wrong with the header, or with the names, shapes and types of the tensors."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        return "its header has no familiarity of this format"
    layers, sums = header.get("layers"), header.get("checksums")
    if not isinstance(layers, list) or not layers or not all(isinstance(name, str) for name in layers):
        return f"its header has layers={str(layers)[:80]}"
    if not isinstance(sums, list) or len(sums) not in (0, len(layers)) or not all(type(s) is float for s in sums):
        return f"its header has checksums={str(sums)[:80]}"
    if type(header.get("rows")) is not int or header["rows"] < 1:
        return f"its header has rows={str(header.get('rows'))[:80]}"
    if types != {"F32"}:
        return f"its tensors have the types {', '.join(sorted(types))}"
    expected: dict[str, tuple[int, ...]] = {"log_distances": (len(layers), 2), "ranks": (QUANTILES,)}
    for i in range(len(layers)):
        (size,) = shapes.get(f"mean.{i}", (0,)) if len(shapes.get(f"mean.{i}", ())) == 1 else (0,)
        classes = shapes.get(f"centres.{i}", (0,))[:1]
        if not 0 < size <= MOST_FEATURES or not classes or not 0 < classes[0] * size <= LARGEST:
            return f"its layer {i} has {size} features and {classes} centres"
        expected |= {f"mean.{i}": (size,), f"scale.{i}": (size,), f"whiten.{i}": (size, size)}
        expected[f"centres.{i}"] = (*classes, size)
    if {"low", "high"} & shapes.keys():
        expected |= {"low": shapes.get("low", (0,))[:1], "high": shapes.get("low", (0,))[:1]}
    if "uncertainty" in shapes:
        expected["uncertainty"] = (QUANTILES,)
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    return (
        f"it has {wrong[0]!r} with shape {shapes.get(wrong[0])}, expected {expected.get(wrong[0])}" if wrong else None
    )


def _problem_of_values(tensors: dict[str, Tensor]) -> str | None:
    """What is wrong with the values of the tensors."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            return f"its tensor {name!r} holds NaN or infinity"
        if name.startswith("scale.") and not bool((tensor > 0).all()):
            return f"its tensor {name!r} has values that are not positive"
        if name in ("ranks", "uncertainty") and not bool((tensor.diff() >= 0).all()):
            return f"its quantiles {name!r} are not sorted"
    if not bool((tensors["log_distances"][:, 1] > 0).all()):
        return "its tensor 'log_distances' has standard deviations that are not positive"
    return None
