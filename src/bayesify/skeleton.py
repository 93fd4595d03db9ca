"""Copies of a model's structure with ordinary layers, into which draws are written.

The model itself is never touched: the copy shares every tensor that no draw changes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn

from .copies import plain_copy
from .layers import BayesianDropout, BayesianLayer, named_modules
from .layers.dropout import FrozenDropout
from .layers.factored import make_factored, takes_factors
from .layers.norm import refuse_batch_statistics
from .layout import put_channels_last
from .memory import Memory
from .selection import drawn_parameters, unwrapped
from .values import Tensors, Wanted, draws_into, mean_into, member_into, noise_seed, one_of

AHEAD = 1 << 22
"""Draws are made ahead, many in few operations, as long as they have no more numbers than this."""
Values = dict[str, Tensors]
"""Tensors by their layer's name and their own."""


class Skeleton:
    """A plain copy of a model, in evaluation mode, and the tensors of it that draws write.

    `seed=None` is the mean network, where `index` has no meaning; `member` writes the mean of one component. `draws` is
    how many will be asked for, one after the other: as many as fit into `AHEAD` numbers are made at once and kept.
    A copy that is only called, with draws, may be `lent` their tensors, even the model's own, in place of the values,
    with memory for them; `factored`, linear layers of it keep factors beside their weight.
    """

    def __init__(self, model: nn.Module, draws: int = 1, *, lent: Memory | None = None, factored: bool = False) -> None:
        model = unwrapped(model)
        modules = named_modules(model)
        self.layers = {name: layer for name, layer in modules.items() if isinstance(layer, BayesianLayer)}
        refuse_batch_statistics(modules)
        self.network = plain_copy(model, list(modules.values()))
        copied = named_modules(self.network)
        if any(module.training for module in copied.values()):
            self.network.eval()
        self.prefix = share_before(copied, self.layers)
        self.factored = {name for name, layer in self.layers.items() if factored and takes_factors(layer)}
        for name in self.factored:
            make_factored(self.network.get_submodule(name))
        self.targets: dict[tuple[str, str], Tensor] = {}
        self.has_channels_last = False
        self.kept_layouts: set[int] = set()
        self.buffers = [b for module in copied.values() for b in module._buffers.values() if b is not None]
        self.numbers = sum(self._numbers(name) for name in self.layers)
        self.prepare(draws, lent)

    def prepare(self, draws: int, lent: Memory | None) -> None:
        """Be ready for so many draws, of which none is made yet."""
        self.lent = lent
        self.draws, self.block = draws, max(1, min(draws, AHEAD // max(self.numbers, 1)))
        self.ahead: dict[tuple[int, int], tuple[Values, int]] = {}

    def forget(self) -> None:
        """Let go of all draws, which live in memory that is needed elsewhere."""
        self.prepare(1, None)
        for target in self.targets.values():
            target.data = target.new_empty(0)

    def _numbers(self, name: str) -> int:
        """How many of them a draw of a layer is."""
        if name in self.factored:
            return sum(self.layers[name].weight.shape)
        return sum(p.numel() for p in drawn_parameters(self.layers[name]).values())

    @torch.no_grad()
    def drawn(self, seed: int, index: int) -> list[Tensor]:
        """The values of draw `index` from a seed, in the order of `targets`."""
        stacks, place = self._stacks(seed, index)
        return [stacks[name][tensor][place] for name, tensor in self.targets]

    def in_one_block(self, indices: range) -> bool:
        """Whether so many draws are made at once."""
        return indices[0] % self.block + len(indices) <= self.block

    @torch.no_grad()
    def stacked(self, seed: int, indices: range) -> list[Tensor]:
        """The values of several draws of one block, each tensor with a leading S."""
        assert self.in_one_block(indices)
        stacks, place = self._stacks(seed, indices[0])
        return [stacks[name][tensor][place : place + len(indices)] for name, tensor in self.targets]

    @torch.no_grad()
    def write(self, seed: int | None, index: int = 0) -> nn.Module:
        """Turn the copy into a draw or, without a seed, into the mean."""
        freeze_dropout(self.network, self.layers, seed, index)
        if seed is None:
            assert self.lent is None
            return self._fill({name: mean_into(layer) for name, layer in self.layers.items()})
        stacks, place = self._stacks(seed, index)
        return self._fill({name: one_of(each, place) for name, each in stacks.items()})

    def _stacks(self, seed: int, index: int) -> tuple[Values, int]:
        """Values that hold some draw, each tensor with a leading S, and the draw's place there."""
        if (seed, index) not in self.ahead:
            self.ahead = {}
            if self.lent is not None:
                self.lent.rewind()
                for target in self.targets.values():
                    if id(target) not in self.kept_layouts:
                        target.data = target.new_empty(0)  # so that memory that was not lent serves again too
            first = index - index % self.block
            indices = range(first, max(index + 1, min(first + self.block, self.draws)))
            wanted = Wanted(seed, indices, self.lent)
            stacks = {
                name: draws_into(layer, wanted, factored=name in self.factored) for name, layer in self.layers.items()
            }
            self.ahead = {(seed, i): (stacks, i - first) for i in indices}
        return self.ahead[seed, index]

    @torch.no_grad()
    def write_several(self, seed: int, indices: range) -> nn.Module:
        """Turn a copy whose layers all keep factors into several draws of one block, for as many copies of a batch."""
        assert self.has_only_factors and self.in_one_block(indices)
        stacks, place = self._stacks(seed, indices[0])
        some = slice(place, place + len(indices))
        return self._fill({name: {key: stack[some] for key, stack in each.items()} for name, each in stacks.items()})

    @torch.no_grad()
    def write_member(self, component: int) -> nn.Module:
        """Turn the copy into the mean of one component."""
        return self._fill({name: member_into(layer, component) for name, layer in self.layers.items()})

    @torch.no_grad()
    def write_values(self, values: list[Tensor]) -> nn.Module:
        """Turn the copy into a draw whose values are known."""
        if self.lent is not None:
            for target, value in zip(self.targets.values(), values, strict=True):
                if id(target) in self.kept_layouts:
                    target.copy_(value)
                else:
                    target.data = value
        else:
            torch._foreach_copy_(list(self.targets.values()), values)
        return self.network

    def put_channels_last(self) -> None:
        """Give the convolutions their faster layout, from the draw on that the copy is now."""
        if not self.has_channels_last:
            self.kept_layouts = put_channels_last(self.network, self.targets.values())
            self.has_channels_last = True

    def holds(self, output: Tensor) -> bool:
        """Whether an output lives in a tensor that the next draw, or the network itself, may overwrite."""
        pointer = output.untyped_storage().data_ptr()
        kept = (target for target in self.targets.values() if id(target) in self.kept_layouts)
        return any(tensor.untyped_storage().data_ptr() == pointer for tensor in (*kept, *self.buffers))

    def _fill(self, values: Values) -> nn.Module:
        """Write values; a target without one is the base tensor."""
        self._own(values)
        each = [
            (values[name][tensor] if tensor in values[name] else attrgetter(tensor)(self.layers[name])).to(target.dtype)
            for (name, tensor), target in self.targets.items()
        ]
        return self.write_values(each) if each else self.network

    @property
    def has_only_factors(self) -> bool:
        """Whether every layer that is drawn keeps its factors beside its weight."""
        return len(self.factored) == len(self.layers)

    @property
    def has_dropout(self) -> bool:
        """Whether a mask is drawn only when its input's shape is known."""
        return any(isinstance(layer, BayesianDropout) for layer in self.layers.values())

    def alone(self) -> nn.Module:
        """The copy with tensors of its own everywhere, tied as they were."""
        written = {id(target) for target in self.targets.values()}
        own: dict[int, nn.Parameter] = {}
        for module in self.network.modules():
            for name, p in module._parameters.items():
                if p is not None and id(p) not in written:
                    own.setdefault(id(p), nn.Parameter(p.detach().clone(), requires_grad=False))
                    module._parameters[name] = own[id(p)]
        return self.network

    def _own(self, values: Values) -> None:
        """Give the copy its own tensors wherever values are written for the first time."""
        new = [(name, tensor) for name in values for tensor in values[name] if (name, tensor) not in self.targets]
        for name, tensor in new:
            own = values[name][tensor].data if self.lent is not None else values[name][tensor].clone()
            module, last = holder(self.network.get_submodule(name), tensor)
            if last in module._parameters:
                own = module._parameters[last] = nn.Parameter(own, requires_grad=False)
            else:
                module.__dict__.pop(last, None)  # what a hook made of a parameter
                module._buffers[last] = own
            self.targets[name, tensor] = own


def share_before(modules: Mapping[str, nn.Module], layers: Container[str]) -> float:
    """The share of matrices and kernels that stand before the first of some layers: what computing once may save.

    >>> share_before({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)}, ["1"])
    0.5
    """
    before, total = 0, 0
    drawn = False
    for name, module in modules.items():
        drawn = drawn or name in layers
        big = sum(p is not None and p.dim() > 1 for p in module._parameters.values())
        before, total = before + big * (not drawn), total + big
    return before / max(total, 1)


def freeze_dropout(network: nn.Module, layers: dict[str, BayesianLayer], seed: int | None, index: int) -> None:
    """Put one draw's mask (or without a seed nothing) wherever a kept dropout module, or its last draw, stands."""
    for name, layer in layers.items():
        if isinstance(layer, BayesianDropout):
            frozen: nn.Module = nn.Identity()
            if seed is not None:
                frozen = FrozenDropout(layer, noise_seed(seed, index, layer.site_name))
            before = network.get_submodule(name)
            for module in network.modules():
                for child, part in module._modules.items():
                    if part is before:
                        module._modules[child] = frozen.eval()


def holder(layer: nn.Module, tensor: str) -> tuple[nn.Module, str]:
    """The module that a layer's tensor is of, which may be a part of the layer, and its name there."""
    path, _, name = tensor.rpartition(".")
    return layer.get_submodule(path), name
