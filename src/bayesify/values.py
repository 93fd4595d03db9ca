"""The tensors of a layer under its draws, its mean and its components' means: what is written into copies of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .family import Draws, precise
from .layers import BayesianDropout, BayesianLayer, Kernel
from .layers.factored import factors_of
from .memory import Memory

Tensors = dict[str, Tensor]


class Wanted:
    """Draws of some indices from a seed, as each kernel asks for them; noise in memory that is `lent`, if any is."""

    def __init__(self, seed: int, indices: Sequence[int], lent: Memory | None = None) -> None:
        self.seed, self.indices, self.lent = seed, indices, lent
        self.of_points: dict[torch.device | None, Draws] = {}

    def of(self, kernel: Kernel) -> Draws:
        """With noise of its own; points have none, so they share their draws."""
        device = None if kernel.weight is None else kernel.weight.device
        if device not in self.of_points:
            self.of_points[device] = Draws(torch.tensor(self.indices, device=device))
        if kernel.family.tied and not kernel.family.noisy:
            return self.of_points[device]
        seeds = [noise_seed(self.seed, index, kernel.site_name) for index in self.indices]
        generators = tuple(torch.Generator().manual_seed(each) for each in seeds)
        return Draws(self.of_points[device].position, generators, memory=self.lent)


def draws_into(layer: BayesianLayer, wanted: Wanted, *, factored: bool = False) -> Tensors:
    """The tensors of the ordinary (or `factored`) layer that draws change, by name, each with a leading S."""
    return _by_kernel(layer, lambda kernel: _draws(kernel, wanted, factored))


def one_of(stacks: dict[str, Tensor], place: int) -> Tensors:
    """The values of one draw among several."""
    return {name: stack[place] for name, stack in stacks.items()}


def mean_into(layer: BayesianLayer) -> Tensors:
    """The tensors that differ in the mean."""
    return _by_kernel(layer, _mean)


def member_into(layer: BayesianLayer, component: int) -> Tensors:
    """The tensors that differ in the mean of one component."""
    return _by_kernel(layer, lambda kernel: _member(kernel, component))


def _by_kernel(layer: BayesianLayer, values: Callable[[Kernel], dict[str, Tensor]]) -> Tensors:
    """The values of each of a layer's kernels under the names of the layer's tensors."""
    if isinstance(layer, BayesianDropout):
        return {}
    return layer.assembled([(kernel, values(kernel)) for kernel in layer.kernels()])


def _draws(kernel: Kernel, wanted: Wanted, factored: bool) -> Tensors:
    p = kernel.every_draw(wanted.of(kernel))
    return factors_of(p) if factored else kernel.folded_each(p)


def _member(kernel: Kernel, component: int) -> Tensors:
    means = kernel.family.mean(kernel.site())
    return _changed(kernel, kernel.folded(means, component % means.size))


def _mean(kernel: Kernel) -> Tensors:
    each = [_member(kernel, component) for component in range(kernel.family.components)]
    if len(each) == 1:
        return each[0]
    weights = kernel.family.weights(kernel.site())
    weights = torch.full((len(each),), 1 / len(each)) if weights is None else weights
    return {name: _average([values[name] for values in each], weights) for name in each[0]}


def _average(tensors: list[Tensor], weights: Tensor) -> Tensor:
    stack = precise(torch.stack(tensors))
    shares = weights.to(stack).reshape(-1, *[1] * (stack.dim() - 1))
    return (shares * stack).sum(0).to(tensors[0].dtype)


def noise_seed(seed: int, index: int, name: str) -> int:
    """A seed for a layer's noise in one draw; 32 bits, all that a CPU generator uses."""
    digest = hashlib.blake2s(f"{seed}/{index}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _changed(kernel: Kernel, values: dict[str, Tensor]) -> Tensors:
    return {name: value for name, value in values.items() if value is not getattr(kernel, name)}
