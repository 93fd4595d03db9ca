"""What was found out about a network, once: whether a short way says the same as the long one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .layers import named_modules


@dataclass
class Verdicts:
    """Of a network of some structure; None is not tried yet."""

    structure: tuple[Any, ...]
    replays: bool | None = None
    repeats: bool | None = None
    channels_last: bool | None = None
    factors: bool | None = None
    at_once: dict[tuple[bool, ...] | None, bool] = field(default_factory=dict)
    """Of draws as copies of a batch, by which of its dimensions are of size 1, and (None) of other draws."""


_VERDICTS: WeakKeyDictionary[nn.Module, Verdicts] = WeakKeyDictionary()


def verdicts_of(model: nn.Module, structure: tuple[Any, ...]) -> Verdicts:
    """What is known of a model, unless it has another structure now.

    >>> model = nn.Linear(2, 1)
    >>> verdicts_of(model, ("as it is",)).repeats = True
    >>> verdicts_of(model, ("as it is",)).repeats, verdicts_of(model, ("changed",)).repeats
    (True, None)
    """
    known = _VERDICTS.get(model)
    if known is None or known.structure != structure:
        known = _VERDICTS[model] = Verdicts(structure)
    return known


def structure(network: nn.Module) -> tuple[object, ...]:
    """The types of its modules, and by their numbers the hooks that may change what these say.

    >>> structure(nn.Linear(2, 1)) == (nn.Linear, (), ())
    True
    """
    modules = list(named_modules(network).values())
    hooks = [(tuple(module._forward_pre_hooks), tuple(module._forward_hooks)) for module in modules]
    return (*map(type, modules), *(part for each in hooks for part in each))


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two ways say the same, but for rounding.

    >>> same(torch.tensor(1.0), torch.tensor(1.00001)), same(torch.tensor(1.0), torch.tensor(1.001))
    (True, False)
    """
    return torch.allclose(first, second, rtol=1e-4, atol=1e-5, equal_nan=True)
