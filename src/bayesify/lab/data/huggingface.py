"""Hugging Face data sets, by their name on the hub or from a local path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesify.lab.data.arrays import as_floats, learn_arrays
from bayesify.lab.data.checks import as_labels
from bayesify.lab.data.dataset import Source, example_source, image_source, row_shape
from bayesify.lab.data.errors import DataError, import_optional, list_some, require_choice, suggest
from bayesify.lab.data.frame import Frame, arrow_frame
from bayesify.lab.data.huggingface_examples import HubArrays, HubImages, find_inputs, find_target, kind_of, number_array
from bayesify.lab.data.image_files import shape_of
from bayesify.lab.data.table import as_list, frame_source, target_values

SPLITS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
FIRST_WITHOUT_CODE = 4
"""The first version of the package datasets that runs no code of a data set."""
PACKAGED = ("pandas", "python", "generator", "cache", "spark", "sql")
"""Names that the package datasets reads with pickle, or that call something."""
TEXT = "text needs a tokenizer, which belongs to a model: tokenize it yourself and train in your own loop"


def huggingface(
    path: str | Path | None = None,
    *,
    config: str | None = None,
    revision: str | None = None,
    x: str | Sequence[str] | None = None,
    y: str | None = None,
    task: str | None = None,
    train_split: str | None = None,
    validation_split: str | None = None,
    test_split: str | None = None,
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    standardise: bool = True,
    categorical: str | Sequence[str] = (),
    missing: str = "error",
    unseen: str = "error",
) -> Source[Any]:
    """A data set on the hub, one saved with `save_to_disk`, or a folder that `datasets.load_dataset` can read.

    The input is the column of images or of arrays, or all columns of numbers and words, unless `x` and `y` name others.
    Splits are found by their usual names; "none" leaves one out.
    """
    require_choice("task", task, (None, "classification", "regression"))
    wanted = {"train": train_split, "validation": validation_split, "test": test_split}
    parts = _splits(_dataset(path, config, revision), wanted)
    features = parts["train"].features
    kinds = {name: kind_of(feature) for name, feature in features.items()}
    target = find_target(kinds, y)
    columns = find_inputs(kinds, x, target)
    kind = _input_kind(kinds, columns)
    targets, names = _targets(parts, target, features[target], task)
    if kind == "image":
        return _images(parts, columns[0], targets, names, size, channels, mean, std)
    if kind == "array":
        return _arrays(parts, columns[0], targets, names, standardise)
    words = [*as_list(categorical), *(name for name in columns if kinds[name] == "class")]
    options = {"missing": missing, "unseen": unseen}
    return frame_source({split: _frame(rows, columns) for split, rows in parts.items()}, targets, names, words, options)


def training_rows(path: str | Path, options: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """The training rows of a data set, and the kind of each column: "image", "array", "class", "number", "text", ….

    Args:
        path: As for `huggingface`.
        options: The loader's options that decide which rows these are: config, revision, train_split.

    Returns:
        The rows, and the kinds by name.
    """
    found = _dataset(path, options.get("config"), options.get("revision"))
    rows = _splits(found, {"train": options.get("train_split")})["train"]
    return rows, {name: kind_of(feature) for name, feature in rows.features.items()}


def _dataset(path: str | Path | None, config: str | None, revision: str | None) -> Any:
    if path is None:
        raise DataError("the data set 'huggingface' needs path=…: a name on the hub, such as 'mnist', or a local path")
    datasets = import_optional("datasets", "the data set 'huggingface'", extra="hub")
    if int(datasets.__version__.split(".")[0]) < FIRST_WITHOUT_CODE:
        raise DataError(
            f"datasets {datasets.__version__} runs code that comes with a data set; pip install 'datasets>="
            f"{FIRST_WITHOUT_CODE}', which does not"
        )
    local = Path(path).expanduser()
    if str(path) in PACKAGED:
        raise DataError(f"path={str(path)!r} is a file format, not a data set; expected a folder or a name on the hub")
    if local.is_file():
        raise DataError(
            f"path={str(path)!r} is a file; expected a folder or a name on the hub: for a file load 'table'"
        )
    saved = any((local / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            return datasets.load_from_disk(str(local))
        return datasets.load_dataset(str(local if local.exists() else path), config, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"path={str(path)!r} can't be loaded as a Hugging Face data set ({error}); expected a name on the hub, "
            "with config=… if it has several, and a connection; or a local folder"
        ) from error


def _splits(found: Any, wanted: Mapping[str, str | None]) -> dict[str, Any]:
    """The rows of each split, without those that are missing or left out."""
    there = found if isinstance(found, dict) else {"train": found}
    parts = {}
    for split, name in wanted.items():
        if name not in (None, "none", *there):
            raise DataError(f"{split}_split={name!r}: no such split; {suggest(name, list(there))}")
        own = next((usual for usual in SPLITS[split] if usual in there), None) if name is None else name
        if own is not None and own != "none":
            parts[split] = there[own]
    if "train" not in parts or not len(parts["train"]):
        raise DataError(f"no training rows: there are the splits {list_some(there)}; set train_split=…")
    return {split: rows for split, rows in parts.items() if len(rows)}


def _input_kind(kinds: Mapping[str, str], columns: Sequence[str]) -> str:
    """Whether columns are an image, an array or a table; raises if they don't fit together."""
    found = {kinds[name] for name in columns}
    if found and found <= {"number", "class", "text"}:
        if found == {"text"}:
            raise DataError(f"the columns {list_some(columns)} are text, which isn't supported here: {TEXT}")
        return "table"
    if len(columns) == 1 and found <= {"image", "array"}:
        return found.pop()
    described = list_some((f"{name} ({kinds[name]})" for name in columns), most=20)
    raise DataError(
        f"inputs {described or 'none'}: expected one column of images, one of arrays, or columns of numbers and words; "
        f"set x=… to one of {list_some((f'{name} ({kind})' for name, kind in kinds.items()), most=20)}"
    )


def _targets(
    parts: Mapping[str, Any], target: str, feature: Any, task: str | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    frames = {split: _frame(rows, [target]) for split, rows in parts.items()}
    if kind_of(feature) != "class" or task == "regression":
        return target_values(frames, [target], task)
    labels = {split: as_labels(frame[target], f"{target!r} of the {split} split") for split, frame in frames.items()}
    return labels, tuple(feature.names)


def _frame(rows: Any, columns: Sequence[str]) -> Frame:
    return arrow_frame(rows.select_columns(list(columns)).with_format("arrow")[:], "the data set")


def _images(
    parts: Mapping[str, Any],
    column: str,
    targets: Mapping[str, Tensor],
    names: Sequence[str],
    size: int | Sequence[int] | None,
    channels: int,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Source[Any]:
    width, height = parts["train"][0][column].size
    shape = shape_of(channels, (height, width) if size is None else size)
    made = {split: HubImages(rows, column, targets[split], shape, size is not None) for split, rows in parts.items()}
    return image_source(made["train"], made.get("validation"), made.get("test"), names, mean, std)


def _arrays(
    parts: Mapping[str, Any], column: str, targets: Mapping[str, Tensor], names: Sequence[str], standardise: bool
) -> Source[Any]:
    first = as_floats(number_array([parts["train"][0][column]], column), f"column {column!r}")
    shape = tuple(first.shape[1:])
    made = {split: HubArrays(rows, column, targets[split], shape) for split, rows in parts.items()}
    learn = partial(_learn_arrays, standardise=standardise)
    return example_source(made["train"], made.get("validation"), made.get("test"), names, learn)


def _learn_arrays(train: HubArrays, standardise: bool) -> Any:
    return learn_arrays(train, row_shape(train), standardise)
