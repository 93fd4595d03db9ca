"""The description of a case, as plain values: a network, a batch, methods, options of `convert`."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.methods import METHODS
from fuzz.networks import BLOCKS, WORDS, Signal

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Network(nn.Sequential):
    """The blocks one after the other; `shift` is the same for all rows, `gain` has a number for each."""

    def __init__(self, blocks: list[nn.Module], signal: Signal) -> None:
        super().__init__(*blocks)
        self.row_dim = signal.row_dim
        self.shift_shape = (-1, *[1] * (len(signal.shape) - 1)) if signal.kind == "maps" else (-1,)

    def forward(self, x: Tensor, shift: Tensor | None = None, gain: Tensor | None = None) -> Tensor:
        x = x if shift is None else x + shift.reshape(self.shift_shape)
        x = x if gain is None else x * gain.reshape([len(gain) if d == self.row_dim else 1 for d in range(x.dim())])
        return super().forward(x)


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

    def network(self) -> nn.Module:
        """The network with its first weights: always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = Network(self._modules()[0], self.input).to(DTYPES[self.dtype])
            for tensor in network.parameters():
                if tensor.dim() == 1:  # those of norms are all 1 or 0 at first
                    tensor.data += 0.3 * torch.randn_like(tensor)
        return network

    @property
    def input(self) -> Signal:
        """What the network takes."""
        return Signal(self.kind, tuple(self.shape), self.batch_dim)

    def _modules(self) -> tuple[list[nn.Module], Signal]:
        signal, modules = self.input, []
        for name, options in self.blocks:
            module, signal = BLOCKS[name].build(signal, **options)
            modules.append(module)
        return modules, signal

    @property
    def output(self) -> Signal:
        """What the network returns."""
        with torch.random.fork_rng(devices=[]):
            return self._modules()[1]

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
            return by.convert(network, self.chosen_methods(), keep_dropout=self.keep_dropout, **options)

    def has(self, trait: str) -> bool:
        """Whether one of its blocks has a trait."""
        return any(getattr(BLOCKS[name], trait) for name, _ in self.blocks)

    @property
    def is_ordinary(self) -> bool:
        """Whether nothing about it, such as tiny numbers, is a reason to refuse rows with their own draws."""
        odd = any(self.has(trait) for trait in ("mixes_rows", "reads_weights", "keeps_results", "jumps"))
        odd = odd or any(name in ("positions", "folded_windows", "scale") for name, _ in self.blocks)
        return not odd and self.form == "tensor" and self.tells_batch_dim

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
