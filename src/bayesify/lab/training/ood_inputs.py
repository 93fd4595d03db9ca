"""Out-of-distribution inputs for the uncertainty regulariser: noisy training images, rows of other data, or both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import bayesify as by
from bayesify.lab.data import Data, Examples, Images, Inputs, load, step
from bayesify.lab.data.resized_images import ResizedImages
from bayesify.lab.recipes import DataPart, Recipe, RecipeError, RegulariserPart
from bayesify.lab.runs import expand_path


def ood_inputs_of(recipe: Recipe, data: Data) -> Callable[[Tensor], Tensor] | None:
    """A function from a raw batch to prepared out-of-distribution inputs, or None without a regulariser."""
    part, inputs = recipe.training.regulariser, data.inputs
    if part is None:
        return None
    _require_images_for_noise(part, inputs)
    others = None if part.data is None else _other_rows(part.data, data, recipe)
    steps = [] if part.data is None else [step(each) for each in part.data.augment]

    def ood_inputs(raw: Tensor) -> Tensor:
        rows = max(round(part.share * len(raw)), 1)
        noisy = rows if others is None else _rounded_at_random(part.share_of_noise * rows)
        found = []
        if noisy:
            assert isinstance(inputs, Images)
            found.append(inputs.normalise(by.uniform_noise(inputs.unit(raw[:noisy]), part.epsilon)))
        if others is not None and noisy < rows:
            given = others.raw(torch.randint(len(others), (rows - noisy,))).to(raw.device)
            for each in steps:
                given = each(given)
            found.append(inputs.prepare(given))
        return torch.cat(found)

    return ood_inputs


def _require_images_for_noise(part: RegulariserPart, inputs: Inputs) -> None:
    """Raise if there would be noise, but no images to add it to."""
    if isinstance(inputs, Images) or not part.share_of_noise:
        return
    if part.data is None:
        raise RecipeError("training.regulariser adds noise to images; for other inputs set training.regulariser.data")
    raise RecipeError(f"training.regulariser.noise={part.noise:g}: noise is added to images only; set it to 0")


def _other_rows(part: DataPart, data: Data, recipe: Recipe) -> Examples:
    """The rows of another data set, with inputs as the network takes them before they are prepared."""
    path = part.path and expand_path(part.path)
    other = load(part.name, path=path, validation=0, limit=part.limit, download=part.download, **part.options)
    rows = other.train if len(other.train) else other.test
    where = f"training.regulariser.data={part.name!r}"
    if not len(other.train) and any(_is_same(part, each) for each in recipe.evaluation.ood):
        raise RecipeError(
            f"{where} has test rows only, which training would see and evaluation.ood then detect; leave it out of one "
            "of them"
        )
    if isinstance(data.inputs, Images) != isinstance(other.inputs, Images):
        raise RecipeError(f"{where} has {other.inputs.to_dict()['kind']}; expected {data.inputs.to_dict()['kind']}")
    if isinstance(data.inputs, Images):
        return ResizedImages(rows, data.inputs.shape)
    if part.augment:
        raise RecipeError(f"{where} has no images to augment; leave out training.regulariser.data.augment")
    shape, own = (tuple(each.raw(torch.arange(1)).shape[1:]) for each in (rows, data.train))
    if shape != own:
        raise RecipeError(f"{where} has inputs of shape {shape}; expected {own}")
    return rows


def _is_same(part: DataPart, other: str | DataPart) -> bool:
    """Whether a set to evaluate on is the data set of a part."""
    return other == part.name if isinstance(other, str) else (other.name, other.path) == (part.name, part.path)


def _rounded_at_random(number: float) -> int:
    """A number rounded up as often as its fraction says, so that its mean stays."""
    return int(number + float(torch.rand(())))
