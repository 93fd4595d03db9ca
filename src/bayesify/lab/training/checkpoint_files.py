"""The file of a checkpoint: written to the disk before it counts, and checked when it is read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.plugins.io import TorchCheckpointIO

from bayesify.lab.run_files import open_new
from bayesify.lab.runs import Run, RunError
from bayesify.lab.training.checkpoint_contents import RECIPE_KEY, fault_of
from bayesify.lab.training.lightning_module import BayesianModule

PROGRAM_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, NotImplementedError),
    *(RecursionError, TypeError, ValueError),
)
"""What a pickle that was not written by torch can raise."""


class CheckpointFiles(TorchCheckpointIO):
    """Writes a checkpoint straight to its folder, and to the disk before it replaces the one before.

    Lightning's own writes it to the system's folder for temporary files first, which may be too small.

    Args:
        run: The run; the checkpoint gets the hash of its recipe.
    """

    def __init__(self, run: Run) -> None:
        self.recipe_hash = recipe_hash(run)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a file; what an error leaves of it is removed."""
        buffer = io.BytesIO()
        torch.save({**checkpoint, RECIPE_KEY: self.recipe_hash}, buffer)
        try:
            with open_new(Path(path)) as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            Path(path).unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error


def recipe_hash(run: Run) -> str:
    """A hash of the recipe as it is in the run's folder, so that it does not change with the version of bayesify."""
    values = yaml.safe_load(run.recipe_file.read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def read_checkpoint(run: Run, module: BayesianModule, batches: int, can_stop: bool = False) -> dict[str, Any]:
    """Read a run's checkpoint without running anything in it.

    Args:
        run: The run.
        module: The module that is to continue from it.
        batches: The number of batches in an epoch.
        can_stop: Whether a user's callback may have stopped training early.

    Returns:
        The contents.

    Raises:
        RunError: If the file is damaged, was edited, or is not of this run.
    """
    path = run.checkpoint_file
    try:
        _require_written_by_torch(path)
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, *PROGRAM_ERRORS) as error:
        raise _not_usable(path, f"it can't be read: {_first_line(error)}") from error
    fault = fault_of(saved, module, batches, recipe_hash(run), can_stop)
    if fault is not None:
        raise _not_usable(path, fault)
    return saved


def _require_written_by_torch(path: Path) -> None:
    """Raise if a part of the file is damaged, or asks for memory that it does not fill."""
    with zipfile.ZipFile(path) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise _not_usable(path, "its parts are compressed")
        damaged = archive.testzip()  # torch does not compare the checksums
        if damaged is not None:
            raise _not_usable(path, f"its part {damaged} is damaged")
        for name in archive.namelist():
            values = pickletools.genops(archive.read(name)) if name.endswith("data.pkl") else ()
            if any(isinstance(value, str) and value.split()[-1:] == ["bytearray"] for _, value, _ in values):
                raise _not_usable(path, "it asks for memory by bytearray, which no checkpoint does")


@contextmanager
def restoring(path: Path, trainer: L.Trainer) -> Iterator[None]:
    """Name the checkpoint in an error that is raised while Lightning restores it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        is_restoring = bool(trainer._checkpoint_connector._loaded_checkpoint)
        if not is_restoring or (isinstance(error, RuntimeError) and "state_dict" not in str(error)):
            raise  # such as too little memory on the device
        raise _not_usable(path, f"it can't be restored: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _not_usable(path: Path, reason: str) -> RunError:
    return RunError(f"{path}: not a checkpoint of this run: {reason}. Restore it, or delete it to train from the start")
