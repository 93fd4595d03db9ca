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
    defaults = _defaults(trained)
    own = {key: value for key, value in (defaults.get(method) or {}).items() if key != "method"}
    return {**defaults["all"], **own}


def options_of(method: str, trained: bool) -> dict[str, Any]:
    """The options of a method that are not its own defaults, because of what it starts from."""
    return dict((_defaults(trained).get(method) or {}).get("method", {}))


def _defaults(trained: bool) -> dict[str, dict[str, Any]]:
    return _read("finetune.yaml" if trained else "scratch.yaml")


@cache
def _read(name: str) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = yaml.safe_load((files(__package__) / name).read_text())
    return values
