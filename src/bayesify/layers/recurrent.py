"""Recurrent layers and cells: several kernels, each drawn once for a sequence and the same at all its steps.

Where one draw serves the batch, it is folded into the weights and the ordinary fused operation runs. Draws per row go
step by step: the input kernel for all steps at once, the recurrent one at each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.rnn import RNNCellBase
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..family import Site
from .base import BayesianLayer, With, plain_type
from .hooked import tensor_of
from .linear import LinearMap
from .sequences import Sequences

State = tuple[Tensor, ...]
Maps = dict[str, Callable[[Tensor], Tensor]]


def lstm_step(layer: nn.Module, x: Tensor, h: Tensor, state: State) -> State:
    """c' = σ(f) c + σ(i) tanh(g), h' = σ(o) tanh(c'), with the gates i, f, g, o of x + h."""
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(layer: nn.Module, x: Tensor, h: Tensor, state: State) -> State:
    """h' = (1 - z) n + z h, with the gates r and z and n = tanh(x_n + r h_n)."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return (n + (x_z + h_z).sigmoid() * (state[0] - n),)


def rnn_step(layer: nn.Module, x: Tensor, h: Tensor, state: State) -> State:
    """h' = tanh(x + h) or relu(x + h)."""
    return ((x + h).tanh() if layer.nonlinearity == "tanh" else (x + h).relu(),)


class RecurrentKernel(LinearMap):
    """One weight of a recurrent layer and its bias; it is (gates · hidden, in), so each gate has output factors."""

    def __init__(self, layer: nn.Module, suffix: str) -> None:
        self.layer, self.suffix = layer, suffix
        self.weight, self.bias = tensor_of(layer, f"weight{suffix}"), tensor_of(layer, f"bias{suffix}")
        if isinstance(layer, BayesianLayer):
            self.family, self.scope, self.posterior = layer.family, layer.scope, layer.posterior
            self.site_name = f"{layer.site_name}.weight{suffix}"

    def base(self) -> dict[str, Tensor]:
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def plain_site(self) -> Site:
        return self._site({})

    def site(self) -> Site:
        return self._site(self.added())

    def _site(self, posterior: dict[str, Tensor]) -> Site:
        out_size, in_size = self.weight.shape
        kind = plain_type(self.layer).__name__
        what: dict[str, Any] = {"is_matrix": True, "recurs": True, "reset": self._fresh, "kind": kind}
        return Site(self.base(), posterior, in_size=in_size, out_size=out_size, **what)

    def _fresh(self) -> dict[str, Tensor]:
        other = copy.deepcopy(self.layer)
        other.reset_parameters()  # type: ignore[operator]
        return {name: t.detach() for name, t in RecurrentKernel(other, self.suffix).plain_site().base.items()}


class _BayesianRecurrent(BayesianLayer):
    role = "recurrent"
    states: ClassVar[int] = 1
    """How many tensors the state is: h, or h and c."""
    step: Callable[[Tensor, Tensor, State], State]
    """The next state from what the kernels make of the input and of the last state."""

    @classmethod
    def sites_of(cls, layer: nn.Module) -> dict[str, Site]:
        return {suffix: RecurrentKernel(layer, suffix).plain_site() for suffix in _suffixes(layer)}

    @classmethod
    def refusal(cls, layer: nn.Module) -> str | None:
        replaced = [name for name in _names(layer) if name not in layer._parameters]
        if replaced:
            return f"its {replaced[0]} is not a parameter but computed (weight_norm or the like); remove that first"
        if len({id(p) for p in layer.parameters()}) < sum(p is not None for p in layer._parameters.values()):
            return "two of its weights are one tensor, which a posterior for each would draw apart"
        return None

    def kernels(self) -> list[RecurrentKernel]:
        return [RecurrentKernel(self, suffix) for suffix in _suffixes(self)]

    def forward(self, input: Any, hx: Any = None) -> Any:
        """One draw for the whole batch runs as the ordinary layer; several are applied row by row."""
        drawn = self.draws_of_call()
        if all(p.is_shared for _, p in drawn) or self.is_unbatched(input):
            return self.fused(input, hx, self.of_first_row(drawn))
        if isinstance(input, Tensor) and input.numel() == 0:
            return self.plain.forward(self, input, hx)
        return self.by_rows(input, hx)

    def fused(self, input: Any, hx: Any, tensors: dict[str, Tensor]) -> Any:
        """The ordinary layer with other tensors."""
        raise NotImplementedError

    def by_rows(self, input: Any, hx: Any) -> Any:
        """The layer with a draw per row."""
        raise NotImplementedError

    def maps(self, x: Tensor) -> Maps:
        """The kernels by suffix, as functions of inputs that have the rows of x (rows, …)."""
        rows = self.follow(x.shape[0], self.batch, self.row_dim(x))
        return {kernel.suffix: kernel.on(rows) for kernel in self.kernels()}


class _BayesianSequence(_BayesianRecurrent, nn.RNNBase):
    def is_unbatched(self, x: Any) -> bool:
        return not isinstance(x, PackedSequence) and x.dim() == 2

    def as_tensor(self, input: Any, *args: Any, **kwargs: Any) -> Tensor:
        return pad_packed_sequence(input, self.batch_first)[0] if isinstance(input, PackedSequence) else input

    def row_dim(self, x: Tensor) -> int:
        return 0 if self.batch_first else 1

    def fused(self, input: Any, hx: Any, tensors: dict[str, Tensor]) -> Any:
        weights = [tensors[name] for name in self._flat_weights_names]
        return self.plain.forward(With(self, _flat_weights=weights), input, hx)

    def by_rows(self, input: Any, hx: Any) -> Any:
        self._check(input, hx)
        sequences = Sequences.of(input, self.batch_first).for_all(self.batch)
        output, last = self._through_layers(sequences, self._first_state(hx, sequences.x))
        return sequences.like_input(output), _as_given(last)

    def _check(self, input: Any, hx: Any) -> None:
        """As the ordinary layer does."""
        packed = isinstance(input, PackedSequence)
        data, sizes = (input.data, input.batch_sizes) if packed else (input, None)
        self.check_input(data, sizes) if hx is None else self.check_forward_args(data, hx, sizes)

    def _through_layers(self, sequences: Sequences, state: State) -> tuple[Tensor, State]:
        """The output (time, rows, …) of the last layer and the last state of all."""
        maps = self.maps(sequences.x)
        last: list[State] = []
        ways = ("", "_reverse") if self.bidirectional else ("",)
        y = sequences.x.transpose(0, 1)
        for depth in range(self.num_layers):
            x = F.dropout(y, self.dropout, self.training and depth > 0).transpose(0, 1)
            outputs = []
            for way in ways:
                first = tuple(part[len(last)] for part in state)
                output, end = self._scan(x, maps, f"_l{depth}{way}", first, sequences.alive)
                outputs.append(output)
                last.append(end)
            y = torch.cat(outputs, -1) if len(ways) > 1 else outputs[0]
        return y, tuple(torch.stack(part) for part in zip(*last, strict=True))

    def _scan(self, x: Tensor, maps: Maps, at: str, state: State, alive: Tensor | None) -> tuple[Tensor, State]:
        """One layer in one direction: its outputs (time, rows, …) and its last state; ended sequences keep theirs."""
        gates, recur, project = maps[f"_ih{at}"](x).unbind(1), maps[f"_hh{at}"], maps.get(f"_hr{at}")
        outputs = [state[0]] * len(gates)
        steps = range(len(gates))
        for t in reversed(steps) if at.endswith("_reverse") else steps:
            after = self.step(gates[t], recur(state[0]), state)
            if project is not None:
                after = (project(after[0]), *after[1:])
            if alive is not None:
                after = tuple(torch.where(alive[t], new, old) for new, old in zip(after, state, strict=True))
            state = after
            outputs[t] = state[0]
        return torch.stack(outputs), state

    def _first_state(self, hx: Any, x: Tensor) -> State:
        """The given state or zeros, each part (layers · directions, rows, size)."""
        if hx is not None:
            return tuple(part.expand(-1, x.shape[0], -1) for part in _as_state(hx))
        depth = self.num_layers * (2 if self.bidirectional else 1)
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)[: self.states]
        return tuple(x.new_zeros(depth, x.shape[0], size) for size in sizes)


class _BayesianCell(_BayesianRecurrent, RNNCellBase):
    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

    def row_dim(self, x: Tensor) -> int:
        return 0

    def fused(self, input: Tensor, hx: Any, tensors: dict[str, Tensor]) -> Any:
        return self.plain.forward(With(self, **tensors), input, hx)

    def by_rows(self, input: Tensor, hx: Any) -> Any:
        x = input.expand(self.batch, -1) if input.shape[0] == 1 else input
        zeros = (x.new_zeros(x.shape[0], self.hidden_size),) * self.states
        state = zeros if hx is None else tuple(part.expand(x.shape[0], -1) for part in _as_state(hx))
        maps = self.maps(x)
        return _as_given(self.step(maps["_ih"](x), maps["_hh"](state[0]), state))


class BayesianLSTM(_BayesianSequence, nn.LSTM):
    """`nn.LSTM` under a perturbation of each of its kernels."""

    plain = nn.LSTM
    states = 2
    step = lstm_step


class BayesianGRU(_BayesianSequence, nn.GRU):
    """`nn.GRU` under a perturbation of each of its kernels."""

    plain = nn.GRU
    step = gru_step


class BayesianRNN(_BayesianSequence, nn.RNN):
    """`nn.RNN` under a perturbation of each of its kernels."""

    plain = nn.RNN
    step = rnn_step


class BayesianLSTMCell(_BayesianCell, nn.LSTMCell):
    """`nn.LSTMCell` under a perturbation of each of its kernels."""

    plain = nn.LSTMCell
    states = 2
    step = lstm_step


class BayesianGRUCell(_BayesianCell, nn.GRUCell):
    """`nn.GRUCell` under a perturbation of each of its kernels."""

    plain = nn.GRUCell
    step = gru_step


class BayesianRNNCell(_BayesianCell, nn.RNNCell):
    """`nn.RNNCell` under a perturbation of each of its kernels."""

    plain = nn.RNNCell
    step = rnn_step


def _suffixes(layer: nn.Module) -> list[str]:
    """What stands behind "weight" in its parameters' names: one for each kernel."""
    return [name.removeprefix("weight") for name in _names(layer) if name.startswith("weight")]


def _names(layer: nn.Module) -> list[str]:
    """Those of its tensors, parameters or made of some."""
    names: list[str] = getattr(layer, "_flat_weights_names", ["weight_ih", "weight_hh"])
    return names


def _as_state(given: Any) -> State:
    return (given,) if isinstance(given, Tensor) else tuple(given)


def _as_given(state: State) -> Any:
    """h alone, or h and c, as the ordinary layers give it."""
    return state if len(state) > 1 else state[0]
