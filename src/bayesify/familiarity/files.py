"""The file of a familiarity: tensors in safetensors, names as JSON in its header."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bayesify.errors import CheckpointError
from bayesify.familiarity.density import QUANTILES
from bayesify.familiarity.features import MOST_FEATURES
from bayesify.familiarity.sample import MOST_COLUMNS
from bayesify.tensor_files import write_tensors

FORMAT = 1
MOST_CLASSES = 1_000_000
"""The most classes that a file may have."""


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
    values: list[Any] = [header.get(key) for key in ("layers", "rows", "checksums")]
    layers, rows, sums = values
    are_layers = _is_list_of(str, layers) and 0 < len(layers) == len(set(layers))
    are_sums = are_layers and _is_list_of(float, sums) and len(sums) in (0, len(layers))
    right = {"layers": are_layers, "rows": type(rows) is int and rows > 0, "checksums": are_sums}
    for key, is_right in right.items():
        if not is_right:
            return f"its header has {key}={str(header.get(key))[:80]}"
    if types != {"F32"}:
        return f"its tensors have the types {', '.join(sorted(types))}"
    expected = _expected_shapes(len(layers), shapes)
    wrong = min((name for name in expected.keys() | shapes if expected.get(name) != shapes.get(name)), default=None)
    return wrong and f"it has {wrong!r} with shape {shapes.get(wrong)}, expected {expected.get(wrong)}"


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _expected_shapes(layers: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes that all tensors must have, by the numbers of features, classes and columns that the file has."""
    expected: dict[str, tuple[int, ...]] = {"log_distances": (layers, 2), "ranks": (QUANTILES,)}
    for i in range(layers):
        size = min(math.prod(shapes.get(f"mean.{i}", (1,))), MOST_FEATURES)
        classes = max(math.prod(shapes.get(f"centres.{i}", ())) // max(size, 1), 1)
        expected |= {f"mean.{i}": (size,), f"scale.{i}": (size,), f"whiten.{i}": (size, size)}
        expected[f"centres.{i}"] = (min(classes, MOST_CLASSES), size)
    if {"low", "high"} & shapes.keys():
        expected |= dict.fromkeys(("low", "high"), (min(math.prod(shapes.get("low", (0,))), MOST_COLUMNS),))
    return expected | ({"uncertainty": (QUANTILES,)} if "uncertainty" in shapes else {})


def _problem_of_values(tensors: dict[str, Tensor]) -> str | None:
    """What is wrong with the values of the tensors."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            return f"its tensor {name!r} holds NaN or infinity"
        if name.startswith("scale.") and not bool((tensor > 0).all()):
            return f"its tensor {name!r} has values that are not positive"
        if name.startswith("whiten.") and not bool((tensor.diagonal() > 0).all()):
            return f"its tensor {name!r} has values on its diagonal that are not positive"
        if name in ("ranks", "uncertainty") and not bool((tensor.diff() >= 0).all()):
            return f"its quantiles {name!r} are not sorted"
    if "low" in tensors and not bool((tensors["low"] <= tensors["high"]).all()):
        return "its tensor 'low' has values above those of 'high'"
    if not bool((tensors["log_distances"][:, 1] > 0).all()):
        return "its tensor 'log_distances' has standard deviations that are not positive"
    return None
