"""Out-of-distribution inputs for evaluation: noise, and other data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bayesify.lab.data import DATASETS, Arrays, Columns, Examples, Images, Inputs, Series, TensorExamples, load
from bayesify.lab.data.examples import evenly_spread
from bayesify.lab.data.image_files import SUFFIXES
from bayesify.lab.data.images import image_array, unlabelled
from bayesify.lab.data.resized_images import ResizedImages
from bayesify.lab.recipes import DataPart
from bayesify.lab.runs import expand_path
from bayesify.lab.trained import EvaluationError

SPREAD = 3.0
"""Noise for tables and arrays has this many times the standard deviation of the training data."""


def noise(inputs: Inputs, rows: int, seed: int = 0) -> Examples:
    """Raw inputs of pure noise.

    Images are uniform over the range of pixel values. The numbers of tables, arrays and series are Gaussian around the
    training mean with three times the training standard deviation, without gaps in series; categories are uniform.

    Args:
        inputs: What the inputs of the model are.
        rows: How many.
        seed: The seed of the noise.

    Returns:
        Examples with the label -1.

    Raises:
        EvaluationError: If no noise is defined for such inputs.

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
        wide = SPREAD * torch.randn(rows, *inputs.raw_shape, generator=generator)
        x = wide * torch.tensor(inputs.std) + torch.tensor(inputs.mean)
    else:
        raise EvaluationError(f"no noise is defined for inputs of type {type(inputs).__name__}")
    return TensorExamples(x, torch.full((rows,), -1))


def load_ood_sets(given: Sequence[str | DataPart], inputs: Inputs, taken: Sequence[str] = ()) -> dict[str, Examples]:
    """Load out-of-distribution sets, by names that are not taken yet.

    Each is a data set, given by its name in `DATASETS` or by a recipe's `data` part, or a file or folder of inputs as
    prediction reads them. Of a data set the test rows are used (the training rows if it has no test rows), at most
    `limit` of them, evenly spread. Images are resized to the model's size and number of channels.
    """
    found: dict[str, Examples] = {}
    for each in given:
        part = DataPart(name=each) if isinstance(each, str) and each in DATASETS else each
        name = part.name if isinstance(part, DataPart) else _name(expand_path(part))
        if name in (*taken, *found):
            name = f"{name} {len(found) + 1}"
        examples = _test_rows(part) if isinstance(part, DataPart) else _read_files(part, inputs)
        found[name] = _fit_to(inputs, examples, name)
    return found


def _name(path: Path) -> str:
    return path.name if path.is_dir() else path.stem


def _test_rows(part: DataPart) -> Examples:
    path = None if part.path is None else expand_path(part.path)
    found = load(part.name, path=path, validation=0, test=part.test, download=part.download, **part.options)
    rows = found.test if len(found.test) else found.train
    return evenly_spread(rows, part.limit or len(rows))


def _read_files(given: str, inputs: Inputs) -> Examples:
    path = expand_path(given)
    if not path.exists():
        names = ", ".join(sorted(DATASETS))
        raise EvaluationError(f"evaluation.ood={given!r}: no such file, folder or data set; the data sets are {names}")
    if isinstance(inputs, Images) and path.is_file() and path.suffix.lower() not in SUFFIXES:
        x = image_array(path)
        return TensorExamples(x, unlabelled(len(x)))
    return inputs.read([path])[0]


def _fit_to(inputs: Inputs, examples: Examples, name: str) -> Examples:
    """The examples as the model takes them: resized, if they are images."""
    if isinstance(inputs, Images):
        return ResizedImages(examples, inputs.shape)
    shape = tuple(examples.raw(torch.arange(1)).shape[1:])
    if shape != inputs.raw_shape:
        raise EvaluationError(f"evaluation.ood={name!r} has inputs of shape {shape}; expected {inputs.raw_shape}")
    return examples
