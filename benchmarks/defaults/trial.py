"""One trial: convert, train in a loop as people write it, predict, and keep each row's prediction."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.conversion.select import select
from bayesify.layers import bayesian_layers
from bayesify.methods.base import Method
from bayesify.prediction.results import Regression
from benchmarks.defaults.tasks import TASKS, Split, Task

LOOPS = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}
"""Optimizers with one group of parameters, as people write them."""
PLAIN, LONGER = "plain", "plain longer"
AT_ONCE = 500
"""How many rows to predict at a time."""


@dataclass(frozen=True)
class Recipe:
    """What a method string stands for, such as `Rank1(mean_std=0.45 / sqrt(L)) + anneal + samples=2`.

    The call may use `L`, the number of layers that the method converts, `sqrt`, and `rate(σ)`, the dropout rate whose
    noise has the standard deviation σ. After it may follow `anneal` (the weight of the KL grows over two thirds of
    training), `samples=S` (draws per row), `posterior_lr=F` (the posterior's rate is F times the network's) and
    `epochs=F` (F times as many epochs as the task has), also after `plain longer`.
    """

    call: str
    options: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Recipe:
        """The recipe of a method string.

        >>> Recipe.read("Rank1(prior_std=0.9 / sqrt(L)) + anneal + samples=2")
        Recipe(call='Rank1(prior_std=0.9 / sqrt(L))', options={'anneal': 1.0, 'samples': 2.0})
        """
        call, *extras = text.split(" + ")
        pairs = [extra.partition("=") for extra in extras]
        known = {"anneal", "samples", "posterior_lr", "epochs"}
        for name, _, _ in pairs:
            if name not in known:
                raise ValueError(f"{text!r}: {name!r} is none of {', '.join(sorted(known))}")
        return cls(call, {name: float(value or 1) for name, _, value in pairs})

    def method(self, network: nn.Module) -> tuple[Method, int]:
        """The method, and how many layers of a network it converts.

        >>> method, layers = Recipe("Rank1(mean_std=0.4 / sqrt(L))").method(nn.Sequential(*[nn.Linear(2, 2)] * 4))
        >>> method.mean_std, layers
        (0.2, 4)
        """
        kind = getattr(by, self.call.partition("(")[0])
        layers = len(select(network, kind()).methods)
        names = {kind.__name__: kind, "sqrt": math.sqrt, "rate": lambda std: std**2 / (1 + std**2), "L": layers}
        return eval(self.call, {"__builtins__": {}}, names), layers


@dataclass(frozen=True)
class Trial:
    """A trial by its key."""

    task: str
    start: str
    loop: str
    method: str
    seed: int

    def run(self, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Its facts, and for each split the rows' predictions."""
        task = TASKS[self.task]
        split = task.rows(self.seed)
        torch.manual_seed(self.seed)
        network, likelihood = task.network(split), task.likelihood(split)
        epochs = task.epochs + task.further
        if self.start == "trained":
            load_plain(folder, self, task, network, likelihood, split)
            epochs = task.further
        torch.manual_seed(1000 + self.seed)
        facts: dict[str, Any] = {}
        recipe, before = Recipe.read(self.method), sum(p.numel() for p in network.parameters())
        epochs = round(epochs * recipe.options.pop("epochs", 1))
        if recipe.call not in (PLAIN, LONGER):
            method, facts["layers"] = recipe.method(network)
            network = by.convert(network, method)
            facts["made"] = str(method)
            facts["added"] = sum(p.numel() for p in network.parameters()) / before - 1
        facts["noise_before"] = noise_of(network)
        started = time.process_time()
        if self.start == "scratch" or self.method != PLAIN:
            fit(network, likelihood, split.train, self.loop, epochs, task.batch, **recipe.options)
        facts |= {"noise_after": noise_of(network), "train_cpu_seconds": time.process_time() - started}
        started = time.process_time()
        rows = predicted(network.eval(), likelihood, split, task.draws)
        return facts | {"predict_cpu_seconds": time.process_time() - started}, rows


def load_plain(folder: Path, trial: Trial, task: Task, network: nn.Module, likelihood: nn.Module, split: Split) -> None:
    """Train the plain network with Adam, or load what was trained before."""
    if not task.epochs:
        return
    file = folder / "plain" / f"{trial.task}-{trial.seed}.pt"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        fit(network, likelihood, split.train, "adam", task.epochs, task.batch)
        torch.save([network.state_dict(), likelihood.state_dict()], file)
    for module, state in zip((network, likelihood), torch.load(file, weights_only=True), strict=True):
        module.load_state_dict(state)


def fit(
    network: nn.Module,
    likelihood: Any,
    rows: tuple[Tensor, Tensor],
    loop: str,
    epochs: int,
    batch: int,
    *,
    anneal: float = 0.0,
    samples: float = 1,
    posterior_lr: float = 1,
) -> None:
    """Train a plain or converted network."""
    x, y = rows
    optimizer = optimizer_of(network, likelihood, posterior_lr, LOOPS[loop])
    is_bayesian = bool(bayesian_layers(network))
    network.train()
    for epoch in range(epochs):
        for chosen in torch.randperm(len(y)).split(batch):
            if len(chosen) < 2:  # a batch norm needs two rows
                continue
            optimizer.zero_grad()
            if is_bayesian:
                beta = by.anneal(epoch, max(1.0, 2 / 3 * epochs)) if anneal else 1.0
                given = {"n": len(y), "likelihood": likelihood, "beta": beta, "samples": int(samples)}
                loss = by.elbo(network, x[chosen], y[chosen], **given).loss
            else:
                loss = -likelihood.log_prob(network(x[chosen]), y[chosen]).mean()
            loss.backward()
            optimizer.step()


def optimizer_of(network: nn.Module, likelihood: nn.Module, factor: float, make: Any) -> torch.optim.Optimizer:
    """One group for all, unless the posterior is to have another rate."""
    noise = list(likelihood.parameters())
    if factor == 1:
        return make([*network.parameters(), *noise])
    optimizer = make([torch.zeros(1, requires_grad=True)])
    lr = optimizer.param_groups[0]["lr"]
    groups = by.parameter_groups(network, lr=lr, posterior_lr=factor * lr)
    return make([*groups, {"params": noise}] if noise else groups)


def noise_of(network: nn.Module) -> dict[str, float]:
    """The mean scale of the posterior's noise, and the standard deviation of its means."""
    added = {f".{name}": p.detach() for name, p in network.named_parameters() if ".posterior." in f".{name}"}
    kinds = {"_rho": F.softplus, "_log_std": torch.exp}
    scales = [kind(p).flatten() for name, p in added.items() for end, kind in kinds.items() if name.endswith(end)]
    means = [p.flatten() for name, p in added.items() if name.endswith("_loc")]
    found = {"scale": float(torch.cat(scales).mean())} if scales else {}
    return found | ({"means": float(torch.cat(means).std())} if means else {})


def predicted(network: nn.Module, likelihood: Any, split: Split, draws: int) -> dict[str, np.ndarray]:
    """What is needed of each row of validation, test and other data, as arrays."""
    found: dict[str, np.ndarray] = {}
    for part in ("validation", "test"):
        x, y = getattr(split, part)
        found |= {f"{part}/{name}": value for name, value in described(network, likelihood, x, y, draws).items()}
        if part in split.other:
            others = described(network, likelihood, split.other[part], None, draws)
            found |= {f"{part}/other/{name}": value for name, value in others.items()}
    return found


@torch.no_grad()
def described(network: nn.Module, likelihood: Any, x: Tensor, y: Tensor | None, draws: int) -> dict[str, np.ndarray]:
    """The prediction of each row."""
    if bayesian_layers(network):
        p = by.predict(network, x, draws, likelihood=likelihood, batch_size=AT_ONCE)
    else:
        p = likelihood.interpret(torch.cat([network(part) for part in x.split(AT_ONCE)]))
    if isinstance(p, Regression):
        found = {"mean": p.mean[:, 0], "std": p.std[:, 0], "epistemic": p.epistemic_std[:, 0]}
        if y is not None:
            low, high = p.interval(0.9)
            found |= {"nll": -p.log_prob(y), "inside": ((low <= y) & (y <= high))[:, 0], "y": y[:, 0]}
    else:
        found = {"log_probs": p.log_probs, "epistemic": p.epistemic} | ({} if y is None else {"y": y})
    return {name: value.numpy() for name, value in found.items()}
