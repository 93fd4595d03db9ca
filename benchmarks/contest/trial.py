"""One trial: train a contestant with some options, predict, and keep each row's prediction."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.familiarity.familiarity import WEIGHT
from bayesify.layers import bayesian_layers
from bayesify.prediction.results import Classification
from benchmarks.contest.contestants import CONTESTANTS, Job, Options, Trained, plain
from benchmarks.contest.data import DATA, HELD, Group
from benchmarks.contest.data import Rows as DataRows
from benchmarks.store import Rows, Store

TUNING_SEED = 100
"""The seed of the trials that options are chosen by, which is none of those shown."""
AT_ONCE = 500
"""How many rows to predict at a time."""
FAMILIAR_ROWS = 2000
"""How many training rows the familiarity is fitted to."""


@dataclass(frozen=True)
class Trial:
    """A trial by its key; options are in JSON."""

    data: str
    contestant: str
    options: str
    seed: int

    @classmethod
    def of(cls, data: str, contestant: str, options: Options, seed: int) -> Trial:
        """A trial with these options."""
        return cls(data, contestant, json.dumps(options), seed)

    def run(self, folder: Path) -> tuple[dict[str, Any], Rows]:
        """Its facts, and each row's prediction: of all rows, or when tuning of those to choose by alone."""
        of = DATA[self.data]
        rows = of.rows(self.seed)
        job = Job(self.data, rows, self.seed, folder)
        trained = CONTESTANTS[self.contestant](job, json.loads(self.options))
        facts = trained.facts | {"train_cpu_seconds": trained.seconds}
        if self.seed == TUNING_SEED:
            held = rows.groups[HELD]
            chosen_by = held.fold > 0 if of.folds == 1 else torch.ones(len(held.fold), dtype=torch.bool)
            assert held.y is not None
            rows.groups = {HELD: Group(held.x[chosen_by], held.y[chosen_by], held.fold[chosen_by])}
            return facts, predicted(trained, rows.groups, of.draws)
        own = sum(p.numel() for p in of.network(rows).parameters())
        facts |= {"added": trained.parameters / own - 1, "plain_cpu_seconds": plain(job).seconds}
        for name, network in (("predict", trained), ("plain_predict", plain(job))):
            described(network, rows.groups[HELD].x[:AT_ONCE], of.draws)  # the first call is slower
            started = time.process_time()
            described(network, rows.groups[HELD].x[: 4 * AT_ONCE], of.draws)
            facts[f"{name}_cpu_seconds"] = time.process_time() - started
        found = predicted(trained, rows.groups, of.draws)
        return facts, found | unfamiliarity(trained.networks[0], rows, of.folds)


STORE = Store.named(Trial, "contest")


def predicted(trained: Trained, groups: dict[str, Group], draws: int | None) -> Rows:
    """What is needed of each row, as arrays under "group/name"."""
    found: dict[str, Tensor] = {}
    for name, group in groups.items():
        p = described(trained, group.x, draws)
        found |= {f"{name}/log_probs": p.log_probs, f"{name}/epistemic": p.epistemic, f"{name}/fold": group.fold}
        found |= {} if group.y is None else {f"{name}/y": group.y}
    return {name: value.numpy() for name, value in found.items()}


@torch.no_grad()
def described(trained: Trained, x: Tensor, draws: int | None) -> Classification:
    """The prediction of a Bayesian network, or the average of several plain ones."""
    first = trained.networks[0]
    if bayesian_layers(first):
        p: Classification = by.predict(first, x, draws, batch_size=AT_ONCE)
        return p
    stacks = (torch.stack([network(part) for network in trained.networks]) for part in x.split(AT_ONCE))
    return Classification.join([by.Categorical().predictive(each) for each in stacks])


def unfamiliarity(network: nn.Module, rows: DataRows, folds: int) -> Rows:
    """The part of the doubt of each row of a shown fold that its familiarity adds, by ranks of the other fold."""
    x, y = rows.train
    held = rows.groups[HELD]
    found = {f"{name}/unfamiliar": np.zeros(len(group.x), np.float32) for name, group in rows.groups.items()}
    for fold in range(folds):
        f = by.Familiarity.fit(
            network, (x[:FAMILIAR_ROWS], y[:FAMILIAR_ROWS]), held_out=held.x[held.fold != fold][:FAMILIAR_ROWS]
        )
        for name, group in rows.groups.items():
            own = group.fold == fold
            score = f.score(network, group.x[own], batch_size=AT_ONCE)
            found[f"{name}/unfamiliar"][own.numpy()] = WEIGHT * -(10 * score).clamp(1e-38, 1).log().numpy()
    return found
