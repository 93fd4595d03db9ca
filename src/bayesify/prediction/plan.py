"""How S draws of a network are run on a batch: one after the other, or vectorized in one call.

The rules are in `Plan.is_vectorized`. Both ways give the same outputs. Draws that run one after the other share the
first part of the network, up to its first drawn layer. If a vectorized call fails, they run one after the other
instead, which raises any error of the network itself.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesify.batches import keys_with_rows, output_of, row_count, run
from bayesify.conversion.drawn_network import DrawnNetwork, rescaled_weights
from bayesify.errors import BayesifyError
from bayesify.layers.base import Tensors
from bayesify.layers.network_state import may_store, tokens_of
from bayesify.methods.draw_design import Design
from bayesify.prediction.first_part import FirstPart

FEW_ROWS = 4  # up to so many rows, the overhead of S calls outweighs their arithmetic: benchmarks/results/plan.md
HEAD_START = 0.5  # linear layers after at least this fraction of the network's weight matrices are its head: likewise
FIRST_PART = 1 << 20  # rows times numbers in matrices before the drawn layers from which these are computed once
MAX_DRAWN_NUMBERS = 1 << 22  # the draws made at a time, and their outputs, have at most so many numbers (16 MB)
MAX_SUMMED_NUMBERS = 1 << 18  # and the outputs summed up at a time (1 MB), as summing needs a few times their memory
Call = Callable[[nn.Module, Any], Tensor]
_WARNINGS = RLock()  # held while warnings are errors: threads share the filters, and must not restore each other's


class Plan:
    """Runs the draws of one network on batches; a draw is the same function for every batch."""

    def __init__(self, model: nn.Module, seed: int, call: Call | None, design: Design = "balanced") -> None:
        self.model, self.seed, self.call, self.design = model, seed, call or run, design
        self.drawn = DrawnNetwork(model, design)
        self.drawn.design_of(seed)  # raises unless the seed is an integer
        self.blocks = self.drawn.blocks
        self.state = tokens_of(self.drawn.network)
        self.is_unverified = may_store(self.drawn.network)
        self.may_vectorize = call is None and not self.drawn.has_dropout
        self.only_head = _only_head(self.drawn)
        self.first_numbers = _first_numbers(self.drawn)
        parameters = self.drawn.drawn_parameters()
        self.at_a_time = max(1, MAX_DRAWN_NUMBERS // sum([1 + p.numel() for p in parameters], 1))
        self.width = max([p.shape[0] for p in parameters if p.dim()], default=1)
        self.row_dim = 0
        """The dimension of the outputs' rows, known after the first output."""
        self._last: tuple[range, Tensors] = (range(0), {})

    def is_vectorized(self, rows: int, draws: int, of: int) -> bool:
        """Whether draws share one call, of so many: those of few rows, or all where only the head is drawn."""
        return self.may_vectorize and draws > 1 and (rows <= FEW_ROWS or (self.only_head and draws == of))

    def has_first_part(self, rows: int, draws: int) -> bool:
        """Whether the layers before the drawn ones are worth computing once for all draws."""
        return draws > 1 and self.first_numbers > 0 and rows * self.first_numbers >= FIRST_PART

    def keys_with_rows(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """Which entries of a dict of inputs have rows, by calls of the first draw."""
        keys = keys_with_rows(data, self.drawn.batch_dim, lambda some: next(self.outputs(some, range(1)))[0])
        self._renew()  # a call that failed may have stored something
        return keys

    def outputs(self, batch: Any, draws: range) -> Iterator[Tensor]:
        """A batch's outputs for a range of draws, in order, in stacks (M, …) of a few draws each."""
        rows = row_count(batch, self.drawn.batch_dim)
        first = FirstPart(self.drawn.network) if self.has_first_part(rows, len(draws)) else None
        at_a_time = min(self.at_a_time, max(1, MAX_DRAWN_NUMBERS // max(rows * self.width, 1)))
        for start in range(draws.start, draws.stop, at_a_time):
            some = range(start, min(start + at_a_time, draws.stop))
            tensors, versions = self._tensors(some), _versions(self.model)
            is_vectorized = self.is_vectorized(rows, len(some), len(draws))
            together = self._vectorized(batch, tensors) if is_vectorized else None
            for stack in self._one_by_one(batch, tensors, some, first) if together is None else [together]:
                _refuse_changes(versions)
                self.row_dim = self.drawn.batch_dim if stack.dim() > 3 else 0
                yield from stack.split(max(1, MAX_SUMMED_NUMBERS // max(stack[0].numel(), 1)))
            if self.is_unverified and together is None and len(draws) > 1:
                self._compare_with_new_copy(batch, tensors, len(some) - 1, some[-1], stack[-1])

    def _tensors(self, draws: range) -> Tensors:
        """The tensors of some draws, cached for the next batch, which usually needs the same."""
        if self._last[0] != draws:
            self._last = draws, self.drawn.draws(self.seed, draws)
        return self._last[1]

    def _one_by_one(
        self, batch: Any, tensors: Tensors, draws: range, first: FirstPart | None = None
    ) -> Iterator[Tensor]:
        outputs: list[Tensor] = []
        for place, index in enumerate(draws):
            outputs.append(self._output(self.drawn, batch, tensors, place, index, first))
            if tokens_of(self.drawn.network) != self.state:
                self._renew()
                first = None
            if len(outputs) * outputs[0].numel() >= MAX_SUMMED_NUMBERS:
                yield torch.stack(outputs)
                outputs = []
        if outputs:
            yield torch.stack(outputs)

    def _output(
        self, drawn: DrawnNetwork, batch: Any, tensors: Tensors, place: int, index: int, first: FirstPart | None = None
    ) -> Tensor:
        def call() -> Tensor:
            return self.call(network, batch).clone()  # it may be a buffer that the next call overwrites

        if drawn.has_dropout:
            drawn.freeze_dropout(self.seed, index)
        network = drawn.write(tensors, place)
        return call() if first is None else first.run(call, drawn.written())

    def _renew(self) -> None:
        """Start from a new copy: a call has stored something in this one, and what a draw computed is its own."""
        self.drawn = DrawnNetwork(self.model, self.design)
        self.state = tokens_of(self.drawn.network)

    def _compare_with_new_copy(self, batch: Any, tensors: Tensors, place: int, index: int, found: Tensor) -> None:
        """Raise if a draw gives another output when it is computed by itself, as it must if draws share no results."""
        self.is_unverified = False
        if self._is_close_on_few_rows(batch, tensors, place, index, found):
            return
        alone = self._output(DrawnNetwork(self.model, self.design), batch, tensors, place, index)
        if _is_close(found, alone):
            return
        if _is_close(alone, self._output(DrawnNetwork(self.model, self.design), batch, tensors, place, index)):
            raise BayesifyError(  # otherwise the network is random itself
                f"draw {index} gives another output alone than after others: the network keeps results of its calls "
                "where they can't be seen, such as in an array. Let it compute them in every call in evaluation"
            )

    def _is_close_on_few_rows(self, batch: Any, tensors: Tensors, place: int, index: int, found: Tensor) -> bool:
        """Whether a draw's outputs for a few rows are those that it gives by itself, which costs less than all rows."""
        if not isinstance(batch, Tensor) or not batch.dim() or self.call is not run or found.dim() <= self.row_dim:
            return False
        rows = batch.narrow(
            min(self.drawn.batch_dim, batch.dim() - 1), 0, min(FEW_ROWS, row_count(batch, self.drawn.batch_dim))
        )
        try:
            alone = self._output(DrawnNetwork(self.model, self.design), rows, tensors, place, index)
        except Exception:  # the network may take batches of one size only; then all rows are compared
            return False
        return _is_close(found.narrow(self.row_dim, 0, min(FEW_ROWS, found.shape[self.row_dim])), alone)

    def _vectorized(self, batch: Any, tensors: Tensors) -> Tensor | None:
        """The outputs (S, …) of all draws by `torch.vmap`; None if the network can't be vectorized."""
        arguments = ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})

        def once(drawn: Tensors) -> Tensor:
            # Tied tensors are drawn under the first of their names.
            return output_of(functional_call(self.drawn.network, drawn, *arguments, tie_weights=False))

        try:
            with _WARNINGS, warnings.catch_warnings():
                # Some operations, such as attention on the CPU, loop over draws under vmap: nothing would be gained.
                warnings.filterwarnings("error", message="There is a performance drop")
                outputs: Tensor = torch.vmap(once, randomness="error")(tensors)
        except Exception:  # whatever the reason, the draws run one by one instead, and raise if they must
            self.may_vectorize = False
            self._renew()  # the failed call may have left vmap's tensors in the copy
            return None
        if tokens_of(self.drawn.network) != self.state:
            self._renew()
        return outputs


def _versions(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """The versions of the parameters that no call should change."""
    rescaled = rescaled_weights(model)
    given = {name: p for name, p in model.named_parameters() if id(p) not in rescaled and not p.is_inference()}
    return {name: (p, p._version) for name, p in given.items()}


def _refuse_changes(versions: dict[str, tuple[Tensor, int]]) -> None:
    """Raise if the network has changed a parameter, which is the model's own, in place."""
    changed = [name for name, (p, version) in versions.items() if p._version != version]
    if changed:
        raise BayesifyError(
            f"parameter {changed[0]!r} changed in a prediction: the network's forward changes it in place, or another "
            "thread trains the model. Let forward compute a new tensor, or predict with a copy (copy.deepcopy)"
        )


def _is_close(found: Tensor, expected: Tensor) -> bool:
    tolerance = 0.05 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-3
    if found.is_meta or not bool(expected.isfinite().all()):
        return True
    return found.shape == expected.shape and bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def _only_head(drawn: DrawnNetwork) -> bool:
    """Whether all drawn layers are linear and come late among the network's matrices and kernels."""
    matrices = [name for name, p in drawn.network.named_parameters() if p.dim() > 1]
    linear = [f"{name}.weight" for name, layer in drawn.layers.items() if layer.role == "linear"]
    if len(linear) < len(drawn.layers) or linear[0] not in matrices:
        return False
    return matrices.index(linear[0]) >= HEAD_START * len(matrices)


def _first_numbers(drawn: DrawnNetwork) -> int:
    """How many numbers the network's matrices and kernels before its first drawn layer have."""
    names = tuple(f"{name}." if name else "" for name in drawn.layers)
    matrices = [(name, p.numel()) for name, p in drawn.network.named_parameters() if p.dim() > 1]
    return sum(numbers for _, numbers in takewhile(lambda each: not each[0].startswith(names), matrices))
