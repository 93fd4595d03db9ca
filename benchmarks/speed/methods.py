"""What is measured: every method of bayesify, and the plain network itself. peers.py has the other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by

EXAMPLES = 50_000
"""The size of the training set that the KL is divided by."""
POINT_METHODS = ("BatchEnsemble", "LowRankEnsemble", "Ensemble")
"""The classes whose draws are their components and nothing else: there are only so many that differ."""


@dataclass
class Prepared:
    """A network that a library made ready: its loss, what it does after backward, and S draws of its prediction."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    predict: Callable[[Tensor, int], object]
    after_backward: Callable[[], None] = lambda: None
    members: int | None = None
    """The only number of different draws that it has, if there is one."""

    def step(self, x: Tensor, y: Tensor, **sgd_options: bool) -> TrainingStep:
        """A training step on a batch."""
        self.model.train()
        return TrainingStep(self, x, y, torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9, **sgd_options))


@dataclass
class TrainingStep:
    """Forward, backward, KL and optimizer."""

    prepared: Prepared
    x: Tensor
    y: Tensor
    optimizer: torch.optim.Optimizer

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.prepared.loss(self.x, self.y).backward()
        self.prepared.after_backward()
        self.optimizer.step()

    def lasting_tensors(self) -> list[Tensor]:
        """The tensors that stay from step to step."""
        model, states = self.prepared.model, self.optimizer.state.values()
        momenta = [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return [self.x, self.y, *model.parameters(), *model.buffers(), *momenta]


Prepare = Callable[[nn.Module], Prepared]


@dataclass(frozen=True)
class Implementation:
    """A library's implementation of a method; those of the same `kind` compute the same thing."""

    library: str
    name: str
    prepare: Prepare
    kind: str = ""


def predict_by_loop(model: nn.Module) -> Callable[[Tensor, int], Tensor]:
    """The mean probabilities of so many calls."""

    def predict(x: Tensor, draws: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            return torch.stack([model(x).softmax(-1) for _ in range(draws)]).mean(0)

    return predict


def plain(network: nn.Module) -> Prepared:
    """The network as it is; S "draws" are S forward passes."""
    return Prepared(network, lambda x, y: F.cross_entropy(network(x), y), predict_by_loop(network))


def convert_with(method: Any, library: Any = by) -> Prepare:
    """How bayesify, or another version of it, prepares a network: with a method, or a dict of methods by layer."""

    def prepare(network: nn.Module) -> Prepared:
        model = library.convert(network, method)
        return Prepared(
            model,
            lambda x, y: F.cross_entropy(model(x), y),
            lambda x, draws: library.predict(model, x, samples=draws),
            lambda: library.add_kl_grad_(model, n=EXAMPLES),
            members=method.components if type(method).__name__ in POINT_METHODS else None,
        )

    return prepare


def all_methods(library: Any = by) -> dict[str, Any]:
    """The methods that are measured, made by bayesify or another version of it."""
    return {
        "BatchEnsemble": library.BatchEnsemble(4),
        "EMP": library.EMP(5),
        "ECMP": library.ECMP(5),
        "LowRankEnsemble": library.LowRankEnsemble(20),
        "IBNN": library.IBNN(4),
        "Rank1": library.Rank1(4),
        "MeanField shared": library.MeanField(estimator="shared"),
        "MeanField flipout": library.MeanField(estimator="flipout"),
        "MeanField local": library.MeanField(estimator="local"),
        "MeanField exemplar": library.MeanField(estimator="exemplar"),
        "MCDropout": library.MCDropout(0.1),
        "DropConnect": library.DropConnect(0.1),
        "Ensemble": library.Ensemble(4),
    }


METHODS = all_methods()
KINDS = {
    "MeanField shared, no norms": "mean field, one draw a batch",
    "MeanField flipout, no norms": "flipout",
    "BatchEnsemble": "BatchEnsemble",
}
"""What other libraries have too."""
WITHOUT_NORMS = {f"{name}, no norms": METHODS[name] for name in ("MeanField shared", "MeanField flipout")}
"""Mean field of linear layers and convolutions alone, as other libraries have it."""


def convert_without_norms(method: Any) -> Prepare:
    """A method of linear layers and convolutions alone."""

    def prepare(network: nn.Module) -> Prepared:
        present = {type(module) for module in network.modules()}
        return convert_with({kind: method for kind in (nn.Linear, nn.Conv2d) if kind in present})(network)

    return prepare


OURS = [
    *(Implementation("bayesify", name, convert_with(method), KINDS.get(name, "")) for name, method in METHODS.items()),
    *(
        Implementation("bayesify", name, convert_without_norms(method), KINDS[name])
        for name, method in WITHOUT_NORMS.items()
    ),
]
QUICK = ("Rank1", *KINDS)
"""The methods of a quick run."""
HEADS = ("Rank1", "MeanField shared", "ECMP")
"""The methods that are measured on the last layer alone, too."""


def head_implementations(layer: str) -> list[Implementation]:
    """bayesify's methods of the last layer alone."""
    return [Implementation("bayesify", name, convert_with({layer: METHODS[name]}), "head") for name in HEADS]
