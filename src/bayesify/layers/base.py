"""How a layer applies what its method draws: from `BayesianLayer.forward` down to one product of factors.

An `Operation` is what a layer computes with a weight. It applies draws in one of two ways. One draw for all rows is
folded into the weight, and the ordinary layer runs (`folded`). A draw for each row scales the row's inputs and outputs,
or runs the operation with a weight for each draw (`by_row`). A `BayesianLayer` is a module that asks its method for
draws. Most layers are their own operation; recurrent layers and attention run one operation with several weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bayesify.errors import BayesifyError
from bayesify.layers._scaled_ops import scaled
from bayesify.layers.call_scope import CloseScope, OpenScope, Scope
from bayesify.layers.network_state import copy_of
from bayesify.layers.rows import Rows
from bayesify.methods.base import Draws, Method, Perturbation, Role, Site, at_least_float32
from bayesify.methods.draw_design import normal_like

Tensors = dict[str, Tensor]


class Operation:
    """y = op(x; weight) + bias, linear in the weight."""

    features_last: ClassVar[bool] = False
    """Whether an input is (rows, …, features) rather than (rows, channels, …)."""
    inputs_last: ClassVar[bool] = True
    """Whether its matrix is (outputs, inputs) rather than (inputs, outputs)."""
    runs_again: ClassVar[bool] = True
    """Whether `run` may be called again for the gradient: it is not random and changes nothing in place."""

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **changes: Any) -> Tensor:
        """The ordinary operation: that of the plain layer with these tensors and other attributes."""
        layer: Any = self
        other = stand_in(layer, layer.plain, weight=weight, bias=bias, **changes)
        return cast(Tensor, layer.plain.forward(other, x))

    def fold(self, weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
        """G weights times the factors of G draws, to the same effect as scaling inputs and outputs; here, matrices."""
        across, down = (in_scale, out_scale) if self.inputs_last else (out_scale, in_scale)
        weight = weight if across is None else weight * across.unsqueeze(-2)
        return weight if down is None else weight * down.unsqueeze(-1)

    def grouped(self, x: Tensor, weight: Tensor) -> Tensor:
        """The operation with G weights; row j uses weight j modulo G."""
        raise NotImplementedError

    def prefers_folding(self, x: Tensor, weight: Tensor, p: Perturbation, rows: Rows) -> bool:
        """Whether factors are better folded into a weight for each draw than applied to activations."""
        return p.kernel_scale is not None

    def by_kernel_scale(self, x: Tensor, weight: Tensor, scale: Tensor, p: Perturbation, rows: Rows) -> Tensor | None:
        """The operation with a kernel's factors, if it can do without a weight for each draw."""
        return None

    # One draw for all rows.

    def folded(self, base: Mapping[str, Tensor], p: Perturbation) -> Tensors:
        """The tensors that G draws change, with a leading dimension of G; folded in float32 at least, then cast."""
        values = self._changed(base, p)
        if p.plus is not None:
            for name, change in self._changed(base, p.plus).items():
                values[name] = values.get(name, base[name]) + change
        if p.variance is not None:
            for name, variance in self._changed(base, p.variance).items():
                std = variance.sqrt().expand(p.size, *variance.shape[1:])
                values[name] = values.get(name, base[name]) + std * torch.randn_like(std)
        values = {name: value.to(base[name].dtype) for name, value in values.items()} | dict(p.statistics or {})
        return {name: value.expand(p.size, *value.shape[1:]) for name, value in values.items()}

    def _changed(self, base: Mapping[str, Tensor], p: Perturbation) -> Tensors:
        values = {name: value for name, value in (("weight", p.weight), ("bias", p.bias)) if value is not None}
        if p.kernel_scale is not None:
            weight = at_least_float32(base["weight"])
            values["weight"] = weight * p.kernel_scale.reshape(-1, 1, *weight.shape[1:])
        if p.in_scale is not None or p.out_scale is not None:
            weight = values["weight"] if "weight" in values else base["weight"].unsqueeze(0)
            values["weight"] = self.fold(at_least_float32(weight), p.in_scale, p.out_scale)
        return values

    # A draw for each row.

    def by_row(self, x: Tensor, base: Mapping[str, Tensor], p: Perturbation, rows: Rows) -> Tensor:
        """The operation with draw g on the rows g, g + G, …: the main term, and what flipout or local noise adds."""
        if p.bias is None and "bias" in base:
            p = replace(p, bias=base["bias"].unsqueeze(0))
        y = self._term(x, base["weight"], p, rows)
        if p.plus is not None:
            y = y + self._term(x, base["weight"], p.plus, rows)
        if p.variance is not None:
            variance = self._term(x.square(), base["weight"], p.variance, rows)
            std = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
            y = y + std * normal_like(variance, p.size // p.samples, p.samples)
        return y

    def _term(self, x: Tensor, weight: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        """op(x ∘ in_scale; weight) ∘ out_scale + bias, where p has the bias, and may replace the base weight."""
        y = None if p.kernel_scale is None else self.by_kernel_scale(x, weight, p.kernel_scale, p, rows)
        if y is not None:
            return y
        if self.prefers_folding(x, weight, p, rows):
            folded = self._changed({"weight": weight}, p)["weight"]
            p = replace(p, weight=folded, kernel_scale=None, in_scale=None, out_scale=None)
        weights = weight.unsqueeze(0) if p.weight is None else p.weight.to(weight.dtype)
        s = None if p.in_scale is None else rows.spread(p.in_scale, x, self.features_last)
        r = None if p.out_scale is None else rows.spread(p.out_scale, x, self.features_last)
        y = scaled(partial(self._run_each, weights, rows), x, s, r, again=self.runs_again)
        return y if p.bias is None else y + rows.spread(p.bias, y, self.features_last)

    def _run_each(self, weights: Tensor, rows: Rows, x: Tensor) -> Tensor:
        """The operation with one weight for all rows, or with G weights, each on its rows."""
        if len(weights) == 1:
            return self.run(x, weights.squeeze(0))
        return rows.undo_order(self.grouped(rows.order_by_draw(x, len(weights)), weights))


class Posterior(nn.Module):
    """The tensors that a method added to a layer: `layer.posterior`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            register: Any = self.register_parameter if isinstance(tensor, nn.Parameter) else self.register_buffer
            register(name, tensor)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the tensors as `fn` does, but parameters never to 16 bits: scales and the KL need more."""

        def moved(tensor: Tensor) -> Tensor:
            result: Tensor = fn(tensor)
            return tensor.to(result.device) if result.dtype in (torch.float16, torch.bfloat16) else result

        buffers = {name: fn(buffer) for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(moved, recurse)
        self._buffers.update(buffers)
        return self

    def tensors(self, suffix: str = "") -> Tensors:
        """The tensors of one weight, by the names that the method uses."""
        named: Tensors = {**self._parameters, **self._buffers}  # type: ignore[dict-item]
        return {name.removesuffix(suffix): t for name, t in named.items() if name.endswith(suffix)} if suffix else named


class BayesianLayer(nn.Module):
    """An ordinary layer that applies the perturbation its method draws; `convert` swaps a layer's class for it.

    A layer with several weights gives each a suffix, which is appended to the names of its tensors.
    """

    plain: ClassVar[type[nn.Module]]
    role: ClassVar[Role]
    parts: ClassVar[tuple[str, ...]] = ()
    """Submodules whose tensors the layer draws itself, because it reads them without calling the submodules."""
    features_last: ClassVar[bool] = False
    min_dims: ClassVar[int] = 2
    """The number of dimensions of an input without extra ones, such as time."""
    runs_in_chunks: ClassVar[bool] = False
    """Whether it can run on some rows at a time, with only their weights in memory."""

    method: Method
    scope: Scope
    site_name: str
    posterior: Posterior

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        """What a method sees of a plain or Bayesian layer of this type."""
        raise NotImplementedError

    @classmethod
    def sites_of(cls, layer: nn.Module) -> dict[str, Site]:
        """What a method sees of each of its weights, by suffix."""
        return {"": cls.site_of(layer)}

    @classmethod
    def refusal(cls, layer: nn.Module) -> str | None:
        """Why no method can apply to a layer of this type, or None."""
        return None

    @property
    def operation(self) -> Operation:
        """What it computes with each weight."""
        assert isinstance(self, Operation)
        return self

    def is_unbatched(self, x: Tensor) -> bool:
        """Whether an input has no batch dimension."""
        return False

    def row_dim(self, x: Tensor) -> int:
        """The dimension of an input that is the batch."""
        return self.scope.batch_dim if self.features_last and x.dim() > self.min_dims else 0

    def assemble(self, values: Mapping[str, Tensors]) -> Tensors:
        """The layer's tensors by name, from values for each of its weights by suffix."""
        return {name + suffix: value for suffix, part in values.items() for name, value in part.items()}

    def as_tensor(self, input: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The input as one tensor with rows."""
        return cast(Tensor, input)

    def sites(self) -> dict[str, Site]:
        """What the method sees of each of its weights, with its posterior."""
        return type(self).sites_of(self)

    def perturbation(self, site: Site, suffix: str = "") -> Perturbation:
        """The draws of a weight in this call of the model: the same if the layer is called several times."""
        name, scope = self.site_name + suffix, self.scope
        call = (None if torch.compiler.is_compiling() else scope.of_thread.call) or scope.call(name)
        if name not in call.drawn:
            call.drawn[name] = self.method.draw(site, call.draws(self.method, site.device))
        return cast(Perturbation, call.drawn[name])

    def forward(self, input: Tensor) -> Tensor:
        """One draw for the whole batch folds into the weight; several are applied row by row."""
        site = self.site_of(self)
        most, compiling = self.method.rows_at_once, torch.compiler.is_compiling()  # compiled code frees weights itself
        if most and self.runs_in_chunks and self.method.draws_per == "row" and not compiling and self.batch > most:
            return self._by_chunks(input, site, most)
        p, operation = self.perturbation(site), cast(Operation, self)
        if p.size == 1 and not (self.training and p.statistics):
            return operation.run(input, **self.one_draw(site, p))
        if input.numel() == 0:
            return operation.run(input, **site.base)
        if self.is_unbatched(input):
            return operation.run(input, **self.one_draw(site, p.only(0)))
        dim = self.row_dim(input) if self.features_last else 0
        x, rows = self.rows_of(input, dim)
        return operation.by_row(x, site.base, p, rows).transpose(0, dim)

    def one_draw(self, site: Site, p: Perturbation) -> Tensors:
        """The layer's tensors under a perturbation of a single draw."""
        return dict(site.base) | {name: t.squeeze(0) for name, t in self.operation.folded(site.base, p).items()}

    def rows_of(self, input: Tensor, dim: int, *, repeats: bool = True) -> tuple[Tensor, Rows]:
        """The input with its rows first, and their rows of the batch; a single row for all is repeated for each."""
        x, call = input.transpose(0, dim), self.scope.call(self.site_name)
        batch = call.position.shape[0]
        if batch > 1 and not torch.compiler.is_compiling():
            call.layers.add((self.site_name, x.shape[0] == 1))
        if x.shape[0] == 1 and repeats:
            x = x.expand(batch, *x.shape[1:])
            if batch > 1 and not torch.compiler.is_compiling():
                call.repeated = self.site_name
        if call.samples > 1 and call.shares(self.method):
            batch //= call.samples
        return x, Rows.follow(self.site_name, x.shape[0], batch, 0 if dim else self.scope.batch_dim)

    @property
    def batch(self) -> int:
        """The number of rows in this call of the model."""
        return self.scope.call(self.site_name).position.shape[0]

    # A weight for each row, with the weights of only some rows in memory at a time.

    def _by_chunks(self, input: Tensor, site: Site, most: int) -> Tensor:
        """The layer's output, `most` rows at a time; for the gradient their weights are drawn again."""
        name, call = self.site_name, self.scope.call(self.site_name)
        if name not in call.drawn:
            call.drawn[name] = int(torch.randint(1 << 62, ()))
        seed, positions = call.drawn[name], call.position.to(site.device)
        most = max(most - most % call.samples, call.samples)  # samples of a row stay together
        tensors = [*site.base.values(), *site.posterior.values()]
        versions = [tensor._version for tensor in tensors]

        def draw(start: int) -> Perturbation:
            if versions != [tensor._version for tensor in tensors]:
                raise BayesifyError(
                    f"layer {name!r} changed between forward and backward, and with rows_at_once its weights are "
                    "drawn again for the gradient: call backward before optimizer.step(), or leave out rows_at_once"
                )
            return self.method.draw(site, call.balance(Draws.seeded(positions[start : start + most], [seed + start])))

        if self.is_unbatched(input) or input.numel() == 0:
            return self.operation.run(input, **self.one_draw(site, draw(0).only(0)))
        dim = self.row_dim(input)
        x, rows = self.rows_of(input, dim)

        def apply(part: Tensor, start: int) -> Tensor:
            p = draw(start)
            return self.operation.by_row(part, site.base, p, Rows(p.size, rows.repeat))

        again = partial(checkpoint, apply, use_reentrant=False, preserve_rng_state=False)
        parts = [again(part.flatten(0, 1), i * most) for i, part in enumerate(rows.split_repeats(x).split(most))]
        return rows.merge_repeats(torch.cat(parts)).transpose(0, dim)

    def extra_repr(self) -> str:
        """The ordinary layer's description, and the method."""
        inner = super().extra_repr()
        return f"{inner}, {self.method}" if inner else str(self.method)


def layer_type(plain: type[nn.Module], *parts: type, **attributes: Any) -> type[BayesianLayer]:
    """The Bayesian type of a plain one: `class BayesianPlain(*parts, Plain)`, in the module of the first part."""
    body = {"plain": plain, "__module__": parts[0].__module__, "__doc__": f"`{plain.__name__}` under a perturbation."}
    return cast(type[BayesianLayer], type(f"Bayesian{plain.__name__}", (*parts, plain), body | attributes))


def stand_in(layer: nn.Module, kind: type[nn.Module], **given: Any) -> Any:
    """A module of type `kind` that shares all with a layer but the given attributes, which no other thread sees."""
    other = object.__new__(kind)
    vars(other).update(vars(layer) | given)
    return other


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """The ordinary type of a plain or Bayesian layer."""
    return layer.plain if isinstance(layer, BayesianLayer) else type(layer)


def own_tensors(layer: nn.Module, names: Sequence[str | None] = ("weight", "bias")) -> Tensors:
    """A layer's weight and, if there is one, its bias; raises where something computes one at each call."""
    found: Tensors = {}
    for known, name in zip(("weight", "bias"), names, strict=True):
        tensor = layer._parameters.get(name or "")
        if tensor is not None:
            found[known] = tensor
        elif name and name not in layer._parameters and isinstance(getattr(layer, name, None), Tensor):
            raise BayesifyError(
                f"layer {getattr(layer, 'site_name', '')!r}: its {name} is not a parameter but computed at each call, "
                "by pruning, weight_norm or a parametrization. Make it permanent before conversion "
                "(torch.nn.utils.prune.remove, remove_weight_norm, parametrize.remove_parametrizations)"
            )
    return found


def affine_site(
    layer: Any, tensors: Callable[[nn.Module], Tensors] = own_tensors, suffix: str = "", **what: Any
) -> Site:
    """What a method sees of a weight: `tensors` finds it, and its bias, in the layer or in a copy of it.

    The numbers of inputs and outputs of a matrix are those of its weight.
    """

    def reset() -> Tensors:
        other: Any = copy_of(layer)
        if isinstance(other, nn.MultiheadAttention):
            other.out_proj.reset_parameters()
            other._reset_parameters()
        elif hasattr(other, "reset_parameters"):
            other.reset_parameters()
        return {name: tensor.detach() for name, tensor in tensors(other).items()}

    base, is_bayesian = tensors(layer), isinstance(layer, BayesianLayer)
    posterior, kind = (layer.posterior.tensors(suffix), layer.plain) if is_bayesian else ({}, type(layer))
    if what.get("is_matrix"):
        what["out_size"], what["in_size"] = base["weight"].shape[:2]
    return Site(base, posterior, reset=reset, kind=kind.__name__, **what)


def computed_tensor(layer: nn.Module, names: Sequence[str]) -> str | None:
    """Why a layer can't be Bayesian of which one of these tensors is not a parameter, or None."""
    reason = "its {} is not a parameter but computed (weight_norm or the like); remove that first"
    return next((reason.format(name) for name in names if name not in layer._parameters), None)


def bayesian_layers(model: nn.Module) -> dict[str, BayesianLayer]:
    """The converted layers of a model by name, shared ones once."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BayesianLayer)}


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside `torch.compile`, `DistributedDataParallel` or `DataParallel`."""
    if not isinstance(model, nn.Module):
        hint = "; its attribute `model` is one" if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise BayesifyError(f"expected a network (torch.nn.Module), got {type(model).__name__}{hint}")
    while True:
        wrapped = isinstance(model, (DistributedDataParallel, nn.DataParallel))
        inner: Any = model.module if wrapped else model._modules.get("_orig_mod")
        if inner is None:
            return model
        model = inner


def has_scope(module: nn.Module) -> bool:
    """Whether calls of a module open a scope: it was converted, rather than a part of it."""
    return any(isinstance(hook, OpenScope) for hook in module._forward_pre_hooks.values())


def remove_scope(module: nn.Module) -> Scope | None:
    """Remove the hooks of a scope from a module, and return the scope, if there is one."""
    found = None
    # A hook's key is unique only within its dict: after unpickling, new hooks may get the keys of old ones.
    before: list[dict[int, Any]] = [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]
    after: list[dict[int, Any]] = [module._forward_hooks, module._forward_hooks_always_called]
    for kind, places in ((OpenScope, before), (CloseScope, after)):
        for key, hook in list(places[0].items()):
            if isinstance(hook, kind):
                found = hook.scope
                for place in places:
                    place.pop(key, None)
    return found
