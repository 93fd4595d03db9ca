"""Images to be written to files, and what was read of them."""

from __future__ import annotations

import numpy as np
import torch

from bayesify.lab.data import Data

LABELS = np.arange(40, dtype=np.uint8) % 4


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)


def all_raw(data: Data, split: str = "train") -> torch.Tensor:
    rows = getattr(data, split)
    raw: torch.Tensor = rows.raw(torch.arange(len(rows)))
    return raw
