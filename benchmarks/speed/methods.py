"""What is measured: every family of bayesify, and the plain network itself. peers.py has the other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.draw_counts import are_points, components, families_of

EXAMPLES = 50_000
"""The training set that the KL is divided by."""


@dataclass
class Trial:
    """A network made ready by a library: its loss, what it does after backward, and S draws of its prediction."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    predict: Callable[[Tensor, int], object]
    after_backward: Callable[[], None] = lambda: None
    members: int | None = None
    """The only number of different draws that it has, if there is one."""

    def step(self, x: Tensor, y: Tensor, **sgd: bool) -> Step:
        """A training step on a batch; options are SGD's."""
        self.model.train()
        return Step(self, x, y, torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9, **sgd))


@dataclass
class Step:
    """Forward, backward, KL and optimizer."""

    trial: Trial
    x: Tensor
    y: Tensor
    optimizer: torch.optim.Optimizer

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.trial.loss(self.x, self.y).backward()
        self.trial.after_backward()
        self.optimizer.step()

    def held(self) -> list[Tensor]:
        """The tensors that stay from step to step."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return [self.x, self.y, *self.trial.model.parameters(), *self.trial.model.buffers(), *states]


@dataclass(frozen=True)
class Method:
    """A method of a library; those with the same `kind` compute the same thing."""

    library: str
    name: str
    prepare: Callable[[nn.Module], Trial]
    kind: str = ""


def predict_by_loop(model: nn.Module) -> Callable[[Tensor, int], Tensor]:
    """The mean probabilities of so many calls."""

    def predict(x: Tensor, draws: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            return torch.stack([model(x).softmax(-1) for _ in range(draws)]).mean(0)

    return predict


def plain(network: nn.Module) -> Trial:
    """The network as it is; S "draws" are S forward passes."""
    return Trial(network, lambda x, y: F.cross_entropy(network(x), y), predict_by_loop(network))


def converted(family: object) -> Callable[[nn.Module], Trial]:
    """A family, or a dict of families by layer."""

    def prepare(network: nn.Module) -> Trial:
        model = by.convert(network, family)
        families = families_of(model)
        return Trial(
            model,
            lambda x, y: F.cross_entropy(model(x), y),
            lambda x, draws: by.predict(model, x, samples=draws),
            lambda: by.add_kl_grad_(model, n=EXAMPLES),
            members=components(families) if are_points(families) else None,
        )

    return prepare


FAMILIES = {
    "BatchEnsemble": by.BatchEnsemble(4),
    "EMP": by.EMP(5),
    "ECMP": by.ECMP(5),
    "LowRankEnsemble": by.LowRankEnsemble(20),
    "IBNN": by.IBNN(4),
    "Rank1": by.Rank1(4),
    "MeanField shared": by.MeanField(estimator="shared"),
    "MeanField flipout": by.MeanField(estimator="flipout"),
    "MeanField local": by.MeanField(estimator="local"),
    "MeanField exemplar": by.MeanField(estimator="exemplar"),
    "MCDropout": by.MCDropout(0.1),
    "DropConnect": by.DropConnect(0.1),
    "Ensemble": by.Ensemble(4),
}
NO_NORMS = {f"{name}, no norms": FAMILIES[name] for name in ("MeanField shared", "MeanField flipout")}
"""Mean field of linear layers and convolutions alone, as other libraries have it."""
KINDS = {
    "MeanField shared, no norms": "mean field, one draw a batch",
    "MeanField flipout, no norms": "flipout",
    "BatchEnsemble": "BatchEnsemble",
}


def without_norms(family: object) -> Callable[[nn.Module], Trial]:
    """A family of linear layers and convolutions alone."""

    def prepare(network: nn.Module) -> Trial:
        there = {type(module) for module in network.modules()}
        return converted({kind: family for kind in (nn.Linear, nn.Conv2d) if kind in there})(network)

    return prepare


PREPARED = {name: converted(family) for name, family in FAMILIES.items()}
PREPARED |= {name: without_norms(family) for name, family in NO_NORMS.items()}
OURS = [Method("bayesify", name, prepare, KINDS.get(name, "")) for name, prepare in PREPARED.items()]
IN_BRIEF = ("Rank1", *KINDS)
"""What a smoke run measures of them."""
HEADS = ("Rank1", "MeanField shared", "ECMP")
"""Measured as the last layer's method alone, too."""


def heads(layer: str) -> list[Method]:
    """bayesify's methods of the last layer alone."""
    return [Method("bayesify", name, converted({layer: FAMILIES[name]}), "head") for name in HEADS]
