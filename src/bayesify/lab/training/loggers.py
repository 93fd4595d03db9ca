"""Lightning's loggers by name: where training sends its numbers, beside the run's own `metrics.csv`."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.runs import Run

PROJECT = "bayesify"
"""The project or experiment on a tracker, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME names another."""
TRACKED = "tracked_as"
"""The entry of `run.json` with the id that the tracker gave, by which a resumed run continues there."""


def require_logger(name: str) -> None:
    """Raise unless a logger's package is installed, and wandb knows whom it logs for."""
    if name not in ("wandb", "mlflow"):
        return
    try:
        package = importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(f"training.logger={name!r} needs the package {name} ({error}): pip install {name}") from error
    if name == "wandb":
        settings = package.setup().settings
        if settings.mode == "online" and not (settings.api_key or package.api.api_key):
            raise RecipeError(
                "training.logger='wandb' has no account to log to: run `wandb login`, or set WANDB_MODE=offline"
            )


def make_logger(recipe: Recipe, run: Run) -> Logger | bool:
    """The logger that a recipe names, for Lightning's trainer; False for `csv`, which every run has.

    Args:
        recipe: The recipe; the trackers get its values.
        run: The run, whose folder takes what a logger writes to files.

    Returns:
        The logger.

    Raises:
        RecipeError: If the tracker can't be reached, or does not know the run that is to be continued.
    """
    name = recipe.training.logger
    if name == "csv":
        return False
    if name == "tensorboard":
        return TensorBoardLogger(run.folder, name="", version="tensorboard")
    try:
        logger = _wandb_logger(run) if name == "wandb" else _mlflow_logger(run)
        logger.log_hyperparams(recipe.plain())
    except Exception as error:  # each tracker has errors of its own, and its own ways to fail
        raise RecipeError(f"training.logger={name!r}: {error}") from error
    _note_id(run, logger)
    return logger


def _wandb_logger(run: Run) -> WandbLogger:
    return WandbLogger(
        name=run.name,
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run.facts.get(TRACKED) or uuid.uuid4().hex[:12],
        save_dir=os.environ.get("WANDB_DIR", "."),  # not in the run's folder, as wandb makes symbolic links
    )


def _mlflow_logger(run: Run) -> MLFlowLogger:
    folder = run.folder.absolute()
    server = os.environ.get("MLFLOW_TRACKING_URI")
    return MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
        run_name=run.name,
        run_id=run.facts.get(TRACKED),
        tracking_uri=server or f"sqlite:///{folder / 'mlflow.db'}",
        artifact_location=None if server else (folder / "mlruns").as_uri(),
    )


@rank_zero_only
def _note_id(run: Run, logger: Any) -> None:
    run.note(**{TRACKED: logger.run_id if isinstance(logger, MLFlowLogger) else logger.experiment.id})


@contextmanager
def ended(logger: Logger | None) -> Iterator[None]:
    """End what a tracker has begun, so that the next network of this process does not continue it."""
    code = 1
    try:
        yield
        code = 0
    finally:
        if isinstance(logger, WandbLogger):  # of which other processes have a stand-in that does nothing
            logger.experiment.finish(exit_code=code)
