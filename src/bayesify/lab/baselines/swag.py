"""SWAG (Maddox et al. 2019): a Gaussian fitted to the weights along the training trajectory."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import bayesify as by
from bayesify.lab.baselines.errors import BaselineError
from bayesify.lab.recipes.methods import SwagPart


class Swag:
    """The mean, the variances and the last `rank` deviations of a network's parameters over snapshots, on the CPU.

    >>> network = nn.Linear(2, 1)
    >>> swag = Swag(network, rank=2)
    >>> for value in (0.0, 1.0, 2.0):
    ...     _ = nn.init.constant_(network.weight, value), nn.init.zeros_(network.bias)
    ...     swag.collect(network)
    >>> swag.mean, swag.variance
    (tensor([1., 1., 0.]), tensor([0.6667, 0.6667, 0.0000]))
    """

    def __init__(self, network: nn.Module, rank: int) -> None:
        self.rank = rank
        self.average = AveragedModel(network, device=torch.device("cpu"))
        self.squares = torch.zeros_like(self.mean)
        self.deviations: list[Tensor] = []

    @property
    def count(self) -> int:
        """The number of snapshots."""
        return int(self.average.n_averaged)

    @property
    def mean(self) -> Tensor:
        """θ_SWA, in the order of the network's parameters."""
        return _vector(self.average.module.parameters()).detach()

    @property
    def variance(self) -> Tensor:
        """Σ_diag = mean θ² - θ_SWA² (section 3.2), by Welford's algorithm, so that no digits cancel."""
        return self.squares.clamp_min(0) / max(self.count, 1)

    @torch.no_grad()
    def collect(self, network: nn.Module) -> None:
        """Take a snapshot; its deviation is from the mean so far, itself included (section 3.3)."""
        weights, before = _vector(network.parameters()).cpu(), self.mean
        self.average.update_parameters(network)
        after = self.mean
        if self.count > 1:
            self.squares += (weights - before) * (weights - after)
        self.deviations = [*self.deviations, weights - after][-self.rank :] if self.rank else []

    def draw(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """One draw from Normal(θ_SWA, scale · ½(Σ_diag + D Dᵀ/(K-1))), eq. 1; without D, from Normal(θ_SWA, Σ_diag)."""
        if self.count < 2:
            raise BaselineError(f"SWAG needs at least 2 snapshots of the weights; there are {self.count}")
        noise = self.variance.sqrt() * torch.randn(self.squares.shape, generator=generator).to(self.squares)
        if self.rank:
            along = torch.randn(len(self.deviations), generator=generator).to(self.squares)
            spread = sum((d * z for d, z in zip(self.deviations, along, strict=True)), torch.zeros_like(noise))
            noise = (noise + spread / math.sqrt(len(self.deviations) - 1)) / math.sqrt(2)
        return self.mean + math.sqrt(scale) * noise

    def networks(
        self, network: nn.Module, draws: int, batches: Iterable[Any], *, scale: float = 1.0, seed: int = 0
    ) -> list[nn.Module]:
        """Draw networks, each with its own batch statistics, estimated from batches (algorithm 1)."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [copy.deepcopy(network) for _ in range(draws)]
        for each in drawn:
            vector_to_parameters(self.draw(generator, scale).to(next(each.parameters()).device), each.parameters())
            by.recalibrate(each, batches)
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"average": self.average.state_dict(), "squares": self.squares, "deviations": self.deviations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from a checkpoint."""
        self.average.load_state_dict(state["average"])
        self.squares, self.deviations = state["squares"], list(state["deviations"])


class Snapshots(L.Callback):
    """Collects the weights of a `BayesianModule` at regular steps, once the share `part.start` of training is done."""

    def __init__(self, network: nn.Module, part: SwagPart) -> None:
        self.part, self.swag, self.seen = part, Swag(network, part.rank), 0

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        """Take a snapshot if one is due, but not inside an accumulated step."""
        step, total = trainer.global_step, int(trainer.estimated_stepping_batches)
        if step > self.seen and is_snapshot_due(step, total, int(trainer.max_epochs or 1), self.part):
            self.swag.collect(module.network)  # type: ignore[arg-type]
        self.seen = step

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"swag": self.swag.state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from a checkpoint."""
        self.swag.load_state_dict(state_dict["swag"])
        self.seen = int(state_dict["seen"])


def is_snapshot_due(step: int, total: int, epochs: int, part: SwagPart) -> bool:
    """Whether a snapshot is taken after a step, out of `total` steps.

    >>> [step for step in range(1, 13) if is_snapshot_due(step, 12, 3, SwagPart(snapshots=2, start=0.5))]
    [8, 10, 12]
    """
    pieces = part.snapshots * epochs
    return step > part.start * total and step * pieces // total > (step - 1) * pieces // total


def _vector(parameters: Iterable[Tensor]) -> Tensor:
    """All parameters in one vector, in any memory format (torch's own function needs contiguous ones)."""
    return torch.cat([p.reshape(-1) for p in parameters])
