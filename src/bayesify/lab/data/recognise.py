"""`recognise`: which loader reads a file, a folder or a name, with which options, as far as its contents tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bayesify.lab.data.column_kinds import ColumnKinds, same_as_target, sort_columns, with_share_missing
from bayesify.lab.data.errors import DataError, Problems, import_optional, list_some, suggest
from bayesify.lab.data.files import INPUT_KEYS, TARGET_KEYS, existing_path, is_idx, read_npz
from bayesify.lab.data.frame import DELIMITERS, PARQUET, arrow_frame, read_arrow
from bayesify.lab.data.huggingface import training_rows
from bayesify.lab.data.huggingface_examples import find_target
from bayesify.lab.data.image_files import image_files, open_image
from bayesify.lab.data.loading import DATASETS
from bayesify.lab.data.npz import SPLITS, array_names, task_of
from bayesify.lab.data.table import as_list, guess_task
from bayesify.lab.default_choices import Default

LARGEST_SIDE, MANY_IMAGES = 64, 5_000
"""Images are resized to at most so many pixels, and to half as many if there are more images than this."""
HUB = "hf:"
OTHER_DELIMITERS = (";", "\t", "|")
Options = Mapping[str, Any]


class DataChoices(NamedTuple):
    """The `data` part of a recipe, and what was chosen in it."""

    values: dict[str, Any]
    choices: list[Default]


def recognise(data: str | Path, target: str | None, given: Mapping[str, Any]) -> DataChoices:
    """Find out how to load data.

    Args:
        data: A file, a folder, the name of a data set, or one of Hugging Face: `owner/name` or `hf:name`.
        target: The column or array to predict.
        given: The `data` part of a recipe, as far as the user has written it; its options stay as they are.

    Returns:
        The loader with its path and options, and what was chosen.

    Raises:
        DataError: If the data are of no known kind, or have problems; the message has all that were found.
    """
    options = dict(given.get("options") or {})
    name = given.get("name") or _loader_of(str(data))
    of_kind: dict[str, Callable[[str, str | None, dict[str, Any]], DataChoices]] = {
        "table": _table,
        "folder": _folder,
        "npz": _npz,
        "series": _npz,
        "huggingface": _hub,
    }
    if name in of_kind:
        return of_kind[name](str(data), target, options)
    if target is not None:
        raise DataError(f"--target {target}: {data} is the data set {name!r}, which has its own target; leave it out")
    path = {"path": str(data)} if Path(data).exists() else {}
    return DataChoices({"name": name, **path, "options": options}, [Default("data", f"the data set {name!r}")])


def _loader_of(data: str) -> str:
    """The loader for a file, a folder or a name."""
    path = Path(data).expanduser()
    if path.is_dir():
        return _loader_of_folder(path)
    if path.is_file():
        return _loader_of_file(path)
    if data in DATASETS:
        return data
    owner, slash, name = data.partition("/")
    is_hub_name = slash and owner not in ("", ".", "..", "~") and "/" not in name and not Path(owner).is_dir()
    if data.startswith(HUB) or (is_hub_name and Path(name).suffix not in (*DELIMITERS, *PARQUET, ".npz", ".gz")):
        return "huggingface"
    existing_path(path)  # raises, with what is there
    raise AssertionError(f"{path} exists")


def _loader_of_file(path: Path) -> str:
    suffixes = path.suffixes[-2:]
    if any(suffix in (*DELIMITERS, *PARQUET) for suffix in suffixes):
        return "table"
    if path.suffix == ".npz":
        return "npz"
    instead = {
        ".npy": "an .npy file has one array; save inputs and targets with numpy.savez(path, x=…, y=…)",
        ".xlsx": "save the sheet as .csv",
        ".xls": "save the sheet as .csv",
        ".zip": "unpack it first",
        ".json": "save it as .csv or .parquet",
        ".jsonl": "save it as .csv or .parquet",
        ".py": "a Python file is not data: name it with model.name=FILE.py:FUNCTION --trust FILE.py",
    }.get(path.suffix.lower(), "expected .csv, .tsv, .parquet or .npz, a folder of images, or a recipe, .yaml")
    raise DataError(f"{path}: can't be trained on; {instead}")


def _loader_of_folder(path: Path) -> str:
    there = [entry.name for entry in sorted(path.iterdir())]
    if any(name in ("dataset_dict.json", "state.json") for name in there):
        return "huggingface"
    if any(is_idx(Path(name)) for name in there):
        return "idx"
    if any(name.startswith("data_batch_") for name in there) or "cifar-10-batches-py" in there:
        return "cifar10"
    images = image_files(path)
    if images and all(file.parent == path for file in images):
        raise DataError(
            f"{path} has {len(images)} images, but no folders; put the images of each class into a folder of its own"
        )
    if images:
        return "folder"
    if any(Path(name).suffix in (".csv", ".parquet", ".json", ".jsonl", ".arrow") for name in there):
        return "huggingface"
    raise DataError(
        f"{path} has {list_some(there) or 'nothing'}; expected a folder of images for each class, or the files of a "
        "Hugging Face data set"
    )


# Tables.


def _table(data: str, target: str | None, options: dict[str, Any]) -> DataChoices:
    path = existing_path(data)
    delimiter = options.get("delimiter") or _delimiter_of(path)
    table = read_arrow(path, delimiter=delimiter, na_values=as_list(options.get("na_values")))
    names = as_list(options.get("target")) or as_list(target)
    categorical, dropped = as_list(options.get("categorical")), as_list(options.get("drop"))
    _require_columns(table, path, {"target": names, "categorical": categorical, "drop": dropped})
    kinds = sort_columns(table.drop_columns(dropped), target=names, categorical=categorical)
    chosen: dict[str, Any] = {"target": names[0] if len(names) == 1 else names}
    chosen |= {"missing": "indicator", "unseen": "zeros"}
    told = [_target_choice(table, names, chosen, options), *_column_choices(kinds), *_warnings(table, kinds, names)]
    words = sorted({word for odd in kinds.na_values.values() for word in odd})
    lists = {
        "categorical": [*categorical, *kinds.codes],
        "drop": [*dropped, *kinds.left_out],
        "na_values": [*as_list(options.get("na_values")), *words],
        "delimiter": delimiter,
    }
    added = {key: value for key, value in lists.items() if value}
    return DataChoices({"name": "table", "path": data, "options": {**chosen, **options, **added}}, told)


def _require_columns(table: Any, path: Path, wanted: Mapping[str, list[str]]) -> None:
    """Raise unless there is a target, and all columns that are named."""
    if not wanted["target"]:
        columns = list_some(table.column_names, 30)
        raise DataError(f"{path}: which column is to be predicted? Add --target and one of {columns}")
    problems = Problems()
    problems.found += [
        f"{option}={name!r}: no such column in {path}; {suggest(name, table.column_names)}"
        for option, names in wanted.items()
        for name in names
        if name not in table.column_names
    ]
    problems.raise_any()


def _delimiter_of(path: Path) -> str | None:
    """The delimiter of a CSV file, unless it is the usual one of its ending."""
    if path.suffix in PARQUET or path.suffix == ".gz":
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline()
    usual = DELIMITERS.get(path.suffix, ",")
    best = max((usual, *OTHER_DELIMITERS), key=lambda each: (header.count(each), each == usual))
    return best if best != usual and not header.count(usual) else None


def _target_choice(table: Any, names: list[str], chosen: dict[str, Any], options: Options) -> Default:
    """The target in words; rows without it are left out, which is told."""
    gaps = [table[name].null_count for name in names]
    without = f"; rows without it are left out: {max(gaps)}" if any(gaps) else ""
    if any(gaps):
        chosen["missing_target"] = "drop"
    frame = arrow_frame(table.select(names), "the table")
    task = options.get("task") or guess_task(frame, names)
    column = table[names[0]].drop_null()
    if task == "regression":
        low, high = (
            import_optional("pyarrow.compute", "tables").min_max(column)[end].as_py() for end in ("min", "max")
        )
        shown = f"{list_some(names)}: numbers from {low:g} to {high:g}" if len(names) == 1 else list_some(names)
        other = "data.options.task=classification" if frame[names[0]].dtype.kind in "iu" else ""
        return Default("target", f"{shown}{without}", other)
    if task == "multilabel":
        return Default("target", f"{list_some(names)}: labels, each yes or no{without}", "data.options.task=regression")
    counts = Counter(map(str, column.to_pylist())).most_common()
    if len(counts) < 2:
        raise DataError(f"target {names[0]!r} is always {counts[0][0]!r}; there is nothing to predict")
    if len(counts) > len(column) / 2:
        raise DataError(
            f"target {names[0]!r} has {len(counts)} different words in {len(column)} rows; expected classes with "
            "several rows each, or numbers"
        )
    shares = list_some([f"{word} {count / len(column):.0%}" for word, count in counts], 5)
    other = "data.options.task=regression" if frame[names[0]].dtype.kind in "iuf" else ""
    return Default("target", f"{names[0]}: {len(counts)} classes, {shares}{without}", other)


def _column_choices(kinds: ColumnKinds) -> list[Default]:
    """The kinds of columns in words."""
    first = next(iter(kinds.numbers), "NAME")
    told = [Default("numbers", with_share_missing(kinds, kinds.numbers), f"data.options.categorical=[{first}]")]
    told.append(Default("categories", with_share_missing(kinds, kinds.categories)))
    if kinds.left_out:
        left = list_some([f"{name} ({why})" for name, why in kinds.left_out.items()], 12)
        first = next(iter(kinds.left_out))
        told.append(Default("left out", left, f"data.options.categorical=[{first}]"))
    if kinds.missing:
        what = "the mean and an input that says so for numbers, a category of its own for words"
        told.append(Default("missing", what, "data.options.missing=error"))
    for name, odd in kinds.na_values.items():
        told.append(Default("missing", f"{name} has numbers, and {list_some(map(repr, odd))}, which count as missing"))
    return told


def _warnings(table: Any, kinds: ColumnKinds, names: list[str]) -> list[Default]:
    """Columns that look like the target in other words."""
    same = same_as_target(table, kinds.categories, names[0]) if len(names) == 1 else []
    return [
        Default("beware", f"{name} tells {names[0]} in every row; is it known before?", f"data.options.drop=[{name}]")
        for name in same
    ]


# Images.


def _folder(data: str, target: str | None, options: dict[str, Any]) -> DataChoices:
    path = existing_path(data)
    if target is not None:
        raise DataError(f"--target {target}: the classes of a folder of images are its folders; leave it out")
    files = image_files(path)
    sizes, grey, problems = [], 0, Problems()
    for file in files:
        with problems.noted(), open_image(file) as image:
            sizes.append(image.size)
            grey += image.mode in ("1", "L", "LA")
    problems.raise_any()
    channels = options.get("channels") or (1 if grey == len(files) else 3)
    size = options.get("size") or _size(sizes)
    different = "of different sizes" if len(set(sizes)) > 1 else f"of {sizes[0][0]}x{sizes[0][1]} pixels"
    colour = "all grey" if grey == len(files) else f"{grey} grey, made coloured" if grey else "coloured"
    counts = Counter(file.parent.name for file in files).most_common()
    told = [
        Default("images", f"{len(files):,} files {different}, {colour}", "data.options.channels=1"),
        Default("classes", list_some([f"{name} {count}" for name, count in counts], 8)),
        Default(
            "size", f"cropped and resized to {size}x{size}" if isinstance(size, int) else f"{size}", _other_size(size)
        ),
    ]
    return DataChoices(
        {"name": "folder", "path": data, "options": {"size": size, "channels": channels, **options}}, told
    )


def _other_size(size: Any) -> str:
    return f"data.options.size={2 * size if isinstance(size, int) else 64}"


def _size(sizes: list[tuple[int, int]]) -> int:
    """The side of square images for training: a multiple of 8 that most images have, and that is quick to train on."""
    most = LARGEST_SIDE if len(sizes) <= MANY_IMAGES else LARGEST_SIDE // 2
    usual = int(median(min(size) for size in sizes))
    return usual if usual <= min(most, 32) and len(set(sizes)) == 1 else max(8, min(most, usual) // 8 * 8)


# Arrays.


def _npz(data: str, target: str | None, options: dict[str, Any]) -> DataChoices:
    path = existing_path(data)
    if target is not None:
        options = {"y": target, **options}
    arrays = read_npz(path)
    x = _training_array(arrays, options.get("x"), INPUT_KEYS)
    y = _training_array(arrays, options.get("y"), TARGET_KEYS)
    name = "npz"
    if x is not None and x.dtype.kind == "f" and x.ndim == 3 and np.isnan(x).any():
        name = "series"
    elif x is not None and _are_float_images(x):
        options = {"kind": "images", **options}
    shapes = list_some([f"{key} {'x'.join(map(str, array.shape))}" for key, array in arrays.items()])
    told = [Default("arrays", f"{shapes}{', series with gaps' if name == 'series' else ''}", "data.options.x=NAME")]
    if y is not None:
        told.append(_array_choice(y, options.get("task") or task_of(y)))
    return DataChoices({"name": name, "path": data, "options": options}, told)


def _array_choice(y: np.ndarray, task: str) -> Default:
    """The targets of an archive in words."""
    if task == "regression":
        return Default("target", "numbers", "data.options.task=classification")
    if task == "multilabel":
        return Default("target", f"{y.shape[-1]} labels, each yes or no", "data.options.task=regression")
    count = f"{len(np.unique(y))} classes"
    if task == "segmentation":
        return Default("target", f"{count}, one for each pixel")
    return Default("target", count, "data.options.task=regression")


def _training_array(arrays: Mapping[str, np.ndarray], given: str | None, usual: Sequence[str]) -> np.ndarray | None:
    """The array that is given or has a usual name, of the training rows if there are splits."""
    names = [*as_list(given), *usual, *array_names(usual, SPLITS["train"])]
    return next((arrays[name] for name in names if name in arrays), None)


def _are_float_images(x: np.ndarray) -> bool:
    """Whether an array has four dimensions with 1 or 3 channels, and numbers from 0 to 1."""
    has_channels = x.ndim == 4 and bool({x.shape[1], x.shape[3]} & {1, 3})
    return has_channels and x.dtype.kind == "f" and bool(x.size) and float(x.min()) >= 0 and float(x.max()) <= 1


# Hugging Face.


def _hub(data: str, target: str | None, options: dict[str, Any]) -> DataChoices:
    path = data.removeprefix(HUB)
    if target is not None:
        options = {"y": target, **options}
    rows, columns = training_rows(path, options)
    goal = find_target(columns, options.get("y"))
    told = [
        Default("data", f"Hugging Face, {len(rows):,} training rows", "data.options.train_split=NAME"),
        Default("target", goal, "data.options.y=NAME"),
    ]
    images = [name for name, kind in columns.items() if kind == "image"]
    chosen: dict[str, Any] = {"y": goal}
    if images and "x" not in options:
        first = rows[0][images[0]]
        size = _size([first.size] * len(rows))
        chosen |= {"size": size, "channels": 1 if first.mode in ("1", "L") else 3}
        told.append(Default("size", f"{images[0]}, cropped and resized to {size}x{size}", _other_size(size)))
    elif "array" not in columns.values() and "x" not in options:
        kinds = _columns_of_hub(rows, {name: kind for name, kind in columns.items() if name != goal}, options)
        chosen |= {"x": [*kinds.numbers, *kinds.categories], "missing": "indicator", "unseen": "zeros"}
        if categorical := [*as_list(options.get("categorical")), *kinds.codes]:
            options = {**options, "categorical": categorical}
        told += _column_choices(kinds)
    return DataChoices({"name": "huggingface", "path": path, "options": {**chosen, **options}}, told)


def _columns_of_hub(rows: Any, columns: Mapping[str, str], options: Options) -> ColumnKinds:
    """The columns of a table of Hugging Face by kind."""
    plain = [name for name, kind in columns.items() if kind in ("number", "class", "text")]
    named = [*as_list(options.get("categorical")), *(name for name in plain if columns[name] == "class")]
    kinds = sort_columns(rows.select_columns(plain).with_format("arrow")[:], categorical=named)
    kinds.left_out |= {name: f"of type {kind}" for name, kind in columns.items() if name not in plain}
    return kinds
