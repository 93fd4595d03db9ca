"""The default training of each method: `finetune.yaml` from trained weights, `scratch.yaml` from scratch."""

from functools import cache
from importlib.resources import files
from typing import Any

import yaml


def default_training(method: str, trained: bool) -> dict[str, Any]:
    """The default training options of a method, from trained weights or from scratch.

    >>> default_training("LowRankEnsemble", trained=False)["kl"]
    'gradient'
    """
    defaults = _defaults(trained)
    own = {key: value for key, value in (defaults.get(method) or {}).items() if key != "method"}
    return {**defaults["all"], **own}


def default_options(method: str, trained: bool) -> dict[str, Any]:
    """The options of a method whose defaults in recipes differ from those of its class."""
    return dict((_defaults(trained).get(method) or {}).get("method", {}))


def default_noise(trained: bool, real: bool) -> float:
    """The `noise` of methods, for classes or for real targets.

    >>> default_noise(trained=True, real=True)
    0.1
    """
    noise: float = _defaults(trained)["noise"]["reals" if real else "classes"]
    return noise


def _defaults(trained: bool) -> dict[str, dict[str, Any]]:
    return _read("finetune.yaml" if trained else "scratch.yaml")


@cache
def _read(name: str) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = yaml.safe_load((files(__package__) / name).read_text())
    return values
