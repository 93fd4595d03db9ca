"""A trained model as `run.load()` returns it: the network with its likelihood, preprocessing and recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.batches import as_tensors
from bayesify.batches import run as output_of
from bayesify.errors import BayesifyError
from bayesify.lab.data import Columns, Examples, Images, Inputs, Targets, TensorExamples, loader
from bayesify.lab.data.errors import import_optional
from bayesify.lab.data.frame import Frame, arrow_frame, chosen_columns
from bayesify.lab.metrics import scores
from bayesify.lab.recipes import AdaptivePart, Recipe
from bayesify.layers import bayesian_layers
from bayesify.prediction.likelihood import Likelihood
from bayesify.prediction.results import Prediction


class EvaluationError(BayesifyError):
    """A model that can't be evaluated, or inputs that it can't predict."""


@dataclass(frozen=True)
class Trained:
    """A trained model with everything that prediction needs.

    `by.predict(trained, data)` is the same as `trained.predict(data)`.

    Attributes:
        model: The network, Bayesian or plain. It takes prepared inputs: `trained.inputs.prepare(raw)`.
        likelihood: What the network's outputs mean.
        inputs: How raw inputs are prepared for the network.
        targets: The names of the classes, or the units of the real targets.
        recipe: The recipe that the model was trained with.
        familiarity: How familiar inputs are; None for runs of versions that did not fit it.
    """

    model: nn.Module
    likelihood: Likelihood
    inputs: Inputs
    targets: Targets
    recipe: Recipe
    familiarity: by.Familiarity | None = None

    def predict(
        self,
        data: Any,
        samples: int | by.Adaptive | None = None,
        *,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> Prediction:
        """Predict raw inputs batch by batch.

        Args:
            data: A file or folder, or a list of them; a table: a DataFrame, a pyarrow table, a dict of columns or a
                list of rows, each a dict; a batch of raw inputs as a tensor, an array or nested lists, such as `uint8`
                images; or `Examples`, such as `run.data().test`. They are prepared here as the training data were.
            samples: The number of draws from the posterior, or a `by.Adaptive` rule. By default the recipe's
                `evaluation.samples`, or else the default of `by.predict`. A plain network is called once.
            seed: The seed of the draws.
            batch_size: Inputs per batch; by default the recipe's `evaluation.batch_size`.

        Returns:
            The prediction, on the CPU, with its familiarity and doubt if the run has them. Real targets are
            standardised; `trained.targets.restore` converts a mean and a standard deviation to the target's own units.

        Raises:
            EvaluationError: If the inputs don't fit the model, or if predictions are NaN or infinite.
        """
        options = self.recipe.evaluation
        batches = self.prepared_batches(self._examples(data), batch_size or options.batch_size)
        if bayesian_layers(self.model):
            own = options.samples.rule() if isinstance(options.samples, AdaptivePart) else options.samples
            draws = own if samples is None else samples
            found: Prediction = by.predict(
                self.model, batches, draws, seed=seed, likelihood=self.likelihood, familiarity=self.familiarity
            )
        else:
            found = _plain_prediction(self.model, self.likelihood, batches, self.familiarity)
        found = _on_cpu(found)
        _require_finite(found, self.recipe.model.name)
        return found

    def __repr__(self) -> str:
        network, method = self.recipe.model.name, self.recipe.method.name  # type: ignore[union-attr]
        inputs, targets = type(self.inputs).__name__.lower(), type(self.targets).__name__.lower()
        return f"Trained({network} with {method}; {inputs} {self.inputs.shape}, {self.targets.count} {targets})"

    def _examples(self, data: Any) -> Examples:
        """The data as examples; a batch of raw inputs gets targets that nothing reads."""
        if isinstance(data, Examples):
            return data
        if paths := _paths(data):
            return self.inputs.read(paths)[0]
        if isinstance(self.inputs, Columns):
            return self.inputs.encode_new(_frame(data, self.inputs))
        x = as_tensors(data, None, None)
        if not isinstance(x, Tensor):
            raise EvaluationError(
                f"{type(data).__name__}: expected a path, a tensor or array of raw inputs, or Examples, such as "
                "run.data().test"
            )
        if tuple(x.shape[1:]) != self.inputs.raw_shape:
            raise EvaluationError(
                f"inputs of shape {tuple(x.shape)}: expected a batch of raw inputs, (N, "
                f"{', '.join(map(str, self.inputs.raw_shape))})"
            )
        if isinstance(self.inputs, Images) and x.is_floating_point() and len(x) and (x.min() < 0 or x.max() > 1):
            raise EvaluationError(
                f"pixels from {float(x.min()):.3g} to {float(x.max()):.3g}: expected raw ones, bytes or floats from 0 "
                "to 1, which are normalised here; inputs that are normalised already are for trained.model"
            )
        if isinstance(self.inputs, Images) and not x.is_floating_point() and x.dtype != torch.uint8:
            if len(x) and (x.min() < 0 or x.max() > 255):
                raise EvaluationError(f"pixels from {int(x.min())} to {int(x.max())}: expected bytes, 0 to 255")
            x = x.to(torch.uint8)
        return TensorExamples(x, torch.full((len(x),), -1))

    def prepared_batches(self, examples: Examples, batch_size: int) -> Iterator[Tensor]:
        """The inputs of examples, batch by batch, as the network takes them, on its device and in its precision."""
        like = next(self.model.parameters(), torch.zeros(()))
        for x, _ in loader(examples, batch_size, num_workers=self.recipe.data.workers):
            prepared = self.inputs.prepare(x.to(like.device))
            yield prepared.to(like.dtype) if prepared.is_floating_point() else prepared


def predictive(
    trained: Trained,
    examples: Any,
    *,
    samples: int | by.Adaptive | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> Prediction:
    """Predict raw inputs with a trained model: another name for `trained.predict`.

    Args:
        trained: What `run.load()` returned.
        examples: What `trained.predict` takes.
        samples: The number of draws, or a `by.Adaptive` rule; the recipe's by default.
        seed: The seed of the draws.
        batch_size: Inputs per batch; the recipe's by default.

    Returns:
        The prediction, on the CPU.
    """
    if not isinstance(trained, Trained):
        raise EvaluationError(f"predictive: expected what run.load() returns, got {type(trained).__name__}")
    return trained.predict(examples, samples, seed=seed, batch_size=batch_size)


def _paths(data: Any) -> list[str | Path]:
    """The paths that data are; none if they are something else."""
    several = data if isinstance(data, (list, tuple)) else [data]
    return list(several) if several and all(isinstance(each, (str, Path)) for each in several) else []


def _frame(data: Any, columns: Columns) -> Frame:
    """A DataFrame, a pyarrow table, a dict of columns or a list of rows as the frame of a model's columns."""
    pa = import_optional("pyarrow", "reading tables")
    is_rows = isinstance(data, list) and bool(data) and all(isinstance(row, Mapping) for row in data)
    is_table = isinstance(data, (Mapping, pa.Table)) or hasattr(data, "__arrow_c_stream__") or hasattr(data, "columns")
    if not (is_rows or is_table):
        raise EvaluationError(
            f"{type(data).__name__}: this model was trained on a table, whose columns have names: expected a path, a "
            "DataFrame, a dict of columns or a list of dicts"
        )
    try:
        table = pa.Table.from_pylist(data) if is_rows else data if isinstance(data, pa.Table) else pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise EvaluationError(f"{type(data).__name__}: can't be read as a table ({error})") from error
    if not table.num_rows:
        raise EvaluationError("nothing to predict: the table has no rows")
    wanted = chosen_columns(table, f"the {type(data).__name__}", [*columns.numeric, *columns.categorical])
    return arrow_frame(wanted, f"the {type(data).__name__}")


def _plain_prediction(
    model: nn.Module, likelihood: Likelihood, batches: Iterator[Tensor], familiarity: by.Familiarity | None
) -> Prediction:
    """The predictive distribution of a single network, as if of one draw."""
    was_training, parts = model.training, []
    model.eval()
    try:
        with torch.no_grad():
            watch = None if familiarity is None else familiarity.watch(model)
            for x in batches:
                p: Prediction = likelihood.predictive(output_of(model, x)[None], keep=likelihood.keeps_draws)
                parts.append(p if watch is None else watch.add(p, x))
    finally:
        model.train(was_training)
    if not parts:
        raise EvaluationError("nothing to predict: there are no examples")
    return type(parts[0]).join(parts)


def _on_cpu(p: Prediction) -> Prediction:
    """The same prediction with all its tensors on the CPU."""
    values = {field.name: getattr(p, field.name) for field in fields(p)}
    moved: dict[str, Any] = {name: value.cpu() for name, value in values.items() if isinstance(value, Tensor)}
    return replace(p, **moved)


def _require_finite(p: Prediction, network: str) -> None:
    """Raise if a prediction is NaN or infinite."""
    for value in scores(p).values():
        if bad := int((~torch.isfinite(value)).sum()):
            raise EvaluationError(
                f"{network}: {bad} of {len(value)} predictions are NaN or infinite; its training diverged (lower "
                "training.lr, or set training.clip), or these inputs are far outside its range"
            )
