"""Which layers are the last blocks of a network, for a network that is Bayesian only there."""

from __future__ import annotations

from collections import Counter
from glob import escape

from torch import nn

from bayesify.batches import check_count
from bayesify.conversion.select import Selector, own_parameters, select
from bayesify.errors import ConversionError
from bayesify.layers import known_type
from bayesify.layers.base import plain_type
from bayesify.methods.base import Method

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def last(model: nn.Module, method: Method, blocks: int = 1) -> dict[Selector, Method | None]:
    """Assign a method to the last blocks of a network and to all that follows them, such as its head, for `convert`.

    >>> import bayesify as by
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> list(by.last(net, by.Rank1(4), blocks=1))
    ['2', '4']
    >>> model = by.convert(net, by.last(net, by.Rank1(4), blocks=1))

    Blocks are the modules with layers inside whose type occurs at least twice: residual blocks, transformer layers.
    Those inside another block, such as a stage, do not count, nor do containers (`nn.Sequential`, `nn.ModuleList`). In
    a network without such modules, each layer with a matrix or kernel is a block, except for the last one, which is
    the head. Blocks and layers are in the order in which the network registers them, which `by.summary` shows.

    Args:
        model: The network, not converted.
        method: The method. It takes those of the last layers that it would take by default.
        blocks: How many blocks; 0 for all that follows the last block.

    Returns:
        The method for the name of each layer.

    Raises:
        ConversionError: There are fewer blocks, or no layer in them that the method takes.
    """
    check_count("blocks", blocks, least=0, of="last")
    found = block_names(model)
    if blocks > len(found):
        these = f": {', '.join(map(repr, found[:2]))}, …, {found[-1]!r}" if len(found) > 2 else f" {found}"
        raise ConversionError(
            f"last(blocks={blocks}): the network has {len(found)} blocks before its head{these}; use at most "
            f"{len(found)}, or by.convert(model, method) for all layers"
        )
    names = list(dict(model.named_modules()))
    if blocks:
        taken = set(names[names.index(found[-blocks]) :])
    else:
        inside = [names.index(name) for name in names if found and f"{name}.".startswith(f"{found[-1]}.")]
        taken = set(names[max(inside, default=-1) + 1 :])
    chosen = [name for name in select(model, method).methods if name in taken]
    if not chosen:
        where = f"its last {blocks} blocks, from {found[-blocks]!r} on" if blocks else "what follows its last block"
        raise ConversionError(
            f"last(blocks={blocks}): {method} takes by default ({', '.join(method.roles)}) no layer of {where}; use "
            "more blocks, or a pattern: by.convert(model, {'name': method})"
        )
    return {escape(name): method for name in chosen}


def block_names(model: nn.Module) -> list[str]:
    """The names of a network's blocks, in the order in which it registers them."""
    modules = {name: module for name, module in model.named_modules() if name}
    composite = {
        name: plain_type(module)
        for name, module in modules.items()
        if module._modules and type(module) not in CONTAINERS and not known_type(type(module))
    }
    counts = Counter(composite.values())
    repeated = [name for name, kind in composite.items() if counts[kind] > 1 and list(modules[name].parameters())]
    outermost = [name for name in repeated if not any(name.startswith(f"{other}.") for other in repeated)]
    if outermost:
        return outermost
    return [name for name, module in modules.items() if any(p.dim() > 1 for p in own_parameters(module).values())][:-1]
