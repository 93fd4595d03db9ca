"""A plain copy of a model into which draws are written.

The model itself is never changed. The copy shares every tensor that no draw changes, and is created anew for each
prediction, so that it can't become stale.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayesify.errors import BayesifyError
from bayesify.layers import BayesianDropout, BayesianLayer, bayesian_layers
from bayesify.layers.base import Tensors, remove_scope, unwrapped
from bayesify.layers.call_scope import CloseScope
from bayesify.layers.dropout import FrozenDropout, count_rows
from bayesify.layers.network_state import copy_of, put_values
from bayesify.methods.base import Draws, Method, Perturbation, Site, at_least_float32
from bayesify.methods.draw_design import Blocks, Design, DrawDesign, blocks_of, component_cycle

Perturb = Callable[[str, str, Site], Perturbation | None]
"""The perturbation of a weight, by the name of its layer, its suffix and its site."""


def rescaled_weights(model: nn.Module) -> set[int]:
    """The ids of weights whose entries each call rescales: those of embeddings with max_norm."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is not None}


def require_layers(model: nn.Module) -> dict[str, BayesianLayer]:
    """The converted layers of a model by name; raises if there is none."""
    layers = bayesian_layers(unwrapped(model))
    if not layers:
        raise BayesifyError("the model has no Bayesian layer: use by.convert(model, method) first")
    return layers


class DrawnNetwork:
    """A plain copy of a Bayesian model, in evaluation mode, which `write` turns into one of its draws.

    Tensors go by their names in the network, such as "body.0.weight", and have a leading dimension of draws.
    """

    def __init__(self, model: nn.Module, design: Design = "balanced") -> None:
        model, self.design = unwrapped(model), design
        self.layers = require_layers(model)
        _refuse_batch_statistics(model)
        self.network = _plain_copy(model, self.layers).eval()
        self.has_dropout = any(isinstance(layer, BayesianDropout) for layer in self.layers.values())
        self._places: dict[str, tuple[nn.Module, str]] = {}
        scopes = list(dict.fromkeys(layer.scope for layer in self.layers.values()))
        self._parts = {name: scopes.index(layer.scope) for name, layer in self.layers.items()}
        self._names = {name: layer.site_name if len(scopes) == 1 else name for name, layer in self.layers.items()}
        """What a layer's noise is seeded by; in a model of several converted parts, the full name."""
        cycle = component_cycle(self.methods)
        self._cycle = cycle if len(scopes) == 1 else cycle * cycle  # several parts go through all combinations

    @property
    def methods(self) -> list[Method]:
        """The method of each layer."""
        return [layer.method for layer in self.layers.values()]

    @property
    def batch_dim(self) -> int:
        """The dimension of the batch's rows in sequences of features."""
        return next(iter(self.layers.values())).scope.batch_dim

    def drawn_parameters(self) -> list[Tensor]:
        """The parameters of the converted layers, which draws may change."""
        return [p for layer in self.layers.values() for p in layer.parameters()]

    # The tensors of draws, of the mean, and of components.

    @torch.no_grad()
    def draws(self, seed: int, indices: range) -> Tensors:
        """The tensors that draws change, each with a leading dimension for the draws of these indices."""

        def drawn(name: str, suffix: str, site: Site) -> Perturbation:
            method, noise_name = self.layers[name].method, self._names[name] + suffix
            return method.draw(site, seeded_draws(method, site, noise_name, design, indices, self._parts[name]))

        design = self.design_of(seed)
        return self.tensors(drawn)

    @property
    def blocks(self) -> Blocks:
        """Which draws are independent of each other."""
        return blocks_of(self.methods, self._cycle, self.design)

    def design_of(self, seed: int) -> DrawDesign:
        """How the draws of a seed get their noise."""
        return DrawDesign(seed, self._cycle, self.design)

    @torch.no_grad()
    def members(self) -> list[Tensors]:
        """The tensors of each component's mean; layers with fewer components start again from their first."""
        means = self.tensors(lambda name, suffix, site: self.layers[name].method.mean(site))
        most = max(method.components for method in self.methods)
        return [{name: t.narrow(0, k % len(t), 1) for name, t in means.items()} for k in range(most)]

    @torch.no_grad()
    def mean(self) -> Tensors:
        """The tensors of the mean network: the components' means, weighted by their probabilities."""
        return self.tensors(lambda name, suffix, site: self.layers[name].method.mean(site), average=True)

    def tensors(self, perturb: Perturb, *, average: bool = False) -> Tensors:
        """The tensors under perturbations of the layers' weights; those without one are left out."""
        tensors: Tensors = {}
        for layer_name, layer in self.layers.items():
            values: dict[str, Tensors] = {}
            for suffix, site in layer.sites().items():
                p = perturb(layer_name, suffix, site)
                if p is not None:
                    values[suffix] = layer.operation.folded(site.base, p)
                if average:
                    weights = layer.method.weights(site)
                    values[suffix] = {name: _average(t, weights) for name, t in values[suffix].items()}
            prefix = f"{layer_name}." if layer_name else ""
            tensors |= {prefix + name: tensor for name, tensor in layer.assemble(values).items()} if values else {}
        return tensors

    # The network with one of them written into it.

    def write(self, tensors: Tensors, place: int = 0) -> nn.Module:
        """Write the tensors of one draw into the network, and return it."""
        for name, stack in tensors.items():
            if name not in self._places:
                path, _, last = name.rpartition(".")
                self._places[name] = self.network.get_submodule(path), last
            module, last = self._places[name]
            value = stack[place]
            setattr(module, last, nn.Parameter(value, requires_grad=False) if last in module._parameters else value)
        return self.network

    def written(self) -> list[Tensor]:
        """The tensors that `write` has put into the network."""
        return [getattr(module, last) for module, last in self._places.values()]

    def freeze_dropout(self, seed: int | None, index: int = 0, network: nn.Module | None = None) -> None:
        """Replace kept dropout modules, or earlier draws' masks, by one draw's masks; without a seed, by nothing."""
        network = self.network if network is None else network
        if self.has_dropout and seed is not None:
            count_rows(network, self.batch_dim)
        for name, layer in self.layers.items():
            if isinstance(layer, BayesianDropout):
                mask = None if seed is None else FrozenDropout(layer, self.design_of(seed), index, self._names[name])
                before, after = network.get_submodule(name), (mask or nn.Identity()).eval()
                for module in list(network.modules()):
                    for child, part in module._modules.items():
                        if part is before:
                            module._modules[child] = after

    def write_draw(self, seed: int | None, index: int = 0) -> nn.Module:
        """Write one draw of a seed or, without a seed, the mean into the network, and return it."""
        self.freeze_dropout(seed, index)
        return self.write(self.mean() if seed is None else self.draws(seed, range(index, index + 1)))

    def detached(self) -> nn.Module:
        """Give the network its own copy of every tensor, keeping ties, and return it."""
        own: dict[int, tuple[Tensor, nn.Parameter]] = {}  # each with the one before, so that no other gets its id
        for module in self.network.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    own.setdefault(id(p), (p, nn.Parameter(p.detach().clone(), requires_grad=False)))
                    setattr(module, name, own[id(p)][1])
        return self.network


def _refuse_batch_statistics(model: nn.Module) -> None:
    """Raise for a batch norm without running statistics, as it does not compute a function of a single row."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise BayesifyError(
                f"layer {name!r} is a batch norm without running statistics, so its output for a row depends on the "
                "other rows of the batch; use track_running_stats=True and by.recalibrate(model, loader)"
            )


def _plain_copy(model: nn.Module, layers: dict[str, BayesianLayer]) -> nn.Module:
    """A copy with ordinary layers that shares the model's parameters, and has buffers of its own."""
    shared: list[Any] = list(model.parameters())
    for layer in layers.values():
        shared += [layer.scope, layer.posterior, layer.method]
    network = copy_of(model, shared)
    for name, module in model.named_modules():
        for hook in module._forward_hooks.values():
            if isinstance(hook, CloseScope):  # a draw must not start from results of another
                put_values(network.get_submodule(name), hook.scope.results)
    for module in network.modules():
        remove_scope(module)
        if isinstance(module, BayesianLayer):
            make_plain(module)
    return network


def make_plain(layer: BayesianLayer) -> None:
    """Turn a Bayesian layer back into an ordinary one; its base tensors stay."""
    del layer._modules["posterior"]
    for attribute in ("method", "scope", "site_name"):
        layer.__dict__.pop(attribute, None)
    object.__setattr__(layer, "__class__", layer.plain)


def seeded_draws(method: Method, site: Site, name: str, design: DrawDesign, indices: range, part: int = 0) -> Draws:
    """The draws of these indices, with the noise of a design; without noise where components are points.

    Draw i has component i modulo K. In a model of several parts that were converted apart, a row gets a component of
    each part by itself in training, so every further part moves on by one after each cycle: all combinations occur.
    """
    position = torch.arange(indices.start, indices.stop, device=site.device)
    position = position + part * (position // method.components)
    if method.ties_components and not method.noisy:
        return Draws(position, reproducible=True)
    return design.draws(indices, position, name)


def _average(stack: Tensor, weights: Tensor | None) -> Tensor:
    """The mean (1, …) of K tensors."""
    shares = torch.full((len(stack),), 1 / len(stack)) if weights is None or len(weights) != len(stack) else weights
    mean: Tensor = torch.tensordot(shares.to(at_least_float32(stack)), at_least_float32(stack), 1)
    return mean.unsqueeze(0).to(stack.dtype)
