"""The default training of each method: `finetune.yaml` from trained weights, `scratch.yaml` from scratch.

Recipes with `defaults: papers` have those of `papers_finetune.yaml` and `papers_scratch.yaml` instead.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

BATCH_SIZE = 128


def default_training(
    method: str, trained: bool, *, papers: bool = False, batch_size: int = BATCH_SIZE
) -> dict[str, Any]:
    """The default training options of a method, from trained weights or from scratch.

    >>> default_training("LowRankEnsemble", trained=False)["kl"]
    'gradient'
    >>> default_training("EMP", trained=False, papers=True, batch_size=256)["weight_decay"]  # 2 · 0.001 / batch size
    7.8125e-06
    """
    defaults = _defaults(trained, papers)
    own = {key: value for key, value in (defaults.get(method) or {}).items() if key != "method"}
    decay = own.pop("weight_decay_times_batch", None)
    return {**defaults["all"], **own, **({} if decay is None else {"weight_decay": decay / batch_size})}


def default_options(
    method: str, trained: bool, *, papers: bool = False, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The options of a method whose defaults in recipes differ from those of its class.

    They may depend on the kind of posterior that is given.

    >>> default_options("Rank1", False, papers=True, given={"posterior": "cauchy"})["dropout_rate"]
    1e-06
    """
    defaults = _defaults(trained, papers)
    parts = [defaults.get(name) or {} for name in (method, f"{method} {(given or {}).get('posterior')}")]
    return {key: value for part in parts for key, value in part.get("method", {}).items()}


def default_noise(trained: bool, real: bool) -> float:
    """The `noise` of methods, for classes or for real targets.

    >>> default_noise(trained=True, real=True)
    0.1
    """
    noise: float = _defaults(trained, False)["noise"]["reals" if real else "classes"]
    return noise


def _defaults(trained: bool, papers: bool) -> dict[str, dict[str, Any]]:
    return _read(f"{'papers_' if papers else ''}{'finetune' if trained else 'scratch'}.yaml")


@cache
def _read(name: str) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = yaml.safe_load((files(__package__) / name).read_text())
    return values
