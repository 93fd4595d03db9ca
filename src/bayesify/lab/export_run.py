"""`export_run`: a run's model as a file that takes raw inputs and needs no bayesify, with a model card beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import bayesify as by
from bayesify.files.export import FORMATS
from bayesify.lab.data import Columns, Images, Inputs, Reals, Series
from bayesify.lab.model_card import InputText, model_card
from bayesify.lab.recipes import AdaptivePart
from bayesify.lab.run_files import write_file
from bayesify.lab.runs import Run
from bayesify.layers import bayesian_layers
from bayesify.prediction.samples import methods_of, number_of_draws

Named = dict[str, Tensor]


def export_run(
    run: Run,
    out: str | Path,
    *,
    samples: int | None = None,
    seed: int = 0,
    draws: Literal["frozen", "inside"] = "frozen",
) -> Path:
    """Write a run's model to a file, and a model card beside it.

    The file takes raw inputs, as the data set has them: their preparation is part of it. It gives real targets in their
    own units.

    Args:
        run: A run that has finished training.
        out: The file: `.onnx`, `.pt2` or `.aoti.pt2`, as in `by.export`.
        samples: The number of draws; the recipe's by default, and 20 or so where the recipe's is adaptive.
        seed: The seed of the draws.
        draws: "frozen" or drawn "inside" the file at each call, as in `by.export`.

    Returns:
        The model card, `model.card.md` for `model.onnx`.
    """
    out, trained = Path(out), run.load()
    own = trained.recipe.evaluation.samples
    samples = own if samples is None and not isinstance(own, AdaptivePart) else samples
    model = trained.model
    if not bayesian_layers(model):  # a plain network is an ensemble of one
        model = by.convert(copy.deepcopy(model), by.Ensemble(1))
    count = number_of_draws(methods_of(model), samples)
    example, prepare, text = raw_inputs(trained.inputs)
    targets = trained.targets
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    how = f"{count} draws of seed {seed}, frozen" if draws == "frozen" else f"{count} new draws at each call"
    words = model_card(run, trained, out.name, text, how)  # first, as it reads files that may be damaged
    by.export(
        model,
        out,
        example.to(device),
        samples=count,
        seed=seed,
        likelihood=trained.likelihood,
        draws=draws,
        prepare=prepare,
        finish=in_own_units(targets) if isinstance(targets, Reals) else None,
    )
    card = out.with_name(out.name.removesuffix(next(each for each in FORMATS if out.name.endswith(each))) + ".card.md")
    write_file(card, words)
    return card


def raw_inputs(inputs: Inputs) -> tuple[Tensor, Callable[[Tensor], Tensor], InputText]:
    """Two raw inputs of some kind, their preparation, and both in words."""
    noise = torch.Generator().manual_seed(0)
    if isinstance(inputs, Images):
        example = torch.randint(256, (2, *inputs.shape), generator=noise, dtype=torch.uint8)
        text = InputText("uint8", inputs.shape, "pixels from 0 to 255, of the size that the network was trained on")
        return example, inputs.prepare, text
    if isinstance(inputs, Columns):
        return _raw_columns(inputs, noise)
    if isinstance(inputs, Series):
        example = torch.randn(2, *inputs.raw_shape, generator=noise)
        example[:, ::2] = torch.nan
        text = InputText("float32", inputs.raw_shape, "series (time, variables) in their own units; NaN: not measured")
        return example, _series_preparation(inputs), text
    example = torch.randn(2, *inputs.raw_shape, generator=noise)
    return example, inputs.prepare, InputText("float32", inputs.raw_shape, "numbers in their own units")


def _series_preparation(series: Series) -> Callable[[Tensor], Tensor]:
    """What `Series.prepare` does, step by step in time, as ONNX has no running maximum."""

    def prepare(x: Tensor) -> Tensor:
        steps = [x[:, 0]]
        for step in x.unbind(1)[1:]:
            steps.append(torch.where(step.isnan(), steps[-1], step))
        low, high, mean, std = (x.new_tensor(each) for each in (series.low, series.high, series.mean, series.std))
        values = (torch.stack(steps, 1).clamp(low, high) - mean) / std
        return torch.cat([torch.where(values.isnan(), 0.0, values), (~x.isnan()).to(x.dtype)], -1)

    return prepare


def _raw_columns(columns: Columns, noise: torch.Generator) -> tuple[Tensor, Callable[[Tensor], Tensor], InputText]:
    """Rows of a table: numbers in their own units, then codes of categories; float64, as some numbers are large."""
    n = len(columns.numeric)
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (columns.mean, columns.std))
    numbers = mean + std * torch.randn(2, n, generator=noise, dtype=torch.float64)
    last = torch.tensor([len(words) - 1.0 for words in columns.categories], dtype=torch.float64)

    def prepare(x: Tensor) -> Tensor:
        values = (x[:, :n].double() - mean.to(x.device)) / std.to(x.device)
        codes = x[:, n:].double()
        is_known = (codes >= 0) & (codes <= last.to(x.device)) & (codes == codes.floor())
        prepared = columns.prepare(torch.cat([values, torch.where(is_known, codes, -1.0)], 1))
        if columns.missing == "error":
            prepared = torch.where(values.isnan().any(1, keepdim=True), torch.nan, prepared)
        if columns.unseen == "zeros" or not columns.categories:
            return prepared
        return torch.where(is_known.all(1, keepdim=True), prepared, torch.nan)

    missing = (
        "a missing one, NaN, makes the outputs of its row NaN"
        if columns.missing == "error"
        else "a missing one is NaN"
        if columns.missing == "indicator"
        else "a missing one, NaN, counts as the training mean"
    )
    unseen = "no category" if columns.unseen == "zeros" else "an error, which makes the outputs of its row NaN"
    text = InputText(
        "float64",
        columns.raw_shape,
        f"one row of the table: numbers in their own units ({missing}), then the number of each category, counted from "
        f"0, in the order below (another number is {unseen})",
        tuple(columns.numeric),
        dict(zip(columns.categorical, columns.categories, strict=True)),
    )
    return torch.cat([numbers, torch.stack([torch.zeros_like(last), last])], 1), prepare, text


def in_own_units(targets: Reals) -> Callable[[Named], Named]:
    """Converts a mean and standard deviations to the units of the targets."""

    def finish(named: Named) -> Named:
        mean = named["mean"]
        stds = {name: targets.restore(mean, value)[1] for name, value in named.items() if name != "mean"}
        return {"mean": targets.restore(mean, mean)[0], **stds}

    return finish
