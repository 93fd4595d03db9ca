"""Layers of other people: whatever a module computes, a draw of it is that module with other tensors.

One draw for the whole batch is written into the layer's parameters while its own `forward` runs. Draws for rows run the
same `forward` under `torch.vmap`, with a weight for each draw; where factors on activations were found to do the same
as factors on the weight, they are used. A batch norm's rows are normalised together first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import BayesifyError
from ..family import Perturbation, Role, Site
from .base import BayesianLayer, affine_site
from .kernel import Kernel, _chosen
from .rows import Rows


@dataclass(frozen=True)
class Traits:
    """What a trial of a layer showed.

    `weight` and `bias` name the parameters that are drawn; `in_axis` is the dimension of an unknown layer's matrix that
    meets the input's features; `scales` says that factors on activations do the same as factors on the weight, `vmaps`
    that its `forward` runs under `torch.vmap`.
    """

    role: Role
    weight: str = "weight"
    bias: str | None = None
    in_axis: int | None = None
    features_last: bool = True
    scales: bool = False
    vmaps: bool = False


class Derived(BayesianLayer):
    """A Bayesian type made for a layer's own type when it is first needed; it is pickled as what it was made from."""

    traits: ClassVar[Traits | None] = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (self.plain, self.traits), self.__getstate__()


class OwnForward(Derived):
    """A layer whose own `forward` runs with drawn tensors in the places of its parameters."""

    takes_some_rows = False  # it would be called again for the gradient, and may be random
    traits: ClassVar[Traits]

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        return replace(super().site_of(layer), kind=cls.plain.__name__)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """One draw for the whole batch runs the layer's own forward once; several are applied row by row."""
        perturbation = self.perturbation()
        if perturbation.is_shared and not self._updates(perturbation):
            return self.own(self.folded(perturbation), input, *args, **kwargs)
        if args or kwargs:
            raise BayesifyError(
                f"layer {self.site_name!r} ({self.plain.__name__}) was called with more than its input, whose rows "
                f"can't be followed; {self.family} draws for each row. Use a method that draws once for a batch there"
            )
        return self._by_rows(input, perturbation)

    def own(self, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The layer's own forward with other tensors, by the names that the family knows."""
        named = {self.tensor_name(name): tensor for name, tensor in tensors.items()}
        parameters = {name: tensor for name, tensor in named.items() if name in self._parameters}
        buffers = {name: tensor for name, tensor in named.items() if name in self._buffers}
        before = {name: self._parameters[name] for name in parameters}, {name: self._buffers[name] for name in buffers}
        self._parameters.update(cast(Any, parameters))
        self._buffers.update(buffers)
        try:
            output: Tensor = self.plain.forward(self, *args, **kwargs)
            return output
        finally:
            self._parameters.update(before[0])
            self._buffers.update(before[1])

    def tensor_name(self, name: str) -> str:
        return (getattr(self.traits, name) or name) if name in ("weight", "bias") else name


class Custom(OwnForward):
    """Any layer whose rows do not meet."""

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """The layer's own forward; without a bias, its bias is zero."""
        tensors = {} if weight is None else {"weight": weight}
        if self.traits.bias is not None:
            tensors["bias"] = torch.zeros_like(self._parameters[self.traits.bias]) if bias is None else bias  # type: ignore[arg-type]
        return self.own(tensors, x)

    def perturbed(self, x: Tensor, p: Perturbation, rows: Rows, base: Mapping[str, Tensor]) -> Tensor:
        """Factors on activations where that is the same; otherwise a weight for each draw."""
        p = p if p.choice is None else _chosen(p)
        if self.traits.scales and all(part is None for part in (p.weight, p.patch_scale, p.plus, p.variance)):
            return Kernel.term(self, x, p, rows, base)
        each = [self.folded(p, draw) for draw in range(p.size)]
        stacked = {name: torch.stack([values[name] for values in each]) for name in each[0]}
        return self.per_draw(x, stacked["weight"], stacked.get("bias"), rows)

    def grouped(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        draws = weight.shape[0]
        by_draw = h.reshape(h.shape[0] // draws, draws, *h.shape[1:]).transpose(0, 1).contiguous()
        if self.traits.vmaps:
            dims = (0, 0, None if bias is None else 0)
            y = torch.vmap(self.run, dims, randomness="different")(by_draw, weight, bias)
        else:
            biases = [None] * draws if bias is None else bias.unbind()
            y = torch.stack([self.run(*each) for each in zip(by_draw, weight, biases, strict=True)])
        return y.transpose(0, 1).flatten(0, 1)

    # A supported layer that this one's type inherits from may say these otherwise, of what it computes itself.
    term, cheaper, prepare, scaled_op = Kernel.term, Kernel.cheaper, Kernel.prepare, Kernel.scaled_op
    settled = Kernel.settled


class CustomBatchNorm(OwnForward, _BatchNorm):
    """A batch norm that goes on to compute something of its own, such as an activation."""

    def perturbed(self, x: Tensor, p: Perturbation, rows: Rows, base: Mapping[str, Tensor]) -> Tensor:
        return self.rest(super().perturbed(x, p, rows, base))

    def rest(self, y: Tensor) -> Tensor:
        """What the layer does to the output of its batch norm: its own forward with a norm that changes nothing."""
        kind = (y if self.running_mean is None else self.running_mean).dtype
        zeros = torch.zeros(self.num_features, dtype=kind, device=y.device)
        tensors = {"running_mean": zeros, "running_var": 1 - self.eps + zeros}
        if self.weight is not None:
            zeros = zeros.to(self.weight.dtype)
            tensors |= {"weight": 1 + zeros, "bias": zeros}
        training = self.training
        self.training = False
        try:
            return self.own(tensors, y)
        finally:
            self.training = training


class Unknown(BayesianLayer):
    """What a supported layer would say of itself, said by a trial of the layer."""

    traits: ClassVar[Traits]

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        axis, site = cls.traits.in_axis, affine_site(layer, (cls.traits.weight, cls.traits.bias))
        if axis is None:
            return site
        shape = site.base["weight"].shape
        return replace(site, in_size=shape[axis], out_size=shape[1 - axis], is_matrix=axis == 1)

    def base(self) -> dict[str, Tensor]:
        return dict(self.plain_site().base)

    def fold(self, weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
        across, down = (in_scale, out_scale) if self.traits.in_axis == 1 else (out_scale, in_scale)
        weight = weight if across is None else weight * across.unsqueeze(-2)
        return weight if down is None else weight * down.unsqueeze(-1)


_types: dict[tuple[type[nn.Module], type[BayesianLayer] | None, Traits | None], type[BayesianLayer]] = {}


def derived_type(
    kind: type[nn.Module], known: type[BayesianLayer] | None, traits: Traits | None
) -> type[BayesianLayer]:
    """The Bayesian type of a layer's type: of a supported layer's that it inherits all from, or by its traits."""
    key = (kind, known, traits)
    if key not in _types:
        _types[key] = _derive(*key)
    return _types[key]


def _derive(kind: type[nn.Module], known: type[BayesianLayer] | None, traits: Traits | None) -> type[BayesianLayer]:
    if traits is None:
        assert known is not None
        return _made(kind, (Derived, known, kind), {})
    way = CustomBatchNorm if known is not None and issubclass(known, _BatchNorm) else Custom
    said: dict[str, Any] = {"traits": traits, "role": traits.role, "features_last": traits.features_last}
    if traits.weight != "weight":
        said["weight"] = property(lambda self: self._parameters[traits.weight])
    return _made(kind, (way, known or Unknown, kind), said)


def _made(kind: type[nn.Module], bases: tuple[type, ...], said: dict[str, Any]) -> type[BayesianLayer]:
    body = {"plain": kind, "__module__": kind.__module__, "__doc__": f"`{kind.__name__}` under a perturbation."}
    return cast(type[BayesianLayer], type(f"Bayesian{kind.__name__}", bases, body | said))


def _blank(kind: type[nn.Module], traits: Traits | None) -> nn.Module:
    """An instance to be filled, for pickle and `copy`."""
    from . import known_type

    made = derived_type(kind, known_type(kind), traits)
    return cast(nn.Module, made.__new__(made))
