"""Lightning callbacks: atomic checkpoints, stopping on Ctrl-C, and a CSV log that continues after a resume."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from bayesify.errors import BayesifyError

COLUMNS = (
    *("step", "epoch", "loss", "log_likelihood", "kl", "beta", "regulariser"),
    *("val_nll", "val_accuracy", "val_mse", "lr", "posterior_lr"),
)


class Interrupted(BayesifyError):
    """Training that was stopped with Ctrl-C; its checkpoint is kept."""


class Checkpoint(callbacks.Checkpoint):
    """Saves the state of training after every epoch, every `every_steps` batches, and on Ctrl-C.

    Lightning runs checkpoint callbacks after all others, so that it saves their state too.
    """

    def __init__(self, path: Path, every_steps: int | None = None) -> None:
        self.path, self.every_steps = path, every_steps
        self.asked_to_stop = self.saved_to_stop = self.due = False
        self._before: Any = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """From here on, Ctrl-C stops training between two batches."""
        self._before = _handle_interrupts(self._stop)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        """Save every `every_steps` batches and on Ctrl-C; after the last batch of an epoch, its end does."""
        done = int(module.batches_done)  # type: ignore[arg-type]
        self.due = self.due or self.asked_to_stop or (self.every_steps is not None and done % self.every_steps == 0)
        # Inside an accumulated step, the gradient so far would be lost.
        is_step_done = done % int(trainer.num_training_batches) % trainer.accumulate_grad_batches == 0
        if self.due and is_step_done and not trainer.is_last_batch:
            self._save(trainer)
            self.saved_to_stop = self.asked_to_stop

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        """Stop here, after the last step was logged."""
        self._stop_if_asked(int(module.batches_done))  # type: ignore[arg-type]

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Save after every epoch."""
        self._save(trainer)
        self.saved_to_stop = self.asked_to_stop
        self._stop_if_asked(int(module.batches_done))  # type: ignore[arg-type]

    def _stop_if_asked(self, done: int) -> None:
        if self.saved_to_stop:
            raise Interrupted(
                f"stopped after {done} batches; continue with `bayesify train --resume {self.path.parent}`"
            )

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Restore the handler of Ctrl-C."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.asked_to_stop:  # a second Ctrl-C stops at once
            raise KeyboardInterrupt
        self.asked_to_stop = True

    def _save(self, trainer: L.Trainer) -> None:
        self.due = False
        part = self.path.with_suffix(".part")
        trainer.save_checkpoint(part, weights_only=False)
        if trainer.is_global_zero:
            os.replace(part, self.path)
        trainer.strategy.barrier()


class ProgressBar(callbacks.RichProgressBar):
    """Lightning's progress bar with only the loss and the validation metrics."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        """The loss, and the metrics of the last validation."""
        shown = ("loss", "val_nll", "val_accuracy", "val_mse")
        return {name: value for name, value in super().get_metrics(*args).items() if name in shown}


def _handle_interrupts(handler: Any) -> Any:
    """Install a handler and return the one before, or None in a thread, where signals can't be handled."""
    try:
        return signal.signal(signal.SIGINT, handler)
    except ValueError:
        return None


class CsvLog(Logger):
    """One row per logged step; a resumed run drops the rows after its checkpoint and appends."""

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        super().__init__()
        self.path = path
        if resume_at is None:
            self._write([])
        elif path.exists():
            with path.open(newline="") as file:
                self._write([row for row in csv.DictReader(file) if int(row["step"]) < resume_at])

    @property
    def name(self) -> str:
        """Empty: the log is at `path`."""
        return ""

    @property
    def version(self) -> str:
        """Empty: a run has one log."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignored: the recipe is in the run's folder."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row."""
        row = {"step": step, **{name: value for name, value in metrics.items() if name in COLUMNS}}
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)

    @rank_zero_only
    def _write(self, rows: list[dict[str, str]]) -> None:
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.path)
