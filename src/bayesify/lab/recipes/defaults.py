"""How each method is trained unless a recipe says otherwise: `finetune.yaml` from trained weights, `scratch.yaml`."""

from functools import cache
from importlib.resources import files
from typing import Any

import yaml


def training_of(method: str, trained: bool) -> dict[str, Any]:
    """The training of a method, from trained weights or from scratch.

    >>> training_of("LowRankEnsemble", trained=False)["kl"]
    'gradient'
    """
    defaults = _read("finetune.yaml" if trained else "scratch.yaml")
    return {**defaults["all"], **(defaults.get(method) or {})}


@cache
def _read(name: str) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = yaml.safe_load((files(__package__) / name).read_text())
    return values
