"""Does the network with one draw for all rows compute what the plain network with that draw as its weights does?

Both run the same operations, so that they agree to rounding in every tensor that they return, in every precision, and
also where the network is random itself. What differs computes with the weight of a converted layer itself. As that does
not depend on how draws are distributed, the draw may be any: far from the network's own weights, and nowhere zero.
"""

import torch
from torch import Tensor, finfo, nn

from bayesify.conversion.check_rows import (
    DRAWN,
    copy_without_dropout,
    giving_draws,
    moved,
    same,
    set_modes,
    without_hooks,
)
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.conversion.weight_reads import Arguments, Reads, call_with_copies, layers_read_elsewhere
from bayesify.errors import BayesifyError, RowError
from bayesify.layers import bayesian_layers
from bayesify.layers.network_state import tensors_in
from bayesify.methods.base import Perturbation
from bayesify.methods.draw_design import seed_torch

MOST_COPIED = 50_000_000
"""Models with more parameters than this are not copied."""
MOVED = 0.2
"""How far parameters are moved, relative to their size, as one that starts at zero may hide a difference."""
COARSER = dict.fromkeys((torch.float32, torch.float64, torch.complex64, torch.complex128), 10)
"""How many times more coarsely than the type tensors are rounded, to see how much the network amplifies it."""
AMPLIFIED = 3
"""How many times as much as that numbers may differ; on a CPU they do not differ at all."""


@torch.no_grad()
def compare_one_draw(model: nn.Module, batch: Arguments) -> None:
    """Raise if a call of the model, in the mode it is in, uses a layer's weights other than as the layer does."""
    is_small = sum(p.numel() for p in model.parameters()) <= MOST_COPIED
    try:
        _compare(model, batch, moves=is_small)
    except BayesifyError:
        raise
    except Exception:  # whatever the network raises for other weights
        if not is_small:
            raise
        _compare(model, batch, moves=False)


def _compare(model: nn.Module, batch: Arguments, *, moves: bool) -> None:
    copied = set_modes(copy_without_dropout(model, () if moves else model.parameters()), model)
    for p in copied.parameters() if moves else ():  # so that none is zero
        if p.is_floating_point():
            p.copy_(moved(p, MOVED))
    layers = bayesian_layers(copied)
    if not layers:  # kept dropout alone
        return
    drawn: dict[str, Perturbation] = {}
    for name, layer in layers.items():
        for suffix, site in layer.sites().items():
            changed = {key: moved(tensor, DRAWN).unsqueeze(0) for key, tensor in site.base.items()}
            weight, bias = changed.get("weight"), changed.get("bias")
            drawn[name + suffix] = Perturbation(1, weight=weight, bias=bias)
    alone, nearby = DrawnNetwork(copied), DrawnNetwork(copied)  # before a call, which may store what it computed
    tensors = alone.tensors(lambda name, suffix, site: drawn[name + suffix])
    with giving_draws(copied, drawn, per_row=False):
        seed_torch(0)
        found = tensors_in(call_with_copies(copied, batch))
    own: dict[int, str] = {}
    for network in (copied, model):  # what a function holds is not copied
        for name in tensors:
            path, _, last = name.rpartition(".")
            parameter = network.get_submodule(path)._parameters.get(last)
            own |= {} if parameter is None else {id(parameter): name}

    def plain(network: nn.Module) -> list[Tensor]:
        set_modes(without_hooks(network), model)
        seed_torch(0)
        with Reads(own.keys() - {id(p) for p in network.parameters()}) as reads:
            outputs = tensors_in(call_with_copies(network, batch))
        if reads.read:
            raise RowError(
                f"the network reads {own[min(reads.read)]!r} other than by this name, as from a list or a function "
                "that holds it, where no draw reaches it. Read it from its layer, or leave the layer out"
            )
        return outputs

    rounding = {name: COARSER.get(t.dtype, 1) * finfo(t.dtype).eps for name, t in tensors.items()}
    rounded = {name: t * (1 + rounding[name] * torch.randn_like(t)) for name, t in tensors.items()}
    expected, amplified = plain(alone.write(tensors)), plain(nearby.write(rounded))
    if not all(map(_same, found, expected, amplified)):
        raise RowError(_reason(layers_read_elsewhere(alone.network, batch, layers)))


def _reason(read: dict[str, bool]) -> str:
    """What is wrong with a network that reads the weights of these layers itself, some of which it does not call."""
    problem = "with one draw for all rows, the output is not what the plain network with that draw gives"
    if not read:
        return f"{problem}: the weight of a converted layer is read outside of its call, where no draw reaches it"
    names, is_called = list(read), all(read.values())
    found = f"layer {', '.join(map(repr, names[:3]))}{'…' * (len(names) > 3)}"
    found += (
        ": its weight is read outside of its call, too" if is_called else ": not called, although its weight is read"
    )
    leave = f"convert(model, {{{names[0]!r}: None, '*': method}})"
    leave = leave if is_called else f"convert(model, method, example=batch) does, or by name: {leave}"
    return f"{problem}. {found}, where no draw reaches it in training. Leave such layers out: {leave}"


def _same(found: Tensor, alone: Tensor, nearby: Tensor) -> bool:
    """Whether numbers are equal but for rounding, which `nearby` shows how much the network amplifies."""
    unit = finfo(alone.dtype).eps if alone.is_floating_point() or alone.is_complex() else 0.0
    return same(found, alone, nearby, AMPLIFIED, 2 * COARSER.get(alone.dtype, 1) * unit)
