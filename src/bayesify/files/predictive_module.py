"""A Bayesian model's predictive distribution as one module: inputs to named outputs, ready to be traced."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.batches import chosen_rows, keys_with_rows, output_of, row_count, run
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.errors import BayesifyError
from bayesify.layers import bayesian_layers
from bayesify.layers.base import unwrapped
from bayesify.layers.call_scope import Scope
from bayesify.layers.dropout import FrozenDropout
from bayesify.layers.network_state import copy_of
from bayesify.prediction.likelihood import Likelihood
from bayesify.prediction.results import BinaryPrediction, Classification, Prediction, Regression
from bayesify.prediction.samples import are_points, methods_of

Named = dict[str, Tensor]
OUTPUTS: dict[type[Prediction], tuple[str, ...]] = {
    Classification: ("log_probs", "entropy", "epistemic"),
    BinaryPrediction: ("log_probs", "log_not_probs", "entropy", "epistemic"),
    Regression: ("mean", "std", "epistemic_std", "aleatoric_std"),
}
"""What a file gives for each kind of prediction, in this order."""


@dataclass(frozen=True)
class Inputs:
    """An example of a network's inputs by name: one tensor, several positional ones, or keyword arguments."""

    named: dict[str, Any]
    form: type
    """What the batch is: a dict of keyword arguments, a tuple of positional ones, or else one input."""
    batch_dim: int
    keys: tuple[str, ...] = ()
    """Of several inputs, those that have a row for each row of the batch."""

    @classmethod
    def of(cls, network: nn.Module, example: Any, batch_dim: int, prepare: Callable[[Any], Any] | None) -> Inputs:
        """The inputs that an example batch has; at least two rows, as a size of 1 could not vary in a graph."""
        if isinstance(example, Mapping):
            inputs = cls(dict(example), dict, batch_dim)
        elif isinstance(example, tuple):
            parameters = inspect.signature(network.forward).parameters.values()
            given = [p.name for p in parameters if p.kind < p.VAR_POSITIONAL]
            names = [given[i] if i < len(given) else f"input_{i}" for i in range(len(example))]
            inputs = cls(dict(zip(names, example, strict=True)), tuple, batch_dim)
        else:
            inputs = cls({"x": example}, type(example), batch_dim)
        bad = [name for name in inputs.named if not isinstance(name, str) or not name.isidentifier()]
        if bad or not inputs.rows:
            raise BayesifyError(
                f"export: the example is {f'named {bad[0]!r}' if bad else 'without rows'}; expected a tensor, a tuple "
                "of positional inputs or a dict of keyword arguments, with a batch of rows"
            )

        def run_some(named: Mapping[str, Any]) -> Tensor:
            batch = inputs.batch(named)
            with torch.no_grad():
                return call_network(network, prepare(batch) if prepare else batch)

        inputs = replace(inputs, keys=keys_with_rows(inputs.named, batch_dim, run_some))
        return inputs if inputs.rows > 1 else inputs.with_rows(2)

    @property
    def rows(self) -> int:
        """The number of rows of the example."""
        return row_count(self.named[self.keys[0]] if self.keys else self.named, self.batch_dim)

    def batch(self, named: Mapping[str, Any] | None = None) -> Any:
        """A batch of the example's form, from a value for each name; the example itself by default."""
        named = self.named if named is None else {name: named[name] for name in self.named}
        return named if self.form is dict else tuple(named.values()) if self.form is tuple else named["x"]

    def with_rows(self, count: int) -> Inputs:
        """The same with another number of rows, which repeat those of the example."""
        index = torch.arange(count) % self.rows
        return replace(self, named=chosen_rows(self.named, index, self.rows, self.batch_dim, self.keys))

    def dynamic_shapes(self) -> dict[str, Any]:
        """Which dimensions vary with the number of rows, as `torch.export` takes it."""
        more, batch = self.with_rows(self.rows + 1).named, torch.export.Dim("batch")
        return {name: _dynamic(value, more[name], batch) for name, value in self.named.items()}

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example as positional and keyword arguments."""
        return ((), self.named) if self.form is dict else (tuple(self.named.values()), {})


def _dynamic(value: Any, other: Any, batch: Any) -> Any:
    if isinstance(value, Tensor):
        return {
            dim: batch for dim, sizes in enumerate(zip(value.shape, other.shape, strict=True)) if sizes[0] != sizes[1]
        }
    if isinstance(value, Mapping):
        return {key: _dynamic(part, other[key], batch) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_dynamic(*parts, batch) for parts in zip(value, other, strict=True)]
    return None


def call_network(network: nn.Module, batch: Any) -> Tensor:
    """A network's output for a batch in the form of an example: a tuple has its positional arguments."""
    return output_of(network(*batch)) if isinstance(batch, tuple) else run(network, batch)


class Draws(nn.Module):
    """S draws of a model, frozen or made inside.

    Frozen are the draws of a seed: networks that share what no draw changes; masks of kept dropout are constants.
    Without a seed, a copy of the model draws its own noise in each of S calls; draw s uses component s modulo K.
    """

    def __init__(self, model: nn.Module, samples: int, seed: int | None) -> None:
        super().__init__()
        self.samples, self.scopes, self.starts = samples, list[Scope](), torch.arange(samples)
        if seed is not None:
            self.networks = nn.ModuleList(DrawnNetwork(model).write_draw(seed, index) for index in range(samples))
            for module in self.modules():
                if isinstance(module, FrozenDropout):
                    module.constants = {}
            return
        if are_points(methods_of(model)):
            raise BayesifyError(
                "draws='inside': the draws of this model are its components, without noise, so there is nothing to "
                "draw; use draws='frozen'"
            )
        DrawnNetwork(model)  # which refuses models that have no draws
        self.networks = nn.ModuleList([copy_of(unwrapped(model)).eval().requires_grad_(False)])
        self.scopes = list({layer.scope: None for layer in bayesian_layers(self.networks).values()})

    def outputs(self, call: Callable[[nn.Module], Tensor]) -> list[Tensor]:
        """The output of each draw."""
        found = []
        for index in range(self.samples):
            for scope in self.scopes:
                scope.start = self.starts[index : index + 1]
            found.append(call(self.networks[index % len(self.networks)]))
        return found


class PredictiveModule(nn.Module):
    """Prepares inputs, calls the network with each draw, and averages what its outputs mean.

    Its arguments have the names of the inputs; it returns a tuple of tensors, whose names are in `outputs`.
    """

    def __init__(
        self,
        draws: Draws,
        likelihood: Likelihood,
        inputs: Inputs,
        prepare: Callable[[Any], Any] | None = None,
        finish: Callable[[Named], Named] | None = None,
    ) -> None:
        super().__init__()
        self.draws, self.likelihood = draws, copy.deepcopy(likelihood).eval().requires_grad_(False)
        self.inputs, self.prepare, self.finish = inputs, prepare, finish
        self.outputs: tuple[str, ...] = ()
        """The names of the outputs, known after a call."""

        def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            return self.predictive(inputs.batch(dict(zip(inputs.named, args, strict=False)) | kwargs))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in inputs.named])
        forward.__signature__ = signature  # type: ignore[attr-defined]  # torch.export names inputs by it
        self.forward = forward

    def predictive(self, batch: Any) -> tuple[Tensor, ...]:
        """The outputs for a batch."""
        batch = self.prepare(batch) if self.prepare else batch
        outputs = torch.stack(self.draws.outputs(lambda network: call_network(network, batch)))
        accumulator = self.likelihood.accumulator(False)
        self.likelihood.add(accumulator, outputs)
        named = self.finished(accumulator.result())
        self.outputs = tuple(named)
        return tuple(named.values())

    def finished(self, prediction: Prediction) -> Named:
        """The outputs of a prediction by name, as the file gives them."""
        for kind, names in OUTPUTS.items():
            if isinstance(prediction, kind):
                named = {name: getattr(prediction, name) for name in names}
                return self.finish(named) if self.finish else named
        raise BayesifyError(
            f"export: the likelihood gives a {type(prediction).__name__}; expected a classification, a binary "
            "prediction or a regression"
        )
