"""What happens beside the steps: checkpoints that are whole or not there, Ctrl-C, and a log that survives a resume."""

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
    """Training that was asked to end before its time; its checkpoint is kept."""


class Checkpoint(callbacks.Checkpoint):
    """Writes the state of training after every epoch, every so many steps, and when Ctrl-C is pressed.

    It is one of Lightning's checkpoint callbacks, which come after all others, so it saves what those did.
    """

    def __init__(self, path: Path, every_steps: int | None = None) -> None:
        self.path, self.every_steps = path, every_steps
        self.asked_to_stop = self.saved_to_stop = self.due = False
        self._before: Any = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """From here on Ctrl-C ends training between two batches."""
        self._before = _handle_interrupts(self._stop)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        """Save every so many steps, and on Ctrl-C; after an epoch's last batch its end does."""
        done = int(module.batches_done)  # type: ignore[arg-type]
        self.due = self.due or self.asked_to_stop or (self.every_steps is not None and done % self.every_steps == 0)
        # Between the batches of one accumulated step the gradient so far would be lost.
        closed = done % int(trainer.num_training_batches) % trainer.accumulate_grad_batches == 0
        if self.due and closed and not trainer.is_last_batch:
            self._save(trainer)
            self.saved_to_stop = self.asked_to_stop

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        """End here, where the last step has been logged."""
        self._stop_if_asked(int(module.batches_done))  # type: ignore[arg-type]

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Save after every epoch."""
        self._save(trainer)
        self.saved_to_stop = self.asked_to_stop
        self._stop_if_asked(int(module.batches_done))  # type: ignore[arg-type]

    def _stop_if_asked(self, done: int) -> None:
        if self.saved_to_stop:
            raise Interrupted(f"stopped after {done} batches; `bayesify train --resume {self.path.parent}` continues")

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Ctrl-C is Python's own again."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.asked_to_stop:  # a second time: at once
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
    """Lightning's, with what a person watches."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        """The loss, and how good the last validation was."""
        shown = ("loss", "val_nll", "val_accuracy", "val_mse")
        return {name: value for name, value in super().get_metrics(*args).items() if name in shown}


def _handle_interrupts(handler: Any) -> Any:
    """The handler before, or None where signals can't be handled: in another thread than the main one."""
    try:
        return signal.signal(signal.SIGINT, handler)
    except ValueError:
        return None


class CsvLog(Logger):
    """One row for each logged step; a resumed run drops the rows after its checkpoint and goes on."""

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
        """Nothing: the path says where the log is."""
        return ""

    @property
    def version(self) -> str:
        """Nothing: a run has one log."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The recipe is beside the log."""

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
