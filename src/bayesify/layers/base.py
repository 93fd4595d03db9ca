"""A Bayesian layer: an ordinary layer that applies the perturbation its family draws."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..family import Draws, Elementwise, Family, Perturbation, Role, Site, precise
from .rows import Rows
from .scope import Scope


class Posterior(nn.Module):
    """The tensors a family added to a layer, under `layer.posterior`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {**self._parameters, **self._buffers}  # type: ignore[dict-item]


class BayesianLayer(nn.Module):
    """Mixed into one static subclass per layer type; `convert` swaps a layer's class for it.

    A layer type says how it runs with other tensors (`run`), how factors fold into its weight (`fold`), and how several
    draws are applied at once (`per_draw`).
    """

    plain: ClassVar[type[nn.Module]]
    role: ClassVar[Role]
    family: Family
    scope: Scope
    site_name: str
    posterior: Posterior
    weight: Any
    bias: Any

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        """What a family sees of a plain or Bayesian layer of this type."""
        raise NotImplementedError

    @classmethod
    def refusal(cls, layer: nn.Module) -> str | None:
        """Why no family can apply to a layer of this type, or None."""
        return None

    def site(self) -> Site:
        """What the family sees of this layer."""
        return replace(self.site_of(self), posterior=self.posterior.tensors())

    def forward(self, input: Tensor) -> Tensor:
        """One draw for the whole batch folds into the weight; several are applied row by row."""
        perturbation = self.perturbation()
        if perturbation.size == 1 and perturbation.choice is None and not self._updates(perturbation):
            return self.run(input, **self.folded(perturbation))
        return self._by_rows(input, perturbation)

    def perturbation(self) -> Perturbation:
        """The perturbation of this call of the model."""
        drawn = self.scope.drawn
        if self.site_name not in drawn:
            device = None if self.weight is None else self.weight.device
            drawn[self.site_name] = self.drawn(self.scope.draws(self.family, self.site_name, device))
        return drawn[self.site_name]

    def drawn(self, draws: Draws) -> Perturbation:
        """What the family draws, with every entry drawn that the layer will use."""
        return self.settled(self.family.draw(self.site(), draws))

    def settled(self, p: Perturbation) -> Perturbation:
        """Draw what is still to be drawn element by element."""
        if isinstance(p.weight, Elementwise):
            p = replace(p, weight=p.weight.all(tuple(self.weight.shape)))
        if isinstance(p.in_scale, Elementwise):
            p = replace(p, in_scale=p.in_scale.all((self.site_of(self).in_size or 0,)))
        return p

    def folded(self, perturbation: Perturbation, draw: int = 0) -> dict[str, Tensor]:
        """The ordinary layer's tensors under one draw; folded in at least single precision, then cast."""
        values = self._tensors_of(perturbation, draw, self.site_of(self).base)
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

    def _tensors_of(self, part: Perturbation, draw: int, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = dict(base)
        if part.weight is not None:
            values["weight"] = _at(part.weight, draw)
        if part.bias is not None:
            values["bias"] = _at(part.bias, draw)
        if part.in_scale is not None or part.out_scale is not None:
            weight = precise(values["weight"])
            values["weight"] = self.fold(weight, _at(part.in_scale, draw), _at(part.out_scale, draw))
        return values

    def _by_rows(self, input: Tensor, perturbation: Perturbation) -> Tensor:
        if input.numel() == 0:
            return self.run(input, **self.site_of(self).base)
        if self.is_unbatched(input):
            first = 0 if perturbation.choice is None else int(perturbation.choice[0])
            return self.run(input, **self.folded(perturbation, first))
        batch_dim = self.scope.batch_dim if self.features_last and input.dim() > self.least_dims else 0
        x = input.transpose(0, batch_dim) if batch_dim else input
        assert self.scope.position is not None
        batch = self.scope.position.shape[0]
        if x.shape[0] == 1:  # one row for all, such as position ids: from here on each row has its own
            x = x.expand(batch, *x.shape[1:])
        rows = Rows.follow(self.site_name, x.shape[0], batch, 0 if batch_dim else self.scope.batch_dim)
        y = self.perturbed(x, perturbation, rows)
        return y.transpose(0, batch_dim) if batch_dim else y

    def perturbed(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        """The layer's output with a draw per row: the main term and what flipout or local noise adds."""
        h = self.prepare(x, p, rows)
        y = self.term(h, p, rows, self.site_of(self).base)
        if p.plus is not None:
            y = y + self.term(h, p.plus, rows, {})
        if p.variance is not None:
            variance = self.term(self.squared(h), p.variance, rows, {})
            y = y + variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt() * torch.randn_like(variance)
        return y

    def term(self, h: Tensor, p: Perturbation, rows: Rows, base: Mapping[str, Tensor]) -> Tensor:
        """(op(h ∘ in_scale; weight)) ∘ out_scale + bias, row by row."""
        if p.choice is not None:
            p = _chosen(p)
        p = self.cheaper(h, p, rows)
        weight, in_scale = _tensor(p.weight), _tensor(p.in_scale)
        bias = p.bias if p.bias is not None else _shared(base.get("bias"))
        weight = _shared(base["weight"]) if weight is None else weight.to(self.weight.dtype)
        in_scale = None if in_scale is None else rows.spread(in_scale)
        out_scale = None if p.out_scale is None else rows.spread(p.out_scale)
        direct = p.out_scale is None and (bias is None or bias.shape[0] in (1, weight.shape[0]))
        inner = bias.to(self.weight.dtype) if direct and bias is not None else None
        if weight.shape[0] == 1:
            y = self.scaled_op(h, weight[0], None if inner is None else inner[0], in_scale, out_scale)
        else:
            h = h if in_scale is None else self.scale_in(h, in_scale)
            y = self.per_draw(h, weight, inner, rows)
            y = y if out_scale is None else self.scale_out(y, out_scale)
        return y if direct or bias is None else y + self.aligned(rows.spread(bias), y)

    # What a layer type says of itself.

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
        """One weight times its factors."""
        raise NotImplementedError

    def prepare(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        """What comes before the part that is linear in the weight."""
        return x

    def op(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The part that is linear in the weight, with one weight."""
        return self.run(h, weight, bias)

    def scaled_op(
        self, h: Tensor, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None, out_scale: Tensor | None
    ) -> Tensor:
        """`op` with one weight between factors per row."""
        y = self.op(h if in_scale is None else self.scale_in(h, in_scale), weight, bias)
        return y if out_scale is None else self.scale_out(y, out_scale)

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

    def extra_repr(self) -> str:
        """The ordinary description and the method."""
        inner = super().extra_repr()
        return f"{inner}, {self.family}" if inner else str(self.family)

    def _updates(self, perturbation: Perturbation) -> bool:
        """Whether the call changes statistics that belong to the draws."""
        return perturbation.statistics is not None and self.training


def affine_site(layer: nn.Module, **sizes: Any) -> Site:
    """A site with the layer's weight and, if there is one, its bias."""
    base = {name: t for name in ("weight", "bias") if (t := getattr(layer, name, None)) is not None}
    return Site(base, reset=lambda: _fresh(layer), kind=plain_type(layer).__name__, **sizes)


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """The ordinary type of a plain or Bayesian layer."""
    return layer.plain if isinstance(layer, BayesianLayer) else type(layer)


def _fresh(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's tensors as its own `reset_parameters` would set them."""
    other = copy.deepcopy(layer)
    other.reset_parameters()  # type: ignore[operator]
    return {name: t.detach() for name in ("weight", "bias") if (t := getattr(other, name, None)) is not None}


def _chosen(p: Perturbation) -> Perturbation:
    """The same perturbation with a draw for each row in place of a choice among K."""
    parts = {
        name: None if (value := getattr(p, name)) is None else value.index_select(0, p.choice)
        for name in ("in_scale", "out_scale", "weight", "bias")
    }
    assert p.choice is not None
    return replace(p, size=p.choice.shape[0], choice=None, **parts)


def _at(values: Any, draw: int) -> Any:
    return None if values is None else values[draw if values.shape[0] > 1 else 0]


def _tensor(value: Tensor | Elementwise | None) -> Tensor | None:
    assert not isinstance(value, Elementwise)
    return value


def _shared(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.unsqueeze(0)


def bayesian_layers(model: nn.Module) -> dict[str, BayesianLayer]:
    """The converted layers of a model by name, each once."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BayesianLayer)}
