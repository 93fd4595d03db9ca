"""Third-party layers: whatever a module computes, a draw of it is that module with other tensors.

One draw for the whole batch is written into the layer's parameters while its own `forward` runs. Draws for rows run the
same `forward` under `torch.vmap`, with a weight for each draw; where a trial found that factors on activations do the
same as factors on the weight, they are used. A batch norm's rows are normalised together first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayesify.errors import BayesifyError
from bayesify.layers.base import BayesianLayer, Operation, Tensors, affine_site, layer_type, own_tensors, stand_in
from bayesify.layers.rows import Rows
from bayesify.methods.base import Perturbation, Role, Site


@dataclass(frozen=True)
class Traits:
    """What a trial of a layer found.

    `weight` and `bias` name the parameters that are drawn; `in_axis` is the dimension of an unknown layer's matrix that
    multiplies the input's features; `scales` says that factors on activations do the same as on the weight, `vmaps`
    that its `forward` runs under `torch.vmap`.
    """

    role: Role
    weight: str = "weight"
    bias: str | None = None
    in_axis: int | None = None
    features_last: bool = True
    scales: bool = False
    vmaps: bool = False


class Generated:
    """A Bayesian type created for a third-party type on first use; pickle stores what it was created from."""

    plain: ClassVar[type[nn.Module]]
    traits: ClassVar[Any] = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (self.plain, self.traits), self.__getstate__()


class OwnForward(Generated):
    """What third-party layers share: their own `forward` runs, with drawn tensors in the places of parameters."""

    runs_in_chunks = runs_again = False  # its forward may be random, or change its input in place
    traits: ClassVar[Traits]

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """One draw for the whole batch runs the layer's own forward once; several are applied row by row."""
        layer = cast(BayesianLayer, self)
        site = layer.site_of(layer)
        p = layer.perturbation(site)
        if p.size == 1 and not (layer.training and p.statistics):
            return self.own(layer.one_draw(site, p), input, *args, **kwargs)
        if args or kwargs:
            raise BayesifyError(
                f"layer {layer.site_name!r} ({self.plain.__name__}) was called with more than its input, whose rows "
                f"can't be followed; {layer.method} draws for each row. Use a method that draws once for a batch there"
            )
        return BayesianLayer.forward(layer, input)

    def own(self, tensors: Mapping[str, Tensor], *args: Any, in_training: bool | None = None, **kwargs: Any) -> Tensor:
        """The layer's own forward with other tensors, by the names that the method knows.

        It runs on a stand-in that shares all else with the layer, so that no other thread sees the tensors. What the
        forward stores is stored in the layer. `in_training` replaces the layer's mode.
        """
        layer, before = cast(nn.Module, self), dict(vars(self))
        named = {self.tensor_name(name): tensor for name, tensor in tensors.items()}
        given = {at: {name: named.get(name, t) for name, t in before[at].items()} for at in ("_parameters", "_buffers")}
        other = stand_in(layer, self.plain, **given, training=layer.training if in_training is None else in_training)
        output: Tensor = self.plain.forward(other, *args, **kwargs)
        vars(layer).update(_changes(before, vars(other), {"training", *given}))
        for place in given:
            before[place].update(_changes(before[place], vars(other)[place], set(named)))
        return output

    def tensor_name(self, name: str) -> str:
        """The layer's name for what the method knows as `weight` or `bias`; statistics have one name."""
        return (getattr(self.traits, name) or name) if name in ("weight", "bias") else name

    def assemble(self, values: Mapping[str, Tensors]) -> Tensors:
        return {self.tensor_name(name): value for part in values.values() for name, value in part.items()}


def _changes(before: dict[str, Any], after: dict[str, Any], apart: set[str]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if name not in apart and before.get(name, apart) is not value}


class ThirdPartyLayer(OwnForward, Operation):
    """Any layer whose rows are independent of each other."""

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **changes: Any) -> Tensor:
        """The layer's own forward; without a bias, its bias is zero."""
        tensors = {} if weight is None else {"weight": weight}
        if self.traits.bias is not None:
            own = cast(nn.Module, self)._parameters[self.traits.bias]
            assert own is not None
            tensors["bias"] = torch.zeros_like(own) if bias is None else bias
        return self.own(tensors, x)

    def by_row(self, x: Tensor, base: Mapping[str, Tensor], p: Perturbation, rows: Rows) -> Tensor:
        """Factors on activations where that is the same; otherwise a weight for each draw."""
        x = x.contiguous()  # its forward may view the input
        if self.traits.scales and all(part is None for part in (p.weight, p.kernel_scale, p.plus, p.variance)):
            return Operation.by_row(self, x, base, p, rows)
        each = {name: t.expand(p.size, *t.shape) for name, t in base.items()} | self.folded(base, p)
        by_draw = rows.order_by_draw(x, p.size).unflatten(0, (-1, p.size)).transpose(0, 1).contiguous()
        if self.traits.vmaps:  # else a step on a ResNet-20 of such layers takes 1.1 to 1.6 times as long, on an MLP 1.2
            y = torch.vmap(self.run, randomness="different")(by_draw, *each.values())
        else:
            y = torch.stack([self.run(*one) for one in zip(by_draw, *each.values(), strict=True)])
        return rows.undo_order(y.transpose(0, 1).flatten(0, 1))

    def prefers_folding(self, x: Tensor, weight: Tensor, p: Perturbation, rows: Rows) -> bool:
        """Never: a supported layer that this type inherits from would fold by what it computes itself."""
        return False


class ThirdPartyBatchNorm(OwnForward):
    """A batch norm that goes on to compute something of its own, such as an activation."""

    forward_of_norm: ClassVar[Any]

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **changes: Any) -> Tensor:
        """The batch norm alone."""
        layer: Any = stand_in(cast(nn.Module, self), self.plain, weight=weight, bias=bias, **changes)
        y: Tensor = self.forward_of_norm(layer, x)
        return y

    def by_row(self, x: Tensor, base: Mapping[str, Tensor], p: Perturbation, rows: Rows) -> Tensor:
        """The affine map of the batch norm by rows; then the rest: its own forward with a norm that changes nothing."""
        layer: Any = self
        y: Tensor = super().by_row(x, base, p, rows)  # type: ignore[misc]
        dtype = (y if layer.running_mean is None else layer.running_mean).dtype
        zeros = torch.zeros(layer.num_features, dtype=dtype, device=y.device)
        tensors = {"running_mean": zeros, "running_var": 1 - layer.eps + zeros}
        if layer.weight is not None:
            zeros = zeros.to(layer.weight.dtype)
            tensors |= {"weight": 1 + zeros, "bias": zeros}
        return self.own(tensors, y, in_training=False)


class UnknownLayer(Operation, BayesianLayer):
    """What a supported layer would define, found by a trial of the layer."""

    traits: ClassVar[Traits]

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        axis, names = cls.traits.in_axis, (cls.traits.weight, cls.traits.bias)
        site = affine_site(layer, partial(own_tensors, names=names))
        if axis is None:
            return site
        shape = site.base["weight"].shape
        return replace(site, in_size=shape[axis], out_size=shape[1 - axis], is_matrix=axis == 1)


_types: dict[Any, type[BayesianLayer]] = {}


def generated_type(
    kind: type[nn.Module], known: type[BayesianLayer] | None, traits: Traits | None
) -> type[BayesianLayer]:
    """The Bayesian type of a layer's type: of a supported layer's that it inherits all from, or by its traits."""
    if (kind, known, traits) not in _types:
        first: type = Generated
        attributes: dict[str, Any] = {"__module__": kind.__module__}
        if traits is not None:
            first = ThirdPartyLayer
            attributes |= {"traits": traits, "role": traits.role, "features_last": traits.features_last}
            attributes |= {"inputs_last": traits.in_axis == 1} if known is None else {}
        if traits is not None and known is not None and issubclass(known, _BatchNorm):
            first = ThirdPartyBatchNorm
            attributes["forward_of_norm"] = staticmethod(known.plain.forward)
        _types[kind, known, traits] = layer_type(kind, first, known or UnknownLayer, **attributes)
    return _types[kind, known, traits]


def _blank(kind: type[nn.Module], traits: Traits | None) -> nn.Module:
    """An instance to be filled, for pickle and `copy`."""
    from bayesify.layers import known_type

    made = generated_type(kind, known_type(kind), traits)
    return cast(nn.Module, made.__new__(made))


# Which types can be Bayesian at all.

HARMLESS = {"reset_parameters", "extra_repr"}
"""What a subclass may override and still compute the same."""
NAMES = {
    name
    for part in (*ThirdPartyBatchNorm.__mro__, *ThirdPartyLayer.__mro__, *UnknownLayer.__mro__)
    if part.__module__.partition(".")[0] == __name__.partition(".")[0]
    for name in (*vars(part), *getattr(part, "__annotations__", ()))
    if not name.startswith("__") and name not in ("weight", "bias", "forward", "extra_repr", *vars(nn.Module))
}
"""Names that a third-party layer must not use for its own attributes."""


def inherits_all(kind: type[nn.Module], known: type[nn.Module]) -> bool:
    """Whether a subclass overrides nothing that the layer's output depends on."""
    own = (name for part in kind.__mro__ if part not in known.__mro__ for name in vars(part))
    return not any(hasattr(known, name) and not name.startswith("__") and name not in HARMLESS for name in own)


def name_clash(layer: nn.Module) -> str | None:
    """Why a layer can't be Bayesian if it has an attribute with a name that Bayesian layers need, or None."""
    kind = type(layer)
    parts = [layer, *kind.__mro__[: -len(nn.Module.__mro__)]]
    taken = NAMES.intersection(name for part in parts for name in vars(part))
    return f"{kind.__name__} has an attribute {min(taken)!r}, a name that a Bayesian layer needs" if taken else None
