"""`Targets`: what is predicted: classes, several labels, a class for each pixel, or real numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.lab.data.checks import require_numbers, require_words
from bayesify.lab.data.errors import DataError, suggest


class Targets(ABC):
    """What the targets of a data set are."""

    names: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of classes, labels or real targets, and of the network's outputs for them."""
        return len(self.names)

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """A description for JSON, which `targets_from_dict` reads."""


@dataclass(frozen=True)
class Classes(Targets):
    """Classes by name; targets are int64 (N,).

    >>> Classes(("cat", "dog")).count
    2
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        require_words("names", self.names, distinct=True)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "classes", "names": list(self.names)}


@dataclass(frozen=True)
class Labels(Targets):
    """Several labels, each yes or no; targets are uint8 (N, L) of 0 and 1.

    >>> Labels(("indoors", "people")).count
    2
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        require_words("names", self.names, distinct=True)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "labels", "names": list(self.names)}


@dataclass(frozen=True)
class Masks(Targets):
    """A class for each pixel; targets are uint8 (N, H, W).

    >>> Masks(("background", "road")).count
    2
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        require_words("names", self.names, distinct=True)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "masks", "names": list(self.names)}


@dataclass(frozen=True)
class Reals(Targets):
    """Real numbers; targets are float32 (N, K), standardised with the training mean and standard deviation.

    >>> price = Reals(("price",), mean=(100.0,), std=(10.0,))
    >>> price.restore(torch.tensor([[0.5]]), torch.tensor([[0.1]]))
    (tensor([[105.]]), tensor([[1.]]))
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        require_words("names", self.names, distinct=True)
        require_numbers("mean", self.mean, len(self.names))
        require_numbers("std", self.std, len(self.names), positive=True)

    def standardise(self, y: Tensor) -> Tensor:
        """Standardise targets that are in their own units."""
        mean, std = (torch.tensor(values, dtype=torch.float64, device=y.device) for values in (self.mean, self.std))
        return ((y.double() - mean) / std).float()

    def restore(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a predicted mean and standard deviation to the targets' own units."""
        scale = mean.new_tensor(self.std)
        return mean * scale + mean.new_tensor(self.mean), std * scale

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "reals", "names": list(self.names), "mean": list(self.mean), "std": list(self.std)}


KINDS = {"classes": Classes, "labels": Labels, "masks": Masks, "reals": Reals}
"""Every kind of targets by the name that describes it."""


def targets_from_dict(description: Mapping[str, Any]) -> Targets:
    """The targets that `to_dict` has described.

    Args:
        description: What `to_dict` returned.

    Returns:
        The targets.

    Raises:
        DataError: If it does not describe targets.

    >>> targets_from_dict({"kind": "classes", "names": ["cat", "dog"]})
    Classes(names=('cat', 'dog'))
    """
    targets: Targets = from_dict(KINDS, description, "targets")
    return targets


def from_dict(kinds: Mapping[str, Any], description: Mapping[str, Any], what: str) -> Any:
    """An object of the class named by `kind`, with the other entries as its fields and lists as tuples."""
    kind = str(description.get("kind"))
    if kind not in kinds:
        raise DataError(f"{what} of the kind {kind!r}: {suggest(kind, kinds)}")
    values = {key: _frozen(value) for key, value in description.items() if key != "kind"}
    try:
        return kinds[kind](**values)
    except TypeError as error:
        raise DataError(f"{what} of the kind {kind!r} can't be made from {sorted(values)}: {error}") from error


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
