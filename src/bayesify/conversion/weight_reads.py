"""Which layers' weights does a network read outside of the calls of these layers, where no draw reaches them?"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesify.batches import mapped
from bayesify.layers.network_state import copy_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a call."""


def arguments_of(batch: Any) -> Arguments:
    """How a network is called with a batch: by name where it is a dict."""
    return ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})


def call_with_copies(network: nn.Module, arguments: Arguments) -> Any:
    """Call a network with copies of the tensors, as it may change them in place."""
    args, kwargs = mapped(arguments, Tensor.clone)
    return network(*args, **kwargs)


class Reads(TorchFunctionMode):
    """Which tensors, by their ids, are computed with while none of some modules is called, and which are called."""

    def __init__(self, tensors: Collection[int], modules: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.tensors, self.read, self.called, self.under_way = set(tensors), set[int](), set[nn.Module](), 0
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, prepend=True, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.called.add(module)
        self.under_way += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.under_way -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.under_way and isinstance(result, (Tensor, tuple, list)):  # and not a shape or a dtype
            values = [*args, *(kwargs or {}).values()]
            values += [part for value in values if isinstance(value, (tuple, list)) for part in value]
            self.read |= self.tensors & {id(value) for value in values}
        return result


@torch.no_grad()
def layers_read_elsewhere(network: nn.Module, batch: Arguments, names: Iterable[str]) -> dict[str, bool]:
    """The layers of a plain network whose weights another module reads, and whether they are called, too."""
    network = copy_of(network, shared=network.parameters())
    modules = {name: network.get_submodule(name) for name in names}
    tensors = {id(p) for module in modules.values() for p in module.parameters(recurse=False)}
    with Reads(tensors, modules.values()) as reads:
        call_with_copies(network, batch)
    read = [n for n, module in modules.items() if reads.read & {id(p) for p in module.parameters(recurse=False)}]
    return {name: modules[name] in reads.called for name in read}


def bypassed_layers(network: nn.Module, batch: Arguments, names: Iterable[str]) -> list[str]:
    """The layers of a plain network, in evaluation, that are not called, although their weights are read."""
    network = copy_of(network, shared=network.parameters()).eval()
    return [name for name, is_called in layers_read_elsewhere(network, batch, names).items() if not is_called]
