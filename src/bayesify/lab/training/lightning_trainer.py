"""Lightning's trainer for a recipe, without warnings that don't apply here."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping

from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.runs import Run
from bayesify.lab.training.callbacks import Checkpoint, CsvLog, ProgressBar
from bayesify.lab.training.checkpoint_files import CheckpointFiles
from bayesify.lab.training.loggers import make_logger

IRRELEVANT_WARNINGS = (
    ".*does not have many workers",  # data in memory need none
    ".*is smaller than the logging interval",
    ".*have no `val_dataloader`",  # a recipe may have no validation rows
    ".*ended before the epoch ended and your dataloader is not resumable",  # ours is: see ShuffledBatches
    ".*LeafSpec",
)
"""Warnings of Lightning that don't apply here."""


def make_trainer(
    recipe: Recipe, run: Run, *, batches: int, clip: float | None, resume_at: int | None, progress: bool
) -> L.Trainer:
    """A trainer that logs and saves to a run's folder; `batches` is per epoch, `resume_at` the step to go on from."""
    options = recipe.training
    log_every = min(10, batches)
    callbacks: list[L.Callback] = [
        CsvLog(run.log_file, log_every, resume_at),
        Checkpoint(run.checkpoint_file, options.checkpoint_steps),
    ]
    if options.patience is not None:
        callbacks.append(EarlyStopping("val_nll", patience=options.patience, verbose=False))
    bar = progress and sys.stderr.isatty()
    if bar:
        callbacks.append(ProgressBar(leave=True))
    trainer = L.Trainer(
        **device_options(recipe),
        max_epochs=options.epochs,
        gradient_clip_val=clip,
        accumulate_grad_batches=options.accumulate,
        sync_batchnorm=options.sync_batchnorm,
        logger=make_logger(recipe, run),
        callbacks=callbacks,
        plugins=[CheckpointFiles(run)],
        enable_progress_bar=bar,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        log_every_n_steps=log_every,
        default_root_dir=run.folder,
    )
    # Lightning's own handler of SIGTERM saves nothing, exits with code 0, and communicates with other processes in the
    # middle of whatever they are doing; there is no option to leave it out.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


def device_options(recipe: Recipe) -> dict[str, Any]:
    """The trainer's options about devices."""
    options = recipe.training
    return {
        "accelerator": options.accelerator,
        "devices": options.devices,
        "num_nodes": options.nodes,
        "strategy": options.strategy,
        "precision": options.precision,
    }


def number_of_processes(recipe: Recipe) -> int:
    """The number of training processes; options that Lightning refuses become a RecipeError."""
    try:
        with quiet_lightning():
            return L.Trainer(**device_options(recipe), logger=False, enable_checkpointing=False).world_size
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        options = {key: str(value) for key, value in device_options(recipe).items()}
        raise RecipeError(f"training can't use {options} here: {error}") from error


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hide Lightning's logs, and warnings that don't apply here."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for warning in IRRELEVANT_WARNINGS:
                warnings.filterwarnings("ignore", warning)
            yield
    finally:
        logger.setLevel(level)
