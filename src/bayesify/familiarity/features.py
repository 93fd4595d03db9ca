"""The features of a network: what goes into some of its layers, pooled to a vector for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from bayesify.batches import input_of, row_count, run
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.errors import BayesifyError
from bayesify.layers import bayesian_layers
from bayesify.layers.base import unwrapped
from bayesify.layers.network_state import copy_of

MOST_LAYERS = 6
"""The most layers whose inputs are features, evenly spread from the first to the last."""
MOST_FEATURES = 128
"""Longer vectors of features are hashed to this length."""
CHECKED = 500
"""Of each parameter about so many values are compared, to notice other weights."""
Call = Callable[[nn.Module, Any], Tensor]


class FeatureNetwork:
    """A plain copy of a model that returns the features of a batch: for Bayesian models, its first component's mean.

    A layer counts if it has a matrix or kernel of its own and is given a row for each row of the batch, in floating
    point. Of several calls in one pass the first counts.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str] | None = None, call: Call | None = None) -> None:
        model, self.batch_dim, self.call = unwrapped(model), 0, call or run
        if bayesian_layers(model):
            drawn = DrawnNetwork(model)
            drawn.freeze_dropout(None)
            self.batch_dim = drawn.batch_dim
            self.network = drawn.write(drawn.members()[0])
        else:
            self.network = copy_of(model, model.parameters()).eval()
        modules = dict(self.network.named_modules())
        if layers is not None and (not layers or len(set(layers)) < len(layers)):
            raise BayesifyError(f"layers={list(layers)}: expected names of layers, each once, or None")
        for name in layers or ():
            if name not in modules:
                raise BayesifyError(f"the network has no layer {name!r}; it has {', '.join(filter(None, modules))}")
        self.layers = list(layers) if layers is not None else [name for name, m in modules.items() if _has_matrix(m)]
        self.is_chosen = layers is not None
        self._found: dict[str, Tensor] = {}
        self._rows = 0
        for name in self.layers:
            modules[name].register_forward_pre_hook(self._keep(name), with_kwargs=True)

    def given(self, batch: Any) -> Any:
        """What the network, or the function that calls it, is given of a loader's batch."""
        return input_of(batch) if self.call is run else batch

    def of(self, batch: Any) -> dict[str, Tensor]:
        """The features (N, D) of each layer for a batch; at the first batch, the layers are chosen."""
        self._found, self._rows = {}, row_count(batch, self.batch_dim)
        self.call(self.network, batch)
        found = self._found
        if not self.is_chosen:
            called = list(found)
            if not called:
                raise BayesifyError(
                    "no layer of the network is given a tensor of floats with a row for each row of the batch; name "
                    "one with layers=[…]"
                )
            last, count = len(called) - 1, min(MOST_LAYERS, len(called))
            self.layers = [called[round(i * last / max(count - 1, 1))] for i in range(count)]
            self.is_chosen = True
        if lost := [name for name in self.layers if name not in found]:
            raise BayesifyError(
                f"layer {lost[0]!r} was not given a tensor of floats with {self._rows} rows, as many as the batch has"
            )
        return {name: found[name] for name in self.layers}

    def _keep(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter((*args, *kwargs.values())), None)
            if name in self._found or not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
                return
            x = x if isinstance(module, _ConvNd) or x.dim() == 2 else x.movedim(self.batch_dim, 0).flatten(1, -2).mT
            if len(x) == self._rows and x.numel():
                self._found[name] = pooled(x)

        return hook

    def checksums(self) -> list[float]:
        """A number for each layer that differs if its weights do: log-norm, plus their cosine with a fixed wave."""
        sums = []
        for name in self.layers:
            own = [p.detach().flatten() for p in self.network.get_submodule(name).parameters()]
            own = [p[:: len(p) // CHECKED + 1].double().cpu() for p in own]
            values = torch.cat(own) if own else torch.ones(1).double()
            wave = torch.arange(len(values)).double().mul(0.7).cos()
            size = values.norm().clamp_min(1e-30)
            sums.append(float(values @ wave / (size * wave.norm()) + size.log()))
        return sums

    @property
    def is_meta(self) -> bool:
        """Whether the network has no values."""
        return any(p.is_meta for p in self.network.parameters())


def pooled(x: Tensor) -> Tensor:
    """Features (N, C, …) as vectors: the mean and standard deviation of each channel; hashed if they are long.

    >>> pooled(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]]))
    tensor([[2., 5., 1., 0.]])
    """
    x = x.float()
    if x.dim() > 2:
        x = x.flatten(2)
        mean = x.mean(-1, keepdim=True)
        x = torch.cat([mean.squeeze(-1), (x - mean).square().mean(-1).sqrt()], 1)  # `var_mean` takes 20 times as long
    if x.shape[1] <= MOST_FEATURES:
        return x
    number = torch.arange(x.shape[1], device=x.device) * 2654435761 % 2**32  # Knuth's multiplicative hash
    place, sign = number // 2**8 % MOST_FEATURES, 1 - number // 2**5 % 2 * 2
    return x.new_zeros(len(x), MOST_FEATURES).index_add_(1, place, x * sign)


def _has_matrix(module: nn.Module) -> bool:
    return is_parametrized(module) or any(p.dim() > 1 for p in module.parameters(recurse=False))
