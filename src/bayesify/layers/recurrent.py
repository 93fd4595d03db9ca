"""Recurrent layers and cells: several weights, each drawn once for a sequence and the same at all its steps.

Where one draw serves the batch, it is folded into the weights and the ordinary fused operation runs. Draws per row go
step by step: the input weights for all steps at once, the recurrent ones at each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bayesify.layers.base import BayesianLayer, affine_site, computed_tensor, layer_type, own_tensors, stand_in
from bayesify.layers.linear import LINEAR, Map, draws_of_call
from bayesify.methods.base import Site

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]
"""The next state from what the weights make of the input and of the last state."""


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


def weight_sites(layer: nn.Module) -> dict[str, Site]:
    """What a method sees of each weight (gates · hidden, in) of a recurrent layer; each gate has its output factors."""
    suffixes = [name.removeprefix("weight") for name in _names(layer) if name.startswith("weight")]
    tensors = {suffix: partial(own_tensors, names=(f"weight{suffix}", f"bias{suffix}")) for suffix in suffixes}
    return {suffix: affine_site(layer, tensors[suffix], suffix, is_matrix=True, recurs=True) for suffix in suffixes}


def _names(layer: nn.Module) -> list[str]:
    names: list[str] = getattr(layer, "_flat_weights_names", ["weight_ih", "weight_hh"])
    return names


def refusal_of(layer: nn.Module) -> str | None:
    """Why no method can apply to a recurrent layer, or None."""
    if len({id(p) for p in layer.parameters()}) < sum(p is not None for p in layer._parameters.values()):
        return "two of its weights are one tensor, which a posterior for each would draw apart"
    return computed_tensor(layer, _names(layer))


class RecurrentSequence(BayesianLayer, nn.RNNBase):
    """Layers over whole sequences, stacked and in both directions."""

    role = "recurrent"
    operation = LINEAR
    states: ClassVar[int] = 1
    """How many tensors the state is: h, or h and c."""
    step: Step
    sites_of = staticmethod(weight_sites)
    refusal = staticmethod(refusal_of)

    def is_unbatched(self, x: Any) -> bool:
        return not isinstance(x, PackedSequence) and x.dim() == 2

    def as_tensor(self, input: Any, *args: Any, **kwargs: Any) -> Tensor:
        return pad_packed_sequence(input, self.batch_first)[0] if isinstance(input, PackedSequence) else input

    def row_dim(self, x: Tensor) -> int:
        return 0 if self.batch_first else 1

    def forward(self, input: Any, hx: Any = None) -> Any:
        weights = draws_of_call(self, unbatched=self.is_unbatched(input))
        if isinstance(weights, dict):
            flat = [weights[name] for name in self._flat_weights_names]
            return self.plain.forward(stand_in(self, self.plain, _flat_weights=flat), input, hx)
        packed = isinstance(input, PackedSequence)
        data, sizes = (input.data, input.batch_sizes) if packed else (input, None)
        if data.numel() == 0:
            return self.plain.forward(self, input, hx)
        self.check_input(data, sizes) if hx is None else self.check_forward_args(data, hx, sizes)
        padded, lengths = pad_packed_sequence(input, self.batch_first) if packed else (input, None)
        x, rows = self.rows_of(padded, self.row_dim(padded), repeats=not packed)
        steps = torch.arange(x.shape[1]).unsqueeze(1)
        alive = None if lengths is None else (steps < lengths).unsqueeze(2).to(x.device)  # (time, rows, 1)
        y, last = self._through_layers(x, alive, self._first_state(hx, x), weights(rows))
        if lengths is None:
            return y.transpose(0, 1) if self.batch_first else y, _as_given(last)
        if input.sorted_indices is not None:
            y, lengths = y.index_select(1, input.sorted_indices), lengths[input.sorted_indices.cpu()]
        return PackedSequence(pack_padded_sequence(y, lengths).data, *input[1:]), _as_given(last)

    def _through_layers(
        self, x: Tensor, alive: Tensor | None, state: State, maps: dict[str, Map]
    ) -> tuple[Tensor, State]:
        """The output (time, rows, …) of the last layer and the last state of all."""
        last: list[State] = []
        directions = ("", "_reverse") if self.bidirectional else ("",)
        y = x.transpose(0, 1)
        for depth in range(self.num_layers):
            x = F.dropout(y, self.dropout, self.training and depth > 0).transpose(0, 1)
            outputs = []
            for direction in directions:
                first = tuple(part[len(last)] for part in state)
                output, end = self._scan(x, maps, f"_l{depth}{direction}", first, alive)
                outputs.append(output)
                last.append(end)
            y = torch.cat(outputs, -1) if len(directions) > 1 else outputs[0]
        return y, tuple(torch.stack(part) for part in zip(*last, strict=True))

    def _scan(
        self, x: Tensor, maps: dict[str, Map], at: str, state: State, alive: Tensor | None
    ) -> tuple[Tensor, State]:
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
        depth = self.num_layers * (2 if self.bidirectional else 1)
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)[: self.states]
        given = (x.new_zeros(depth, 1, size) for size in sizes) if hx is None else _as_state(hx)
        return tuple(part.expand(-1, x.shape[0], -1) for part in given)


class RecurrentCell(BayesianLayer, nn.RNNCellBase):
    """One step of a sequence."""

    role = "recurrent"
    operation = LINEAR
    states: ClassVar[int] = 1
    step: Step
    sites_of = staticmethod(weight_sites)
    refusal = staticmethod(refusal_of)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        weights = draws_of_call(self, unbatched=self.is_unbatched(input))
        if isinstance(weights, dict):
            return self.plain.forward(stand_in(self, self.plain, **weights), input, hx)
        if input.numel() == 0:
            return self.plain.forward(self, input, hx)
        x, rows = self.rows_of(input, 0)
        given = (x.new_zeros(1, self.hidden_size),) * self.states if hx is None else _as_state(hx)
        state, maps = tuple(part.expand(x.shape[0], -1) for part in given), weights(rows)
        return _as_given(self.step(maps["_ih"](x), maps["_hh"](state[0]), state))


BayesianLSTM = layer_type(nn.LSTM, RecurrentSequence, states=2, step=lstm_step)
BayesianGRU = layer_type(nn.GRU, RecurrentSequence, step=gru_step)
BayesianRNN = layer_type(nn.RNN, RecurrentSequence, step=rnn_step)
BayesianLSTMCell = layer_type(nn.LSTMCell, RecurrentCell, states=2, step=lstm_step)
BayesianGRUCell = layer_type(nn.GRUCell, RecurrentCell, step=gru_step)
BayesianRNNCell = layer_type(nn.RNNCell, RecurrentCell, step=rnn_step)


def _as_state(given: Any) -> State:
    return (given,) if isinstance(given, Tensor) else tuple(given)


def _as_given(state: State) -> Any:
    """h alone, or h and c, as the ordinary layers give it."""
    return state if len(state) > 1 else state[0]
