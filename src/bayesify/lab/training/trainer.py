"""Lightning's trainer for a recipe, without its advice that does not fit here."""

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
from lightning.pytorch.loggers import TensorBoardLogger

from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.runs import Run
from bayesify.lab.training.callbacks import Checkpoint, CsvLog, ProgressBar

ADVICE = (
    ".*does not have many workers",  # data in memory need none
    ".*is smaller than the logging interval",
    ".*have no `val_dataloader`",  # a recipe may have no validation rows
    ".*ended before the epoch ended and your dataloader is not resumable",  # ours is: see ShuffledBatches
    ".*LeafSpec",
)
"""What Lightning warns of that does not hold here."""


def make_trainer(recipe: Recipe, run: Run, *, batches: int, done: int, progress: bool) -> L.Trainer:
    """A trainer that logs and saves into a run's folder, for so many batches an epoch, of which some may be done."""
    options = recipe.training
    callbacks: list[L.Callback] = [Checkpoint(run.checkpoint_file, options.checkpoint_steps)]
    if options.patience is not None:
        callbacks.append(EarlyStopping("val_nll", patience=options.patience, verbose=False))
    bar = progress and sys.stderr.isatty()
    if bar:
        callbacks.append(ProgressBar(leave=True))
    return L.Trainer(
        **machine(recipe),
        max_epochs=options.epochs,
        gradient_clip_val=options.clip,
        accumulate_grad_batches=options.accumulate,
        sync_batchnorm=options.sync_batchnorm,
        logger=[CsvLog(run.log_file, done or None), TensorBoardLogger(run.folder, name="", version="tensorboard")],
        callbacks=callbacks,
        enable_progress_bar=bar,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        log_every_n_steps=min(10, batches),
        default_root_dir=run.folder,
    )


def machine(recipe: Recipe) -> dict[str, Any]:
    """What Lightning's trainer is told of devices."""
    options = recipe.training
    return {
        "accelerator": options.accelerator,
        "devices": options.devices,
        "num_nodes": options.nodes,
        "strategy": options.strategy,
        "precision": options.precision,
    }


def world(recipe: Recipe) -> int:
    """The number of processes, as Lightning counts them; what it refuses is told as an error of the recipe."""
    try:
        with quiet():
            return L.Trainer(**machine(recipe), logger=False, enable_checkpointing=False).world_size
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        wanted = {key: str(value) for key, value in machine(recipe).items()}
        raise RecipeError(f"training can't use {wanted} here: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice that does not fit here."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for advice in ADVICE:
                warnings.filterwarnings("ignore", advice)
            yield
    finally:
        logger.setLevel(level)
