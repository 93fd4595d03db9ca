"""The forms of what networks return: the tensor that matters, and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor


class Named(NamedTuple):
    """A named tuple whose first tensor is not the one that matters."""

    features: Tensor
    logits: Tensor


@dataclass
class Output:
    """An output as of libraries of transformers."""

    loss: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Form:
    """A form of output."""

    make: Callable[[Tensor, Tensor], Any]
    """From the tensor that matters, and from the other."""
    main: Callable[[Any], Tensor]
    other: Callable[[Any], Tensor | None]
    is_known: bool = True
    """Whether bayesify says that it finds the tensor that matters by itself."""


FORMS: dict[str, Form] = {
    "tensor": Form(lambda y, other: y, lambda out: out, lambda out: None),
    "tuple": Form(lambda y, other: (y, other), lambda out: out[0], lambda out: out[1]),
    "list in a tuple": Form(lambda y, other: (y, [other]), lambda out: out[0], lambda out: out[1][0]),
    "dict": Form(
        lambda y, other: {"features": other, "logits": y}, lambda out: out["logits"], lambda out: out["features"]
    ),
    "named tuple": Form(lambda y, other: Named(other, y), lambda out: out.logits, lambda out: out[0]),
    "dataclass": Form(lambda y, other: Output(other, y), lambda out: out.logits, lambda out: out.loss),
    "second of a tuple": Form(lambda y, other: (other, y), lambda out: out[1], lambda out: out[0], is_known=False),
    "entry of a dict": Form(
        lambda y, other: {"other": other, "scores": y}, lambda out: out["scores"], lambda out: out["other"], False
    ),
    "attribute": Form(
        lambda y, other: SimpleNamespace(other=other, mean=y), lambda out: out.mean, lambda out: out.other, False
    ),
}
BESIDE = ("features", "loss", "transposed", "head", "head in training", "mixed", "reads")
"""What the other tensor is: sound ones, the loss that is one number, or wrong ones, of mixed rows or a read weight."""
