"""`load`: load a data set by name, and split it. `DATASETS` has all loaders."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bayesify.lab.data.checks import require_both_answers, require_every_class, require_labels_in_range
from bayesify.lab.data.cifar import cifar10, cifar100
from bayesify.lab.data.cubic import cubic
from bayesify.lab.data.dataset import Data, R, Source, no_rows
from bayesify.lab.data.digits import digits
from bayesify.lab.data.downloadable_sets import download as download_set
from bayesify.lab.data.errors import DataError, suggest
from bayesify.lab.data.examples import Examples
from bayesify.lab.data.folder import folder
from bayesify.lab.data.huggingface import huggingface
from bayesify.lab.data.idx import CLOTHES, DIGITS, HIRAGANA, LETTERS, idx, named_idx_set
from bayesify.lab.data.inputs import moments
from bayesify.lab.data.npz import npz
from bayesify.lab.data.orl_faces import orl_faces
from bayesify.lab.data.segmentation import segmentation
from bayesify.lab.data.series_files import physionet2012, series
from bayesify.lab.data.splits import divide, number_of_rows
from bayesify.lab.data.table import TableRows, table
from bayesify.lab.data.targets import Classes, Labels, Masks, Reals, Targets
from bayesify.lab.data.uci import uci

DATASETS: dict[str, Callable[..., Source[Any]]] = {
    "digits": digits,
    "cubic": cubic,
    "idx": idx,
    "mnist": named_idx_set("mnist", DIGITS),
    "fashion-mnist": named_idx_set("fashion-mnist", CLOTHES),
    "kmnist": named_idx_set("kmnist", HIRAGANA),
    "notmnist": named_idx_set("notmnist", LETTERS),
    "cifar10": cifar10,
    "cifar100": cifar100,
    "orl_faces": orl_faces,
    "table": table,
    "folder": folder,
    "npz": npz,
    "segmentation": segmentation,
    "series": series,
    "physionet2012": physionet2012,
    "uci": uci,
    "huggingface": huggingface,
}
"""Every loader by the name of its data set or format; its keyword arguments are the options."""
VALIDATION = 0.1
TEST = 0.2


def load(
    name: str = "digits",
    *,
    path: str | Path | None = None,
    validation: float | int | str = VALIDATION,
    test: float | int | None = None,
    calibration: float | int = 0,
    seed: int = 0,
    limit: int | None = None,
    download: bool = False,
    **options: Any,
) -> Data:
    """Load a data set by name, and split it.

    Splits are disjoint, depend only on `seed`, and have every class in proportion.

    Args:
        name: One of `DATASETS`: a data set or a file format.
        path: Where the data are; not needed for the digits, and for known sets in the data root.
        validation: The fraction or number of training rows for validation, or "test:5000" for the first 5000 test rows.
        test: The fraction or number of rows for testing, if the data set has no test split; 0.2 by default.
        calibration: The fraction or number of training rows for conformal prediction.
        seed: Decides which rows are in which split.
        limit: The most training rows to keep.
        download: Whether to download a known set into the data root if it is not there: MNIST and sets in its format,
            CIFAR, UCI. Without, they are never asked for.
        **options: Options of the loader, such as `target="price"` for a table.

    Returns:
        The splits, with what their inputs and targets are.

    Raises:
        DataError: If the data are missing or broken, or an option is wrong.

    >>> print(load(limit=100))
    digits: 100 train, 144 validation, 359 test; images (1, 8, 8), 10 classes
    """
    if name not in DATASETS:
        raise DataError(f"no data set or format is called {name!r}: {suggest(name, DATASETS)}")
    if not isinstance(seed, int):
        raise DataError(f"seed={seed!r}: expected an integer")
    options = _known_options(name, options)
    if download:
        download_set(name, path)
    source = DATASETS[name](path, **options)
    splits = _split(source, validation, test, seed)
    splits["train"], splits["calibration"] = _split_off(splits["train"], "calibration", calibration, seed)
    splits = _limit(splits, limit, seed)
    targets = _targets(source, splits)
    inputs = source.learn(splits["train"])
    ready = {split: _standardise_targets(source.encode(inputs, rows), targets) for split, rows in splits.items()}
    missing = sum((rows.missing() for rows in splits.values() if isinstance(rows, TableRows)), Counter[str]())
    return Data(
        name, ready["train"], ready["validation"], ready["test"], inputs, targets, ready["calibration"], missing
    )


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The options of a loader, in addition to those of `load`.

    Args:
        name: One of `DATASETS`.

    Returns:
        The parameters of the loader by name, with their defaults.

    >>> list(options_of("uci"))
    ['split']
    """
    return {key: value for key, value in inspect.signature(DATASETS[name]).parameters.items() if key != "path"}


def _known_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    possible = [*options_of(name), "path", "validation", "test", "calibration", "seed", "limit", "download"]
    for option in options:
        if option not in possible:
            raise DataError(f"{option}={options[option]!r}: {name!r} has no such option; {suggest(option, possible)}")
    return options


def _split(source: Source[R], validation: float | int | str, test: float | int | None, seed: int) -> dict[str, R]:
    """The rows of each split."""
    train, own_validation, own_test = source.train, source.validation, source.test
    if own_validation is not None and validation != VALIDATION:
        raise DataError(f"validation={validation!r}: this set has its own validation split; leave the option out")
    if own_test is None:
        train, own_test = _split_off(train, "test", TEST if test is None else test, seed)
    elif test is not None:
        raise DataError(f"test={test!r}: this set has its own test split; leave the option out")
    if isinstance(validation, str):
        own_validation, own_test = _take_from_test(own_test, validation)
    elif own_validation is None:
        train, own_validation = _split_off(train, "validation", validation, seed)
    return {"train": train, "validation": own_validation, "test": own_test}


def _split_off(rows: R, option: str, value: float | int, seed: int) -> tuple[R, R]:
    """The remaining rows, and the rows that an option splits off."""
    count = number_of_rows(option, value, len(rows))
    if not count:
        return rows, no_rows(rows)
    kept, split_off = divide(rows.targets, count, seed, option)
    return rows.take(kept), rows.take(split_off)


def _take_from_test(test: R, validation: str) -> tuple[R, R]:
    """The first test rows, as in "test:5000", and the rest."""
    word, _, number = validation.partition(":")
    if word != "test" or not number.isdecimal() or int(number) > len(test):
        raise DataError(
            f"validation={validation!r}: expected a fraction, a number of rows, or 'test:N' for the first N of the "
            f"{len(test)} test rows"
        )
    return test.take(torch.arange(int(number))), test.take(torch.arange(int(number), len(test)))


def _limit(splits: dict[str, R], limit: int | None, seed: int) -> dict[str, R]:
    if limit is None:
        return splits
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise DataError(f"limit={limit!r}: expected a number of training rows >= 1, or None for all")
    train = splits["train"]
    if limit >= len(train):
        return splits
    kept, _ = divide(train.targets, len(train) - limit, seed, "limit")
    return {**splits, "train": train.take(kept)}


def _targets(source: Source[R], splits: Mapping[str, R]) -> Targets:
    """What the targets are; raises for unknown labels, and for classes without training examples."""
    train = splits["train"].targets
    if train.is_floating_point():
        return Reals(source.names, *moments([train]))
    if train.dim() == 2:
        for split, rows in splits.items():
            require_labels_in_range(rows.targets, 2, f"the {split} split")
        require_both_answers(train, source.names)
        return Labels(source.names)
    for split, rows in splits.items():
        if source.names:
            require_labels_in_range(rows.targets, len(source.names), f"the {split} split")
    if len(train):
        require_every_class(train.flatten(), source.names)
    return Masks(source.names) if train.dim() == 3 else Classes(source.names)


def _standardise_targets(examples: Examples, targets: Targets) -> Examples:
    if not isinstance(targets, Reals):
        return examples
    return examples.with_targets(targets.standardise(examples.targets))
