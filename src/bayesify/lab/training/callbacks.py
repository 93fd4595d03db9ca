"""Lightning callbacks: atomic checkpoints, stopping on a signal, and a CSV log that continues after a resume."""

from __future__ import annotations

import csv
import io
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from bayesify.errors import BayesifyError
from bayesify.lab.run_files import open_new
from bayesify.lab.runs import Run, RunError, save_network

COLUMNS = (
    *("step", "epoch", "loss", "log_likelihood", "kl", "beta", "regulariser"),
    *("val_nll", "val_accuracy", "val_mse", "lr", "posterior_lr"),
)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what schedulers, containers and systemd send before they kill a process."""


class Interrupted(BayesifyError):
    """Training that was stopped by Ctrl-C or SIGTERM; its checkpoint is kept."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class Checkpoint(callbacks.Checkpoint):
    """Saves the state of training after every epoch, every `every_steps` batches, and on Ctrl-C or SIGTERM.

    Lightning runs checkpoint callbacks after all others, so that it saves their state too. A signal to one of several
    processes stops all of them after the same batch.
    """

    def __init__(self, path: Path, every_steps: int | None = None) -> None:
        self.path, self.every_steps = path, every_steps
        self.signal_number: int | None = None
        self.saved_to_stop = self.due = False
        self._handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """From here on, a signal stops training between two batches."""
        if threading.current_thread() is threading.main_thread():  # other threads can't handle signals
            self._handlers = {number: signal.signal(number, self._stop) for number in STOP_SIGNALS}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        """Save every `every_steps` batches and on a signal; after the last batch of an epoch, its end does."""
        done = int(module.batches_done)  # type: ignore[arg-type]
        asked = self._is_asked_to_stop(trainer)
        self.due = self.due or asked or (self.every_steps is not None and done % self.every_steps == 0)
        # Inside an accumulated step, the gradient so far would be lost.
        if self.due and is_step_done(trainer, module) and not trainer.is_last_batch:
            self._save(trainer)
            self.saved_to_stop = asked

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        """Stop here, after the last step was logged."""
        self._stop_if_saved(trainer, int(module.batches_done))  # type: ignore[arg-type]

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Save after every epoch."""
        asked = self._is_asked_to_stop(trainer)
        self._save(trainer)
        self.saved_to_stop = asked
        self._stop_if_saved(trainer, int(module.batches_done))  # type: ignore[arg-type]

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Restore the handlers of the signals."""
        self._restore_handlers()

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Restore the handlers of the signals, and pass on a signal that came after the last batch."""
        self._restore_handlers()
        if self.signal_number is not None:
            signal.raise_signal(self.signal_number)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _stop(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C stops at once. SIGTERM is often sent twice, for example by `timeout`, so it does not.
        if number == self.signal_number == signal.SIGINT:
            raise Interrupted(f"stopped at once; {self._how_to_continue}", number)
        self.signal_number = number

    def _is_asked_to_stop(self, trainer: L.Trainer) -> bool:
        """Whether any process got a signal."""
        asked = self.signal_number is not None
        return trainer.strategy.reduce_boolean_decision(asked, all=False) if trainer.world_size > 1 else asked

    def _stop_if_saved(self, trainer: L.Trainer, done: int) -> None:
        if not self.saved_to_stop:
            return
        if not trainer.is_global_zero:  # with another exit code, Lightning would kill the main process
            raise SystemExit(0)
        number = self.signal_number or signal.SIGTERM
        raise Interrupted(f"stopped after {done} batches; {self._how_to_continue}", number)

    @property
    def _how_to_continue(self) -> str:
        return f"continue with `bayesify train --resume {self.path.parent}`"

    def _save(self, trainer: L.Trainer) -> None:
        self.due = False
        part = self.path.with_suffix(".part")
        trainer.save_checkpoint(part, weights_only=False)
        if trainer.is_global_zero:
            os.replace(part, self.path)
        trainer.strategy.barrier()


class KeepEpochs(L.Callback):
    """Keeps the models of the last epochs, for analyses over checkpoints."""

    def __init__(self, run: Run, last: int) -> None:
        self.run, self.last = run, last

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write the model of an epoch to a file of its own."""
        epoch = trainer.current_epoch + 1
        if trainer.is_global_zero and epoch > int(trainer.max_epochs or 0) - self.last:
            network: nn.Module = module.network  # type: ignore[assignment]
            save_network(network, self.run.epoch_file(epoch))


def is_step_done(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Whether the last batch ended a step of the optimizer, which may accumulate several batches."""
    done = int(module.batches_done)  # type: ignore[arg-type]
    return done % int(trainer.num_training_batches) % trainer.accumulate_grad_batches == 0


class ProgressBar(callbacks.RichProgressBar):
    """Lightning's progress bar with only the loss and the validation metrics."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        """The loss, and the metrics of the last validation."""
        shown = ("loss", "val_nll", "val_accuracy", "val_mse")
        return {name: value for name, value in super().get_metrics(*args).items() if name in shown}


class CsvLog(L.Callback):
    """One row per logged step and per validation; a resumed run drops the rows after its checkpoint and appends.

    Lightning calls its loggers only after a checkpoint was saved, so that a process killed in between would lose a
    row. A callback writes it before: Lightning runs those that save checkpoints last.
    """

    def __init__(self, path: Path, every_steps: int, resume_at: int | None = None) -> None:
        self.path, self.every_steps = path, every_steps
        self._write([] if resume_at is None or not path.exists() else _rows_before(path, resume_at))

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        """Add a row with the terms of the loss, every `every_steps` steps."""
        terms: dict[str, Any] = module.logged  # type: ignore[assignment]
        if is_step_done(trainer, module) and trainer.global_step % self.every_steps == 0:
            self._add(trainer, {name: float(value) for name, value in terms.items()})

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Add a row with the metrics of a validation."""
        found = trainer.callback_metrics
        self._add(trainer, {name: float(value) for name, value in found.items() if name.startswith("val_")})

    def _add(self, trainer: L.Trainer, values: Mapping[str, float]) -> None:
        if trainer.is_global_zero:
            row = {"step": trainer.global_step - 1, "epoch": trainer.current_epoch, **values}
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerow(row)

    @rank_zero_only
    def _write(self, rows: list[dict[str, str]]) -> None:
        part = self.path.with_suffix(".part")
        with io.TextIOWrapper(open_new(part), encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.path)


def _rows_before(path: Path, step: int) -> list[dict[str, str]]:
    """The rows of a log before a step, without a last line that was not written to its end."""
    text = path.read_text(errors="replace")
    rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
    is_log = ",".join(COLUMNS).startswith(text[: len(",".join(COLUMNS))])
    if not is_log or not all(row.keys() == set(COLUMNS) and (row["step"] or "").isdecimal() for row in rows):
        raise RunError(
            f"{path}: not the log of this run: expected rows with the columns {', '.join(COLUMNS)}. Delete it to "
            "resume with an empty log"
        )
    return [row for row in rows if int(row["step"]) < step]
