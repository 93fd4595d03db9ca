"""The one table of test cases: methods (with the options that change how they draw), architectures, and selections.

`covering_cases` is each method on a convolutional, a feed-forward and a sequence architecture, so that each
architecture has many methods; `every_case` adds the other pairs as slow tests. `one_case_each` is each method on one
architecture, and so is `compiled_cases`, with slow tests for all but one case of what takes long to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.methods.base import Method

METHODS: dict[str, Method] = {
    "Rank1": by.Rank1(4),
    "Rank1-cauchy": by.Rank1(3, posterior="cauchy", bias="component"),
    "Rank1-lognormal": by.Rank1(2, posterior="lognormal", factors="input"),
    "IBNN": by.IBNN(4, bias_noise=True),
    "EMP": by.EMP(5, patches=("norm", "output", "input")),
    "EMP-row-learned": by.EMP(3, patches=("norm", "output", "input"), reach="row", learn_mixing=True),
    "ECMP": by.ECMP(5, patches=("norm", "output", "input")),
    "ECMP-row": by.ECMP(3, patches=("norm", "output", "input"), reach="row"),
    "MeanField": by.MeanField(estimator="exemplar"),
    "MeanField-some-rows": by.MeanField(estimator="exemplar", rows_at_once=2),
    "MeanField-shared": by.MeanField(estimator="shared"),
    "MeanField-flipout": by.MeanField(),
    "MeanField-local": by.MeanField(estimator="local"),
    "LowRankEnsemble": by.LowRankEnsemble(6, rank=2),
    "LowRankEnsemble-1": by.LowRankEnsemble(4, rank=1),
    "BatchEnsemble": by.BatchEnsemble(4, bias="component"),
    "MCDropout": by.MCDropout(0.3),
    "DropConnect": by.DropConnect(0.3),
    "DropConnect-row": by.DropConnect(0.3, reach="row"),
    "Ensemble": by.Ensemble(4),
}


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3))


class Residual(nn.Module):
    """Convolutions, batch norms, a strided shortcut and an in-place addition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.norm2 = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.shortcut, self.head = nn.Conv2d(8, 8, 1, stride=2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        y = self.norm2(self.conv(x))
        y += self.shortcut(x)
        return self.head(F.relu(y).mean((2, 3)))


class Grouped(nn.Sequential):
    """Groups, dilation, circular padding and kernels that are not square."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(4, 6, (3, 1), padding=(1, 0), groups=2, padding_mode="circular"),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=6, bias=False),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 4, (2, 3), stride=2, groups=2),
            nn.Flatten(),
            nn.Linear(4 * 8 * 9, 3),
        )


class Tokens(nn.Module):
    """A linear network on (B, T, D) with layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm1 = nn.Linear(5, 8), nn.LayerNorm(8)
        self.mix, self.norm2, self.head = nn.Linear(8, 8), nn.LayerNorm(8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.embed(x))
        return self.head(self.norm2(x + F.gelu(self.mix(x))).mean(1))


class Recurrent(nn.Module):
    """A bidirectional LSTM on (B, T, D), a layer norm and a head on its mean output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True, bidirectional=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.lstm(x)[0]).mean(1))


class Attentive(nn.Module):
    """A transformer layer of torch's on (B, T, D), which has a fast path in evaluation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


@dataclass(frozen=True)
class Architecture:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def batch(self, rows: int) -> Tensor:
        return torch.randn(rows, *self.shape)


ARCHITECTURES = {
    "mlp": Architecture(MLP, (6,)),
    "residual": Architecture(Residual, (2, 6, 6)),
    "grouped": Architecture(Grouped, (4, 4, 4)),
    "tokens": Architecture(Tokens, (7, 5)),
    "recurrent": Architecture(Recurrent, (3, 5)),
    "attention": Architecture(Attentive, (3, 4)),
}


Pairs = list[tuple[str, str]]


def _cases(pairs: Pairs, quick: Pairs | None = None) -> pytest.MarkDecorator:
    """One test for each pair; where those that are quick are given, the others are slow tests."""
    return pytest.mark.parametrize(
        ("method", "architecture"),
        [
            pytest.param(
                METHODS[method],
                ARCHITECTURES[architecture],
                id=f"{method}-{architecture}",
                marks=() if quick is None or (method, architecture) in quick else pytest.mark.slow,
            )
            for method, architecture in pairs
        ],
    )


def _covering() -> Pairs:
    """Of each kind of architecture one, taking turns at different rates."""
    kinds = (("residual", "grouped"), ("mlp", "tokens"), ("recurrent", "attention"))
    chosen = [(name, kind[(i >> shift) % 2]) for i, name in enumerate(METHODS) for shift, kind in enumerate(kinds)]
    # Batch norms have rules of their own: whatever changes them is tried on some.
    norms = [(name, "residual") for name, method in METHODS.items() if "norm" in method.roles]
    return chosen + [case for case in norms if case not in chosen]


_one_each = [(method, [*ARCHITECTURES][i % len(ARCHITECTURES)]) for i, method in enumerate(METHODS)]
_small_graphs = [case for case in _one_each if case[1] in ("mlp", "grouped", "tokens")]
covering_cases = _cases(_covering())
every_case = _cases([(method, name) for method in METHODS for name in ARCHITECTURES], quick=_covering())
one_case_each = _cases(_one_each)
compiled_cases = _cases(_one_each, quick=_one_each[: len(ARCHITECTURES)] + _small_graphs)
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def converted(method: Method, architecture: Architecture) -> nn.Module:
    torch.manual_seed(0)
    return by.convert(architecture.make(), method)
