"""`recipe_for`: a recipe for a file or a folder of data; what nobody has asked for is chosen, and told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from bayesify.lab.data import Arrays, Data, Images, Labels, Masks, Series
from bayesify.lab.data.recognise import recognise
from bayesify.lab.default_choices import Default
from bayesify.lab.from_recipe import load_data
from bayesify.lab.models.user_networks import is_user_network
from bayesify.lab.recipes import Recipe, apply_overrides

CALIBRATION = 0.1
ENOUGH_TO_CALIBRATE = 200
"""With at least so many rows, a tenth of them is kept for conformal prediction."""
SMALL = 2_000
"""With fewer training rows than this, batches are small, for enough steps in few epochs."""
LEAST_STEPS, EPOCHS, MOST_EPOCHS = 600, 30, 200


class Cost(NamedTuple):
    """What fits into some minutes of one core: so many times may a row be seen in training."""

    rows: float

    def epochs(self, rows: int, batch_size: int) -> int:
        """The number of epochs: 30, more for few rows, fewer for many.

        >>> cost = Cost(3_000_000)
        >>> [cost.epochs(rows, 128) for rows in (200, 20_000, 10**6)]
        [200, 30, 3]
        """
        steps = ceil(rows / batch_size)
        wanted = min(max(EPOCHS, ceil(LEAST_STEPS / steps)), MOST_EPOCHS)
        return max(1, min(wanted, round(self.rows / rows)))


def recipe_for(
    data: str | Path,
    *,
    target: str | None = None,
    changes: Mapping[str, Any] | Iterable[str] = (),
    trust: str | Path | None = None,
) -> Recipe:
    """Make a recipe for data, with everything chosen that `changes` leave out.

    Args:
        data: A table (.csv, .tsv, .parquet), an .npz file, a folder with a folder of images for each class, a data set
            of Hugging Face (`owner/name`, `hf:name` or a local folder), or one of `lab.data.DATASETS`.
        target: The column, or array, to predict; tables need it.
        changes: What to do differently: nested values as in a recipe, or changes such as `"training.epochs=5"`.
        trust: A Python file of yours that `model.name` may name a function of. It runs.

    Returns:
        The recipe; its `choices` say what was chosen and why, and how to change it.

    Raises:
        DataError: If the data can't be used; the message has all problems that were found.
        RecipeError: If a change is not valid.
    """
    given = dict(changes) if isinstance(changes, Mapping) else apply_overrides({}, changes)
    part = given.get("data") or {}
    found = recognise(data, target, part)
    values = {**given, "data": {**part, **found.values}}
    loaded = load_data(Recipe.of({"data": values["data"], **({"seed": given["seed"]} if "seed" in given else {})}))
    values["data"] = {**_splitting(loaded), **values["data"]}
    kept = len(loaded.train) - _rows(values["data"].get("calibration", 0), len(loaded.train))
    values["data"].setdefault("batch_size", 32 if kept < SMALL else 128)
    network, cost = _network(loaded)
    if not isinstance(given.get("model"), str):
        values["model"] = _changed(network, given.get("model") or {})
    training = given.get("training") or {}
    values["training"] = {"epochs": cost.epochs(kept, values["data"]["batch_size"]), **training}
    recipe = Recipe.of(values, trust=trust)
    return recipe.with_choices([*found.choices, *_told(recipe, loaded, kept)])


def _splitting(data: Data) -> dict[str, Any]:
    rows = len(data.train) + len(data.validation) + len(data.test)
    if isinstance(data.targets, (Labels, Masks)):  # for which there are no sets or intervals
        return {}
    return {"calibration": CALIBRATION} if rows >= ENOUGH_TO_CALIBRATE else {}


def _rows(share: float | int, rows: int) -> int:
    return share if isinstance(share, int) else round(share * rows)


def _network(data: Data) -> tuple[dict[str, Any], Cost]:
    """The network for a kind of inputs, and how often it can see a row in some minutes."""
    inputs = data.inputs
    if isinstance(inputs, Images):
        side = min(inputs.shape[1:])
        channels = [32, 64] if side < 16 else [32, 64, 128]
        pixels = inputs.shape[1] * inputs.shape[2]
        if isinstance(data.targets, Masks):
            return {"name": "unet"}, Cost(20_000 * max(1024 / pixels, 0.05))
        return {"name": "cnn", "options": {"channels": channels}}, Cost(60_000 * max(1024 / pixels, 0.05))
    if isinstance(inputs, (Arrays, Series)) and len(inputs.shape) == 2:
        return {"name": "lstm"}, Cost(5_000_000 / inputs.shape[0])
    return {"name": "mlp", "options": {"hidden": [64, 64]}}, Cost(3_000_000)


def _changed(network: dict[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen network with other options, or another one by its name."""
    if "name" in model:
        return dict(model)
    return {**network, **model, "options": {**network.get("options", {}), **model.get("options", {})}}


def _told(recipe: Recipe, data: Data, kept: int) -> list[Default]:
    """What was chosen about splits, network, method and training."""
    part, model = recipe.data, recipe.model
    sizes = {"to train": kept, "to calibrate sets or intervals": len(data.train) - kept}
    sizes |= {"to validate": len(data.validation), "to test": len(data.test)}
    split = ", ".join(f"{rows:,} {what}" for what, rows in sizes.items() if rows)
    shape = "x".join(map(str, data.inputs.shape))
    options = ", ".join(f"{key} {value}" for key, value in model.options.items())
    outputs = f"{data.targets.count} output{'s' * (data.targets.count > 1)}"
    network = f"{model.name}{f' ({options})' if options else ''} for inputs of {shape}, {outputs}"
    others = "model.options.hidden=[100]" if model.name == "mlp" else "model.name=resnet8"
    others = "model.options.width=32" if model.name == "unet" else others
    others = "model.options.hidden=128" if model.name == "lstm" else others
    if is_user_network(model.name):
        network, others = f"yours, which gets inputs of {shape} and returns {outputs}", ""
    batches = ceil(kept / part.batch_size)
    epochs = recipe.training.epochs
    return [
        Default("rows", split, "data.validation=0.2"),
        Default("network", network, others),
        Default("method", f"{recipe.method.name}, trained from scratch", "method=IBNN"),  # type: ignore[union-attr]
        Default("training", f"{epochs} epochs of {batches:,} batches of {part.batch_size} rows", "training.epochs=60"),
    ]
