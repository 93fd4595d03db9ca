"""Who takes part: how each contestant is trained, and the options that it is tuned over, as many for one as another.

From scratch, rates, decays and epochs are tuned for what has no noise, and the size of the noise for what has;
fine-tuned networks likewise. A contestant with temperature is not trained again: it has the same trials, of which it
may choose another one. The options chosen for a loop without noise are not used for the methods, which keep the data
set's.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.lab.baselines import Swag, laplace
from bayesify.lab.recipes.methods import LaplacePart
from bayesify.layers import bayesian_layers
from benchmarks.contest.data import DATA, DataSet, Rows, augmented

Options = dict[str, float]
TRIALS = 4
"""How many options every contestant may try on the rows to choose by."""
MEMBERS = (2, 4)
SNAPSHOTS, SWAG_DRAWS, SWAG_BATCHES = 20, 20, 20
ANNEALED = 2 / 3
"""From scratch the weight of the KL grows over this share of training."""


@dataclass
class Job:
    """What a contestant gets: the data set, its rows for a seed, and the folder for plain networks."""

    data: str
    rows: Rows
    seed: int
    folder: Path

    @property
    def of(self) -> DataSet:
        """The data set."""
        return DATA[self.data]


@dataclass
class Trained:
    """One Bayesian network or several plain ones to average, and what they cost."""

    networks: list[nn.Module]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """How many numbers are kept."""
        return sum(p.numel() for network in self.networks for p in network.parameters())


# Training.


def fit(network: nn.Module, job: Job, epochs: int, *, lr: float, weight_decay: float, anneals: bool = False) -> float:
    """Train a plain or converted network with AdamW and one cycle of the rate; the CPU seconds that it took."""
    started = time.process_time()
    x, y = job.rows.train
    is_bayesian = bool(bayesian_layers(network))
    groups: Any = network.parameters()
    if is_bayesian:
        groups = by.parameter_groups(network, lr=lr, weight_decay=weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)
    steps = epochs * -(-len(y) // job.of.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], steps)
    network.train()
    for step, (a, b) in enumerate(batches(job, x, y, epochs)):
        optimizer.zero_grad()
        if is_bayesian:
            beta = by.anneal(step, max(1.0, ANNEALED * steps)) if anneals else 1.0
            loss = by.elbo(network, a, b, n=len(y), beta=beta).loss
        else:
            loss = F.cross_entropy(network(a), b)
        loss.backward()
        optimizer.step()
        schedule.step()
    network.eval()
    return time.process_time() - started


def batches(job: Job, x: Tensor, y: Tensor, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of some epochs in random order; none has only one row, which a batch norm could not use."""
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(job.of.batch):
            rows = rows if len(rows) > 1 else torch.randint(len(y), (2,))
            yield augmented(x[rows], job.of.augmented), y[rows]


def plain(job: Job, member: int = 0, *, share: float = 1.0, **options: float) -> Trained:
    """A plain network from scratch, or published; member m starts elsewhere. Trained ones are kept and loaded.

    It is trained for a `share` of the data set's epochs, times the option `epochs`.
    """
    of = job.of
    torch.manual_seed(1000 * member + job.seed)
    network = of.network(job.rows)
    if not of.epochs:
        return Trained([network.eval()], 0.0)
    epochs = max(1, round(share * options.pop("epochs", 1) * of.epochs))
    given = {"lr": of.lr, "weight_decay": of.weight_decay, **options}
    key = [of.networks or job.data, of.epochs, of.batch, epochs, member, job.seed, len(job.rows.train[1]), given]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    file = job.folder / "plain" / f"{of.networks or job.data}-{job.seed}-{digest}.pt"
    if not file.exists():
        seconds = fit(network, job, epochs, **given)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        torch.save([network.state_dict(), seconds], partial)
        partial.replace(file)
    state, seconds = torch.load(file, weights_only=True)
    network.load_state_dict(state)
    return Trained([network.eval()], seconds)


def trained_further(job: Job, given: Trained, member: int, lr: float) -> Trained:
    """A plain network after the epochs of fine-tuning, if the rate is not 0; published weights cost nothing."""
    network = given.networks[0]
    torch.manual_seed(5000 + 1000 * member + job.seed)
    seconds = fit(network, job, job.of.further, lr=lr, weight_decay=job.of.weight_decay) if lr else 0.0
    return Trained([network], given.seconds + seconds)


# Contestants: functions of a job and options.


def plain_network(job: Job, options: Options) -> Trained:
    """The plain network."""
    return plain(job, **options)


def longer(job: Job, options: Options) -> Trained:
    """The plain network, trained for twice as long from scratch, or for as long as the others are fine-tuned."""
    if job.of.further:
        return trained_further(job, plain(job), 0, options["lr"])
    return plain(job, share=2, **options)


def ensemble(members: int) -> Callable[[Job, Options], Trained]:
    """Plain networks that were trained independently; of published weights, copies that were fine-tuned."""

    def train(job: Job, options: Options) -> Trained:
        found = []
        for member in range(members):
            one = plain(job, member, **({} if job.of.further else options))
            found.append(trained_further(job, one, member, options["lr"]) if job.of.further else one)
        return Trained([each.networks[0] for each in found], sum(each.seconds for each in found))

    return train


def method(name: str) -> Callable[[Job, Options], Trained]:
    """One of the library's methods, from scratch or from the plain network."""

    def train(job: Job, options: Options) -> Trained:
        of = job.of
        given = plain(job) if of.further else Trained([untrained(job)], 0.0)
        torch.manual_seed(5000 + job.seed)
        made = getattr(by, name)(**options)
        network = by.convert(given.networks[0], made)
        loop = {"lr": of.further_lr if of.further else of.lr, "weight_decay": of.weight_decay}
        seconds = fit(network, job, of.further or of.epochs, **loop, anneals=not of.further)
        return Trained([network], given.seconds + seconds, {"made": str(made)})

    return train


def untrained(job: Job) -> nn.Module:
    """The network that plain training starts from, too."""
    torch.manual_seed(job.seed)
    return job.of.network(job.rows)


def swag(job: Job, options: Options) -> Trained:
    """SWAG (Maddox et al. 2019): snapshots of SGD at a constant rate, in the last quarter or in the fine-tuning."""
    of = job.of
    last = of.further or max(1, round(of.epochs / 4))
    before, own = split(options, "snapshot_lr", "scale")
    given = plain(job) if of.further else plain(job, share=1 - last / of.epochs, **before)
    network = given.networks[0]
    torch.manual_seed(5000 + job.seed)
    started = time.process_time()
    optimizer = torch.optim.SGD(network.parameters(), own["snapshot_lr"], momentum=0.9, weight_decay=5e-4)
    collected, (x, y) = Swag(network, rank=SNAPSHOTS), job.rows.train
    steps = last * -(-len(y) // of.batch)
    network.train()
    for step, (a, b) in enumerate(batches(job, x, y, last), 1):
        optimizer.zero_grad()
        F.cross_entropy(network(a), b).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.step()
        if step * SNAPSHOTS // steps > (step - 1) * SNAPSHOTS // steps:
            collected.collect(network)
    some = [x[rows] for rows in torch.randperm(len(y))[: SWAG_BATCHES * of.batch].split(of.batch) if len(rows) > 1]
    drawn = collected.networks(network, SWAG_DRAWS, some, scale=own["scale"], seed=job.seed)
    return Trained([each.eval() for each in drawn], given.seconds + time.process_time() - started)


def laplace_of(posterior: str) -> Callable[[Job, Options], Trained]:
    """Laplace's approximation around the plain network (Daxberger et al. 2021)."""

    def train(job: Job, options: Options) -> Trained:
        before, own = split(options, "prior_precision")
        given = plain(job, **before)
        fisher = "empirical" if posterior == "all_diagonal" else "exact"  # exact has a pass for every class
        part = LaplacePart(posterior=posterior, fisher=fisher, **own)  # type: ignore[arg-type]
        torch.manual_seed(5000 + job.seed)
        started = time.process_time()
        rows = Batches(*job.rows.train, job.of.batch)
        network, _ = laplace(part, given.networks[0], by.Categorical(), rows, seed=job.seed)  # type: ignore[arg-type]
        return Trained([network], given.seconds + time.process_time() - started)

    return train


def split(options: Options, *names: str) -> tuple[Options, Options]:
    """The options of the plain network before, and those with these names."""
    return {k: v for k, v in options.items() if k not in names}, {name: options[name] for name in names}


@dataclass(frozen=True)
class Batches:
    """Training rows as `lab.baselines.laplace` reads them."""

    x: Tensor
    y: Tensor
    batch_size: int

    @property
    def dataset(self) -> Tensor:
        """What has as many entries as there are rows."""
        return self.y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True)

    def with_batch_size(self, batch_size: int) -> Batches:
        """The same rows in batches of another size."""
        return replace(self, batch_size=batch_size)


# What each is tuned over.

METHODS = tuple(name for name, kind in by.methods.METHODS.items() if "noise" in {each.name for each in fields(kind)})
"""The library's methods, but for the explicit ensemble, which is there as independent networks."""
PLAIN, LONGER, ENSEMBLE = "plain", "plain longer", "deep ensemble of {}"
CONTESTANTS: dict[str, Callable[[Job, Options], Trained]] = {
    PLAIN: plain_network,
    LONGER: longer,
    **{name: method(name) for name in METHODS},
    "SWAG": swag,
    "Laplace, last layer": laplace_of("last_kron"),
    "Laplace, all layers": laplace_of("all_diagonal"),
    **{ENSEMBLE.format(members): ensemble(members) for members in MEMBERS},
}
"""How to train each."""
NOISES = (0.1, 0.2, 0.35, 0.6)
PRECISIONS = {"Laplace, last layer": (1.0, 10.0, 100.0, 1000.0), "Laplace, all layers": (10.0, 100.0, 1e3, 1e4)}


def options_of(contestant: str, data: str) -> list[Options]:
    """The options that a contestant is tuned over: four, and one for a plain network that is given.

    What comes after plain training has more: SWAG and Laplace also choose between plain networks.

    >>> options_of("Rank1", "patients")
    [{'noise': 0.1}, {'noise': 0.2}, {'noise': 0.35}, {'noise': 0.6}]
    >>> len(options_of("SWAG", "patients")), len(options_of("SWAG", "fashion-tuned"))
    (16, 4)
    """
    of = DATA[data]
    if contestant in METHODS:
        return [{"noise": noise} for noise in NOISES]
    plains: list[Options] = [{}]
    if not of.further:
        slow = 0.3 * of.lr
        plains = [{"lr": of.lr}, {"lr": of.lr, "weight_decay": 10 * of.weight_decay}, {"lr": slow}]
        plains.append({"lr": slow, "epochs": 0.5})
    if contestant in PRECISIONS:
        return [given | {"prior_precision": each} for given in plains for each in PRECISIONS[contestant]]
    if contestant == "SWAG":
        own = [{"snapshot_lr": lr, "scale": scale} for lr in (0.01, 0.05) for scale in (0.25, 1.0)]
        return [given | each for given in plains for each in own]
    if contestant == PLAIN or not of.further:
        return plains
    rates = [f * of.further_lr for f in (0.1, 0.3, 1.0, 3.0)]
    return [{"lr": lr} for lr in (rates if contestant == LONGER else [0.0, *rates[1:]])]
