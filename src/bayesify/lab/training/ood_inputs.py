"""Out-of-distribution inputs for the uncertainty regulariser: noisy training images, or rows of another data set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import bayesify as by
from bayesify.lab.data import Data, Images, load
from bayesify.lab.recipes import DataPart, Recipe, RecipeError
from bayesify.lab.runs import expand_path


def ood_inputs_of(recipe: Recipe, data: Data) -> Callable[[Tensor], Tensor] | None:
    """A function from a raw batch to prepared out-of-distribution inputs, or None without a regulariser."""
    part = recipe.training.regulariser
    if part is None:
        return None
    if part.data is not None:
        return _rows_of_other_data(part.data, data)
    inputs = data.inputs
    if not isinstance(inputs, Images):
        raise RecipeError("training.regulariser adds noise to images; for other inputs set training.regulariser.data")
    return lambda raw: inputs.normalise(by.uniform_noise(inputs.unit(raw), part.epsilon))


def _rows_of_other_data(part: DataPart, data: Data) -> Callable[[Tensor], Tensor]:
    """As many random rows of another data set as the batch has, prepared like the training data."""
    other = load(part.name, path=part.path and expand_path(part.path), validation=0, limit=part.limit, **part.options)
    rows = other.train if len(other.train) else other.test
    shape = tuple(rows.raw(torch.arange(1)).shape[1:])
    own = tuple(data.train.raw(torch.arange(1)).shape[1:])
    if shape != own:
        raise RecipeError(f"training.regulariser.data={part.name!r} has inputs of shape {shape}; expected {own}")

    def random_rows(raw: Tensor) -> Tensor:
        chosen = torch.randint(len(rows), (len(raw),))
        return data.inputs.prepare(rows.raw(chosen).to(raw.device))

    return random_rows
