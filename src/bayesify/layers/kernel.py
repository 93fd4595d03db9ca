"""A weight under a posterior: what its family sees of it, and how a draw of it is applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..family import Draws, Elementwise, Family, Perturbation, Site, precise, whole
from .drawing import drawn_for_call
from .elements import MOST_ELEMENTS
from .posterior import Posterior
from .rows import Rows
from .scope import Scope
from .turns import by_turns, goes_by_turns, of_draw

Factors = tuple[Tensor | None, Tensor | None]
"""Of a layer's input and of its output."""


class Kernel:
    """A weight, with its bias, whose draws a family makes; most layers are one, some hold several.

    A kernel says how it runs with other tensors (`run`), how factors fold into its weight (`fold`), and how several
    draws are applied at once (`grouped`).
    """

    family: Family
    scope: Scope
    site_name: str
    suffix: str = ""
    """What stands behind the names of its tensors, in the layer and in the posterior."""
    posterior: Posterior
    weight: Any
    bias: Any

    def tensor_name(self, name: str) -> str:
        """The name in the layer of what the family knows as `weight`, `bias` or a statistic."""
        return name + self.suffix

    def plain_site(self) -> Site:
        """What a family sees of the kernel without its posterior."""
        raise NotImplementedError

    def base(self) -> dict[str, Tensor]:
        """Its weight and, if there is one, its bias."""
        return dict(self.plain_site().base)

    def added(self) -> dict[str, Tensor]:
        """The tensors of its posterior by the names that the family knows."""
        named = self.posterior.tensors()
        if not self.suffix:
            return named
        return {name.removesuffix(self.suffix): t for name, t in named.items() if name.endswith(self.suffix)}

    def site(self) -> Site:
        """What the family sees of this kernel."""
        return replace(self.plain_site(), posterior=self.added())

    def perturbation(self) -> Perturbation:
        """The perturbation of this call of the model."""
        return drawn_for_call(self)

    @property
    def draws_factors(self) -> bool:
        """Whether its draws are factors and nothing else, all of which it uses."""
        return self.family.factors_only and type(self).settled is Kernel.settled

    @property
    def draws_elements(self) -> bool:
        """Whether a draw of it is a few tensors, whose elements are drawn one by one."""
        if self.weight is None or self.weight.numel() > MOST_ELEMENTS or not self.family.elements:
            return False
        tensors = [whole(tensor) for tensor in (self.weight, getattr(self, "bias", None)) if tensor is not None]
        own = all(isinstance(tensor, nn.Parameter) for tensor in tensors)  # or a hook may make them later in the call
        return own and type(self).settled is Kernel.settled

    def drawn(self, draws: Draws) -> Perturbation:
        """What the family draws, with every entry drawn that the layer will use, unless rows take turns."""
        p = self.family.draw(self.site(), draws)
        return by_turns(self, p) or self.settled(p)

    def every_draw(self, draws: Draws) -> Perturbation:
        """What the family draws, whole, with tensors for each draw."""
        p = Kernel.settled(self, self.family.draw(self.site(), draws))
        return p if p.choice is None else _chosen(p)

    def settled(self, p: Perturbation) -> Perturbation:
        """Draw what is still to be drawn element by element."""
        if isinstance(p.weight, Elementwise):
            p = replace(p, weight=p.weight.all(tuple(self.weight.shape)))
        if isinstance(p.in_scale, Elementwise):
            p = replace(p, in_scale=p.in_scale.all((self.plain_site().in_size or 0,)))
        return p

    def folded(self, perturbation: Perturbation, draw: int = 0) -> dict[str, Tensor]:
        """The ordinary layer's tensors under one draw; folded in at least single precision, then cast."""
        if goes_by_turns(perturbation):
            perturbation, draw = of_draw(self, perturbation, draw)
        values = self._tensors_of(perturbation, draw, self.base())
        if perturbation.plus is not None:
            for name, change in self._tensors_of(perturbation.plus, draw, {}).items():
                values[name] = values[name] + change
        if perturbation.variance is not None:
            for name, variance in self._tensors_of(perturbation.variance, draw, {}).items():
                values[name] = values[name] + variance.sqrt() * torch.randn_like(variance)
        values = {name: value.to(getattr(self, name).dtype) for name, value in values.items()}
        for name, statistic in (perturbation.statistics or {}).items():
            values[name] = _at(statistic, draw)
        return values

    def folded_each(self, p: Perturbation) -> dict[str, Tensor]:
        """The tensors that draws change, each with a leading G; of draws that are functions of their own."""
        assert p.choice is None and p.plus is None and p.variance is None
        p = self.without_patches(p)
        weight, in_scale = _tensor(p.weight), _tensor(p.in_scale)
        values = {name: tensor for name, tensor in (("weight", weight), ("bias", p.bias)) if tensor is not None}
        if in_scale is not None or p.out_scale is not None:
            base = values["weight"] if "weight" in values else self.base()["weight"].unsqueeze(0)
            values["weight"] = self.fold(precise(base), in_scale, p.out_scale)
        values = {name: value.to(getattr(self, name).dtype) for name, value in values.items()}
        values |= dict(p.statistics or {})
        return {name: value.expand(p.size, *value.shape[1:]) for name, value in values.items()}

    def without_patches(self, p: Perturbation) -> Perturbation:
        """The same draws with a weight for each in place of factors of patches."""
        if p.patch_scale is None:
            return p
        base = self.base()["weight"]
        weight = precise(base) * p.patch_scale.reshape(-1, 1, *base.shape[1:])
        return replace(p, weight=self.fold(weight, None, p.out_scale), patch_scale=None, out_scale=None)

    def _tensors_of(self, part: Perturbation, draw: int, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = dict(base)
        if part.patch_scale is not None:
            values["weight"] = precise(values["weight"]) * _at(part.patch_scale, draw).reshape(self.weight.shape[1:])
        if part.weight is not None:
            values["weight"] = _at(part.weight, draw)
        if part.bias is not None:
            values["bias"] = _at(part.bias, draw)
        if part.in_scale is not None or part.out_scale is not None:
            weight = precise(values["weight"])
            values["weight"] = self.fold(weight, _at(part.in_scale, draw), _at(part.out_scale, draw))
        return values

    def on(self, rows: Rows) -> Callable[[Tensor], Tensor]:
        """The kernel as a function, to be called often: this call's draws are taken to the rows once."""
        p, base = self._taken_to(rows, self.perturbation()), self.base()
        return lambda x: self.perturbed(x, p, rows, base)

    def _taken_to(self, rows: Rows, p: Perturbation) -> Perturbation:
        p = p if p.choice is None else _chosen(p)
        weight, in_scale = _tensor(p.weight), _tensor(p.in_scale)
        return replace(
            p,
            in_scale=None if in_scale is None else rows.spread(in_scale),
            out_scale=None if p.out_scale is None else rows.spread(p.out_scale),
            weight=None if weight is None else weight.to(self.weight.dtype),
            bias=rows.spread(p.bias) if p.bias is not None and weight is None else p.bias,
            plus=None if p.plus is None else self._taken_to(rows, p.plus),
        )

    def perturbed(self, x: Tensor, p: Perturbation, rows: Rows, base: Mapping[str, Tensor]) -> Tensor:
        """The layer's output with a draw per row: the main term and what flipout or local noise adds."""
        h = self.prepare(x, p, rows)
        y = self.term(h, p, rows, base)
        if p.plus is not None:
            y = y + self.term(h, p.plus, rows, {})
        if p.variance is not None:
            variance = self.term(self.squared(h), p.variance, rows, {})
            y = y + variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt() * torch.randn_like(variance)
        return y

    def term(self, h: Tensor, p: Perturbation, rows: Rows, base: Mapping[str, Tensor]) -> Tensor:
        """(op(h ∘ in_scale; weight)) ∘ out_scale + bias, row by row."""
        p = self.without_patches(p if p.choice is None else _chosen(p))
        p = self.cheaper(h, p, rows)
        weight, in_scale = _tensor(p.weight), _tensor(p.in_scale)
        bias = p.bias if p.bias is not None else _shared(base.get("bias"))
        draws = 1 if weight is None else weight.shape[0]
        direct = (draws == 1 or p.out_scale is None) and (bias is None or bias.shape[0] in (1, draws))
        inner = bias.to(self.weight.dtype) if direct and bias is not None else None
        if weight is None or draws == 1:
            weight = base["weight"] if weight is None else weight.to(self.weight.dtype).squeeze(0)
            inner = None if inner is None else inner.squeeze(0)  # not [0], whose gradient is written into zeros
            y = self.scaled_op(h, weight, inner, (in_scale, p.out_scale), rows)
        else:
            weight = weight.to(self.weight.dtype)
            h = h if in_scale is None else self.scale_in(h, rows.spread(in_scale))
            y = self.per_draw(h, weight, inner, rows)
            y = y if p.out_scale is None else self.scale_out(y, rows.spread(p.out_scale))
        return y if direct or bias is None else y + self.aligned(rows.spread(bias), y)

    # What a kernel says of itself.

    takes_some_rows: ClassVar[bool] = False
    """Whether it can be given the weights of some rows at a time."""
    features_last: ClassVar[bool] = False
    """Whether an input is (batch, …, features) rather than (batch, channels, …)."""
    least_dims: ClassVar[int] = 2
    """The dimensions of a batch with no further ones, such as time."""

    def is_unbatched(self, x: Tensor) -> bool:
        """Whether an input has no batch dimension."""
        return False

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The ordinary layer with other tensors."""
        raise NotImplementedError

    def fold(self, weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
        """One weight times its factors, or G weights times those of G draws."""
        raise NotImplementedError

    def prepare(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        """What comes before the part that is linear in the weight."""
        return x

    def op(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The part that is linear in the weight, with one weight."""
        return self.run(h, weight, bias)

    def scaled_op(self, h: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors, rows: Rows) -> Tensor:
        """`op` with one weight between factors per row, then the bias."""
        in_scale, out_scale = factors
        h = h if in_scale is None else self.scale_in(h, rows.spread(in_scale))
        if out_scale is None:
            return self.op(h, weight, bias)
        y = self.scale_out(self.op(h, weight, None), rows.spread(out_scale))
        return y if bias is None else y + self.aligned(bias.unsqueeze(0), y)

    def squared(self, h: Tensor) -> Tensor:
        """The input whose `op` with variances is the output's variance."""
        return h.square()

    def cheaper(self, h: Tensor, p: Perturbation, rows: Rows) -> Perturbation:
        """The same perturbation in the form that costs least."""
        return p

    def per_draw(self, h: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
        """`op` with G weights: draw g on its rows."""
        draws = weight.shape[0]
        if bias is not None and bias.shape[0] == 1:
            bias = bias.expand(draws, *bias.shape[1:])
        rest = rows.batch % draws
        if rows.repeat == 1 and rest:
            turns = h.split([rows.batch - rest, rest])
            last = self.grouped(turns[1], weight[:rest], None if bias is None else bias[:rest])
            return torch.cat([self.grouped(turns[0], weight, bias), last]) if len(turns[0]) else last
        return rows.restore(self.grouped(rows.arrange(h, draws), weight, bias), draws)

    def grouped(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`op` with G weights on rows of which row j is served by draw j modulo G."""
        raise NotImplementedError

    def aligned(self, values: Tensor, y: Tensor) -> Tensor:
        """Values (rows, features) shaped and cast to meet the layer's input or output."""
        middle = [1] * (y.dim() - values.dim())
        shape = (values.shape[0], *middle, *values.shape[1:]) if self.features_last else (*values.shape, *middle)
        return values.reshape(shape).to(y.dtype)

    def scale_in(self, h: Tensor, scale: Tensor) -> Tensor:
        """The input times a factor per row and feature."""
        return h * self.aligned(scale, h)

    def scale_out(self, y: Tensor, scale: Tensor) -> Tensor:
        """The output times a factor per row and feature."""
        return y * self.aligned(scale, y)


def _chosen(p: Perturbation) -> Perturbation:
    """The same perturbation with a draw for each row in place of a choice among K."""
    parts = {
        name: None if (value := getattr(p, name)) is None else value.index_select(0, p.choice)
        for name in ("in_scale", "out_scale", "weight", "bias")
    }
    assert p.choice is not None
    return replace(p, size=p.choice.shape[0], choice=None, **parts)


def _at(values: Any, draw: int) -> Any:
    return values if values is None else values[draw] if values.shape[0] > 1 else values.squeeze(0)


def _tensor(value: Tensor | Elementwise | None) -> Tensor | None:
    assert not isinstance(value, Elementwise)
    return value


def _shared(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.unsqueeze(0)
