"""A small recipe, and ways to interrupt its training."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from bayesify.lab.recipes import Recipe
from bayesify.lab.training import BayesianModule, Interrupted, train


def small(*overrides: str) -> Recipe:
    """Of 15 batches in an epoch; a checkpoint is saved after each epoch, or when training is interrupted."""
    values = {
        "data": {"limit": 120, "batch_size": 8},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "method": {"name": "Rank1", "components": 2},
        "training": {"epochs": 2, "accelerator": "cpu"},
        "evaluation": {"samples": 2, "rows": 20},
    }
    return Recipe.of(values, overrides)


def at_batch(number: int, what: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something once in the middle of a training step."""
    step, left = BayesianModule.training_step, [what]

    def changed(self: BayesianModule, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.batches_done == number and left:
            left.pop()()
        return step(self, batch, batch_idx)

    monkeypatch.setattr(BayesianModule, "training_step", changed)


def saved_part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Path:
    """A run that was interrupted after 7 batches."""
    at_batch(6, lambda: signal.raise_signal(signal.SIGTERM), monkeypatch)
    with pytest.raises(Interrupted):
        train(small(*overrides), tmp_path / "run", progress=False)
    return tmp_path / "run"
