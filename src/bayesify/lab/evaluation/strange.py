"""Inputs unlike the training data: noise, and other data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bayesify.lab.data import DATASETS, Arrays, Columns, Examples, Images, Inputs, Series, TensorExamples, load
from bayesify.lab.data.examples import some_rows
from bayesify.lab.data.fitted import FittedImages
from bayesify.lab.data.images import image_array, unlabelled
from bayesify.lab.data.pictures import SUFFIXES
from bayesify.lab.evaluation.predictive import EvaluationError
from bayesify.lab.recipes import DataPart
from bayesify.lab.runs import expanded

SPREAD = 3.0
"""Noise for tables and arrays is so many times as wide as the training data."""


def noise(inputs: Inputs, rows: int, seed: int = 0) -> Examples:
    """Inputs that mean nothing, raw like a data set's.

    Images are uniform noise over the whole range of pixels. Numbers of tables, arrays and series are Gaussian around
    the training mean with three times the training deviation, in series without gaps; categories are uniform.

    >>> noise(Images((1, 2, 2), (0.5,), (0.2,)), 3).raw(torch.arange(3)).shape
    torch.Size([3, 1, 2, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(inputs, Images):
        x = torch.rand(rows, *inputs.shape, generator=generator)
    elif isinstance(inputs, Columns):  # whose raw numbers are standardised
        numbers = SPREAD * torch.randn(rows, len(inputs.numeric), generator=generator)
        sizes = [len(words) for words in inputs.categories]
        codes = [torch.randint(size, (rows, 1), generator=generator).float() for size in sizes]
        x = torch.cat([numbers, *codes], 1)
    elif isinstance(inputs, (Arrays, Series)):
        shape = inputs.shape if isinstance(inputs, Arrays) else (inputs.steps, len(inputs.mean))
        wide = SPREAD * torch.randn(rows, *shape, generator=generator)
        x = wide * torch.tensor(inputs.std) + torch.tensor(inputs.mean)
    else:
        raise EvaluationError(f"no noise is defined for inputs that are {type(inputs).__name__}")
    return TensorExamples(x, torch.full((rows,), -1))


def other_sets(given: Sequence[str | DataPart], inputs: Inputs, taken: Sequence[str] = ()) -> dict[str, Examples]:
    """Sets of inputs to tell from the familiar ones, by names that are not taken.

    Each is a data set by its name in `DATASETS` or by a recipe's `data` part, of which the test rows are taken (all,
    where it has none of its own; `limit` of them, evenly spread); or else a file or folder of inputs, as prediction
    reads them. Images of another size or number of channels are fitted.
    """
    found: dict[str, Examples] = {}
    for each in given:
        part = DataPart(name=each) if isinstance(each, str) and each in DATASETS else each
        name = part.name if isinstance(part, DataPart) else _name(expanded(part))
        if name in (*taken, *found):
            name = f"{name} {len(found) + 1}"
        found[name] = _fitting(_test_rows(part) if isinstance(part, DataPart) else _files(part, inputs), inputs, name)
    return found


def _name(path: Path) -> str:
    return path.name if path.is_dir() else path.stem


def _test_rows(part: DataPart) -> Examples:
    path = None if part.path is None else expanded(part.path)
    found = load(part.name, path=path, validation=0, test=part.test, **part.options)
    rows = found.test if len(found.test) else found.train
    return some_rows(rows, part.limit or len(rows))


def _files(given: str, inputs: Inputs) -> Examples:
    path = expanded(given)
    if not path.exists():
        names = ", ".join(sorted(DATASETS))
        raise EvaluationError(f"evaluation.ood={given!r}: neither a file or folder nor a data set; these are {names}")
    if isinstance(inputs, Images) and path.is_file() and path.suffix.lower() not in SUFFIXES:
        x = image_array(path)
        return TensorExamples(x, unlabelled(len(x)))
    return inputs.read([path])[0]


def _fitting(examples: Examples, inputs: Inputs, name: str) -> Examples:
    if isinstance(inputs, Images):
        return FittedImages(examples, inputs.shape)
    shape, own = (tuple(each.raw(torch.arange(1)).shape[1:]) for each in (examples, noise(inputs, 1)))
    if shape != own:
        raise EvaluationError(f"evaluation.ood={name!r} has inputs of shape {shape}, the model takes {own}")
    return examples
