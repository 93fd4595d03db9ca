"""What is predicted: one of some classes, or real numbers in their own units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.lab.data.errors import DataError, nearest


class Targets(ABC):
    """What the targets of a data set are."""

    names: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many classes or real numbers."""
        return len(self.names)

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything about the targets, for JSON; `targets_from_dict` reads it."""


@dataclass(frozen=True)
class Classes(Targets):
    """One of some named classes; y is int64 (N,).

    >>> Classes(("cat", "dog")).count
    2
    """

    names: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "classes", "names": list(self.names)}


@dataclass(frozen=True)
class Reals(Targets):
    """Real numbers; y is float32 (N, K), standardised with the mean and the deviation of the training split.

    >>> price = Reals(("price",), mean=(100.0,), std=(10.0,))
    >>> price.restore(torch.tensor([[0.5]]), torch.tensor([[0.1]]))
    (tensor([[105.]]), tensor([[1.]]))
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def standardise(self, y: Tensor) -> Tensor:
        """Targets in their own units as the network sees them."""
        mean, std = (torch.tensor(values, dtype=torch.float64, device=y.device) for values in (self.mean, self.std))
        return ((y.double() - mean) / std).float()

    def restore(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """A prediction's mean and standard deviation in the targets' own units."""
        scale = mean.new_tensor(self.std)
        return mean * scale + mean.new_tensor(self.mean), std * scale

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "reals", "names": list(self.names), "mean": list(self.mean), "std": list(self.std)}


def targets_from_dict(description: Mapping[str, Any]) -> Targets:
    """The targets that `to_dict` described.

    >>> targets_from_dict({"kind": "classes", "names": ["cat", "dog"]})
    Classes(names=('cat', 'dog'))
    """
    made: Targets = from_dict({"classes": Classes, "reals": Reals}, description, "targets")
    return made


def from_dict(kinds: Mapping[str, Any], description: Mapping[str, Any], what: str) -> Any:
    """An object of the class named by `kind`, with the other entries as its fields and lists as tuples."""
    kind = str(description.get("kind"))
    if kind not in kinds:
        raise DataError(f"{what} of the kind {kind!r}: {nearest(kind, kinds)}")
    values = {key: _frozen(value) for key, value in description.items() if key != "kind"}
    try:
        return kinds[kind](**values)
    except TypeError as error:
        raise DataError(f"{what} of the kind {kind!r} can't be made from {sorted(values)}: {error}") from error


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
