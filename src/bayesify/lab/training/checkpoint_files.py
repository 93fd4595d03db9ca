"""The file of a checkpoint: written to the disk before it counts, and checked when it is read."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from bayesify.lab.runs import RunError

KEYS = {"batches_done": int, "global_step": int, "stopped": bool, "state_dict": dict}
"""What a checkpoint holds besides what Lightning needs, and of which type it is."""


class CheckpointFiles(TorchCheckpointIO):
    """Writes a checkpoint straight to its folder, and to the disk before it replaces the one before.

    Lightning's own writes it to the system's folder for temporary files first, which may be too small.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a file; what an error leaves of it is removed."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        try:
            with Path(path).open("wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            Path(path).unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error


def read_checkpoint(path: Path, module: nn.Module) -> dict[str, Any]:
    """Read a checkpoint without running anything in it, and raise unless it is one of this module's training."""
    try:
        with zipfile.ZipFile(path) as archive:  # as torch writes it
            damaged = archive.testzip()  # torch does not compare the checksums
        if damaged is not None:
            raise _not_usable(path, f"its part {damaged} is damaged")
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise _not_usable(
            path, f"it can't be read: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
        ) from error
    for key, kind in KEYS.items():
        if not isinstance(saved, dict) or not isinstance(saved.get(key), kind):
            raise _not_usable(path, f"it has no {key!r}")
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in saved["state_dict"].items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise _not_usable(
                path, f"{name} has shape {found.get(name)} in it, but {expected.get(name)} in the recipe's network"
            )
    return saved


def _not_usable(path: Path, reason: str) -> RunError:
    return RunError(f"{path}: not a checkpoint of this run: {reason}. Restore it, or delete it to train from the start")
