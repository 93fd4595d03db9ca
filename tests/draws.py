"""What was drawn in a call of a model, and the plain network with a row's draw in its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.conversion.drawn_network import make_plain
from bayesify.layers import BayesianLayer, bayesian_layers
from bayesify.layers.base import remove_scope
from bayesify.layers.call_scope import CloseScope, OpenScope
from bayesify.methods.base import Draws, Method, Perturbation, Site


@dataclass
class Call:
    """What was drawn in a call of a model."""

    position: Tensor | None = None
    drawn: dict[str, Perturbation | int] = field(default_factory=dict)

    def of_row(self, layer: BayesianLayer, site: Site, suffix: str, row: int) -> Perturbation:
        """The draw of a weight that serves a row; with `rows_at_once` it is made again by its seed."""
        found = self.drawn[layer.site_name + suffix]
        if isinstance(found, Perturbation):
            return found.only(row % found.size)
        size = layer.method.rows_at_once
        first = row - row % size
        draws = Draws.seeded(self.position[first : first + size], [found + first])
        return layer.method.draw(site, draws).only(row - first)

    def tensors(self, layer: BayesianLayer, row: int) -> dict[str, Tensor]:
        """The tensors of an ordinary layer with a row's draw, by their names in it."""
        sites = layer.sites().items()
        return layer.assemble({s: layer.one_draw(site, self.of_row(layer, site, s, row)) for s, site in sites})

    def network(self, model: nn.Module, row: int) -> nn.Module:
        """An ordinary copy of a model with a row's draw in all its layers."""
        network = copy.deepcopy(model)
        for module in network.modules():
            remove_scope(module)
        for name, layer in bayesian_layers(model).items():
            tensors, plain = self.tensors(layer, row), network.get_submodule(name)
            make_plain(plain)
            plain.load_state_dict({**plain.state_dict(), **tensors})
        return network


@contextmanager
def watched_calls(model: nn.Module) -> Iterator[Call]:
    """What is drawn in the calls made inside; of several calls the last."""
    call = Call()
    scope = next(iter(bayesian_layers(model).values())).scope

    def keep(*_: object) -> None:
        now = scope.of_thread.call
        if now is not None:  # otherwise a copy of the model is called
            call.position, call.drawn = now.position, dict(now.drawn)

    handle = model.register_forward_hook(keep, prepend=True)
    yield call
    handle.remove()


def called(layer: BayesianLayer, *args: Any, batch: int, **options: Any) -> tuple[Any, Call]:
    """The output of a layer alone inside a call for so many rows, which may be less than it sees; and its draws."""
    with in_call(layer, torch.arange(batch) + 3) as call:
        # Not called, for its own hooks would begin another call.
        return layer.forward(*args, **options), call


@contextmanager
def in_call(layer: BayesianLayer, position: Tensor) -> Iterator[Call]:
    """A call of a layer's model with these positions, and its draws."""
    OpenScope(layer.scope)(layer, (position,), {})
    now = layer.scope.call("")
    now.position = position
    yield Call(position, now.drawn)
    CloseScope(layer.scope)(layer, (), None)


def as_linear_layers(layer: BayesianLayer, method: Method) -> nn.Module:
    """A converted `nn.Linear` with the same tensors for each weight of a layer that has several."""
    sites = layer.sites().values()
    linears = [nn.Linear(site.in_size, site.out_size, bias=site.bias is not None) for site in sites]
    model = by.convert(nn.ModuleList(linears), {nn.Linear: method})
    with torch.no_grad():
        for site, linear in zip(sites, model, strict=True):
            for name, tensor in site.base.items():
                getattr(linear, name).copy_(tensor)
            for name, tensor in site.posterior.items():
                linear.posterior.tensors()[name].copy_(tensor)
    return model
