"""The description of a case, as plain values: a network, a batch, methods, options of `convert`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.batches import call_with
from bayesify.methods import METHODS
from fuzz.around import AROUND, Around
from fuzz.networks import BLOCKS, WORDS, Signal
from fuzz.outputs import FORMS, Form

HEADS = ("head", "head in training", "reads")
ODD = ("mixes_rows", "mixes_in_training", "reads_weights", "keeps_results", "jumps")
MOST_FEATURES = 2000
"""A network with more features is none that bayesify is asked about: its head would fill the memory."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Network(nn.Sequential):
    """The blocks one after the other; `shift` is the same for all rows, `gain` has a number for each."""

    def __init__(self, blocks: list[nn.Module], taken: Signal, returned: Signal, form: str, beside: str) -> None:
        super().__init__(*blocks)
        self.blocks, self.form, self.beside = len(blocks), form, beside
        self.row_dim, self.returned = taken.row_dim, returned
        self.shift_shape = (-1, *[1] * (len(taken.shape) - 1)) if taken.kind == "maps" else (-1,)
        if beside in HEADS:
            self.head = LastLinear(returned)

    def forward(self, x: Tensor, shift: Tensor | None = None, gain: Tensor | None = None) -> Any:
        x = x if shift is None else x + shift.reshape(self.shift_shape)
        x = x if gain is None else x * gain.reshape([len(gain) if d == self.row_dim else 1 for d in range(x.dim())])
        features = x
        for module in list(self)[: self.blocks]:
            features, x = x, module(x)
        return FORMS[self.form].make(x, self._other(features, x) if self.beside else x)

    def _other(self, features: Tensor, y: Tensor) -> Tensor | None:
        """What is returned beside the output."""
        if self.beside == "head in training" and not self.training:
            return None
        made: dict[str, Callable[[], Tensor]] = {
            "features": lambda: features,
            "loss": lambda: y.square().mean(),
            "transposed": lambda: y.transpose(self.returned.row_dim, -1),
            "head": lambda: self.head(y),
            "head in training": lambda: self.head(y),
            "mixed": lambda: y - y.mean(self.returned.row_dim, keepdim=True),
            "reads": lambda: self.head(y) / (1 + self.head.layer.weight.norm()),
        }
        return made[self.beside]()


class LastLinear(nn.Module):
    """A linear layer on the features, wherever they are."""

    def __init__(self, signal: Signal) -> None:
        super().__init__()
        if signal.features > MOST_FEATURES:
            raise RuntimeError(f"a head of {signal.features} features is too large to be tried")
        self.dim = 1 if signal.kind == "maps" else -1
        self.layer = nn.Linear(signal.features, signal.features)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.transpose(self.dim, -1)).transpose(self.dim, -1))


class Softmax(by.Categorical):
    """Probabilities of any number of classes, of a single one too, which `by.Categorical` refuses."""

    def _logits(self, output: Tensor, stacked: bool = False) -> Tensor:
        return output


@dataclass(frozen=True)
class Case:
    """A network, a batch, and how to convert the network: everything that a run depends on, as plain values."""

    kind: str
    shape: list[int]
    blocks: list[list[Any]]
    methods: list[list[Any]]
    """(key, method, options) each: a single one with the key None, or the entries of a dict, where a method may be
    None."""
    rows: int = 5
    form: str = "tensor"
    batch_dim: int = 0
    tells_batch_dim: bool = True
    """Whether `convert` is told the dimension of the batch."""
    gives_example: bool = False
    """Whether `convert` is given a batch."""
    keep_dropout: bool = False
    dtype: str = "float64"
    seed: int = 0
    returns: str = "tensor"
    """The form of the output."""
    beside: str = "features"
    """What is in it besides the tensor that matters."""
    around: str = ""
    """The network around the one with the blocks, which is a converted part then."""
    first: str = ""
    """What is special about a call before: the model's other mode, or rows that are equal, or zero, or fewer."""

    def network(self) -> nn.Module:
        """The network with its first weights: always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            modules, signals = self._modules()
            network: nn.Module = Network(modules, self.input, signals[-1], self.returns, self.beside_output)
            network = network.to(DTYPES[self.dtype])
            for tensor in network.parameters():
                if tensor.dim() == 1:  # those of norms are all 1 or 0 at first
                    tensor.data += 0.3 * torch.randn_like(tensor)
        if self.around:
            return AROUND[self.around](network, self.returns, signals[-1].row_dim)
        return network

    @property
    def input(self) -> Signal:
        """What the network takes."""
        return Signal(self.kind, tuple(self.shape), self.batch_dim)

    def _modules(self) -> tuple[list[nn.Module], list[Signal]]:
        signals, modules = [self.input], []
        for name, options in self.blocks:
            module, signal = BLOCKS[name].build(signals[-1], **options)
            modules.append(module)
            signals.append(signal)
        return modules, signals

    @cached_property
    def _signals(self) -> list[Signal]:
        with torch.random.fork_rng(devices=[]):
            return self._modules()[1]

    @property
    def output(self) -> Signal:
        """What the network returns."""
        return self._signals[-1]

    @property
    def output_form(self) -> Form:
        """The form of what the network with the blocks returns."""
        return FORMS[self.returns]

    @property
    def beside_output(self) -> str:
        """What it returns beside the output."""
        return self.beside if self.returns != "tensor" else ""

    @property
    def misleads_about_rows(self) -> bool:
        """Whether the tensor that bayesify takes for the output has rows in another dimension."""
        return not self._is_known and self.beside_output == "transposed"

    def main(self, output: Any) -> Tensor:
        """The tensor that matters, in what a network returned."""
        return output if self.around else self.output_form.main(output)

    @property
    def predict_options(self) -> dict[str, Any]:
        """What `predict` must be told to find the tensor that matters, and to take any for logits."""
        return {"likelihood": Softmax()} | ({} if self.around or self._is_known else {"call": self.call})

    @property
    def _is_known(self) -> bool:
        """Whether bayesify says that it finds the tensor that matters: by its name, or as the first that has rows."""
        return self.output_form.is_known or (self.returns == "second of a tuple" and self.beside == "loss")

    def call(self, network: nn.Module, batch: Any) -> Tensor:
        """The tensor that matters, in what a network returns for a batch."""
        return self.main(call_with(network, batch))

    def others(self, output: Any) -> list[tuple[Tensor, int]]:
        """The tensors with rows beside the one that matters, each with the dimension of its rows."""
        other = None if self.around else self.output_form.other(output)
        if other is None or self.beside_output == "loss" or not other.is_floating_point():
            return []
        rows = {"features": self._signals[-2].row_dim, "transposed": -1}
        return [(other, rows.get(self.beside_output, self.output.row_dim))]

    def batch(self, seed: int = 0) -> Any:
        """A batch: a tensor, or a dict of keyword arguments."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        row_dim = self.input.row_dim
        shape = (*self.shape[:row_dim], self.rows, *self.shape[row_dim:])
        if self.kind == "ids":
            return torch.randint(WORDS, shape, generator=generator)
        x = torch.randn(shape, generator=generator).to(DTYPES[self.dtype])
        shift = torch.randn(self.input.features, generator=generator).to(x)
        gain = torch.rand(self.rows, generator=generator).to(x) + 0.5
        forms = {"shift": {"x": x, "shift": shift}, "gain": {"x": x, "gain": gain}}
        forms |= {"shift first": {"shift": shift, "x": x}, "both": {"x": x, "gain": gain, "shift": shift}}
        return forms.get(self.form, x)

    def first_batch(self) -> Any:
        """The batch of the call before."""
        batch = self.batch()
        if self.first == "zeros":
            return {**batch, "x": 0 * batch["x"]} if isinstance(batch, dict) else 0 * batch
        if self.first == "other mode":
            return batch
        if self.first == "fewer rows":
            return self.rows_of(batch, torch.arange(max(self.rows - 1, 1)))
        return self.rows_of(batch, torch.zeros(1 if self.first == "one row" else self.rows, dtype=torch.long))

    def rows_of(self, batch: Any, index: Tensor) -> Any:
        """Some rows of the batch."""
        row_dim = self.input.row_dim
        if isinstance(batch, Tensor):
            return batch.index_select(row_dim, index)
        chosen = {"x": batch["x"].index_select(row_dim, index), "shift": batch.get("shift")}
        if "gain" in batch:
            chosen["gain"] = batch["gain"][index]
        return {name: chosen[name] for name in batch}

    def chosen_methods(self) -> Any:
        """What `convert` gets."""
        made = {_selector(key): None if name is None else _method(name, options) for key, name, options in self.methods}
        return made.get(None, made)

    def convert(self, network: nn.Module) -> nn.Module:
        """The network, converted in place."""
        options: dict[str, Any] = {"batch_dim": self.batch_dim} if self.batch_dim and self.tells_batch_dim else {}
        options |= {"example": self.batch()} if self.gives_example else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*below the resolution of")  # of bfloat16, as it should be here
            convert = partial(by.convert, methods=self.chosen_methods(), keep_dropout=self.keep_dropout, **options)
            return AROUND[self.around].convert(network, convert) if self.around else convert(network)

    def has(self, trait: str) -> bool:
        """Whether one of its blocks has a trait."""
        return any(getattr(BLOCKS[name], trait) for name, _ in self.blocks)

    @property
    def mixes_rows(self) -> bool:
        """Whether a row of a prediction depends on the other rows."""
        return self.has("mixes_rows") or self.around in ("rows pooled", "some rows")

    @property
    def is_ordinary(self) -> bool:
        """Whether nothing about it, such as tiny numbers, is a reason to refuse rows with their own draws."""
        odd = any(self.has(trait) for trait in ODD)
        odd = odd or any(name in ("positions", "folded_windows", "scale") for name, _ in self.blocks)
        odd = odd or self.beside_output in ("mixed", "reads") or not AROUND.get(self.around, Around).is_sound
        return not odd and self.form == "tensor" and self.tells_batch_dim and not self.misleads_about_rows

    def to_json(self) -> str:
        """The case as text: one line for each field, block and method."""
        lines = []
        for name, value in asdict(self).items():
            many = name in ("blocks", "methods")
            text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]" if many else json.dumps(value)
            lines.append(f'"{name}": {text}')
        return "{\n  " + ",\n  ".join(lines) + "\n}"


def _method(name: str, options: dict[str, Any]) -> Any:
    return METHODS[name](**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})


def _selector(key: str | None) -> Any:
    return getattr(nn, key.removeprefix("type:")) if key and key.startswith("type:") else key
