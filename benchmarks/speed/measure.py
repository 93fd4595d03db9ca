"""Times, memory and sizes of one implementation on one network, each beside the plain network's.

A ratio is the median over rounds, in each of which the plain network and the others are called one after the other.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from . import peers
from .cases import Case
from .goals import goal
from .methods import Implementation, Prepared, plain

HEAD_DRAWS = 50
COPIES = 3
"""How many copies of each network are timed: where one lies in memory is worth several percent."""
SECONDS = 10.0
"""After so long, rounds of one figure end early, but not before every copy was timed once."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One figure: a ratio to the plain network unless its measure says otherwise."""

    case: str
    measure: str
    library: str
    method: str
    kind: str
    value: float
    """The median of the rounds, where it is a time."""
    best: float | None = None
    """The ratio of the shortest times, where it is a time."""

    def to_dict(self) -> dict[str, object]:
        """With its goal, for a file."""
        return asdict(self) | {"goal": goal(self.case, self.measure, self.library, self.method)}


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_seconds(call: Call, rounds: int) -> float:
    """The median of so many calls after one that warms up."""
    return statistics.median([seconds(call) for _ in range(rounds + 1)][1:])


def times_in_turn(groups: Sequence[Sequence[Call]], rounds: int, limit: float = SECONDS) -> list[list[float]]:
    """The seconds of each call of a group, group after group, in at least so many rounds unless the limit ends them.

    All groups do the same. Each is called once before, to warm up; then the order within a group is
    turned from round to round, because who comes later may find more in the caches.
    """
    for group in groups:
        for call in group:
            call()
    times: list[list[float]] = []
    start = time.perf_counter()
    for turn in range(-(-rounds // len(groups))):
        if turn and time.perf_counter() - start > limit:
            break
        for place, group in enumerate(groups):
            order = 1 if (turn + place) % 2 == 0 else -1
            times.append([seconds(call) for call in group[::order]][::order])
    return times


def ratios(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of pairs of times: the median of second over first, and the shortest second over the shortest first.

    >>> ratios([(1.0, 2.0), (2.0, 2.0), (4.0, 6.0)])
    (1.5, 2.0)
    """
    firsts, others = zip(*pairs, strict=True)
    return statistics.median(other / first for first, other in pairs), min(others) / min(firsts)


def compare_copies(pairs: Sequence[tuple[Call, Call]], rounds: int) -> tuple[float, float]:
    """The ratios of pairs of calls that all do the same."""
    return ratios([(first, other) for first, other in times_in_turn(pairs, rounds)])


def compare_calls(first: Call, other: Call, rounds: int) -> tuple[float, float]:
    """The ratios of one call to another."""
    return compare_copies([(first, other)], rounds)


def peak(changes: Sequence[int]) -> int:
    """The most that is held, of successive allocations and frees, above what was held before.

    >>> peak([100, 50, -100, 40, -90])
    150
    """
    return max(accumulate(changes, initial=0))


def training_memory(prepared: Prepared, x: Tensor, y: Tensor, free_caches: Call = lambda: None) -> int:
    """The most bytes of tensors during a training step: those that stay, and what its allocations add.

    Gradients go first, and memory that a version may keep for the next step: the profiler does not see a tensor freed
    that was made before it started.
    """
    step = prepared.step(x, y)
    step()
    step.optimizer.zero_grad()
    free_caches()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(storage_bytes(step.lasting_tensors()).values()) + peak(changes)


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each memory that tensors live in, by its address; some share one."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def parameter_bytes(model: nn.Module) -> int:
    """How much memory its parameters take. blitz has two names for each, which are one."""
    return sum(storage_bytes(model.parameters()).values())


def compare(name: str, case: Case, implementation: Implementation) -> Iterator[Row]:
    """All figures of one implementation on one network."""
    x, y = case.batch()
    row = partial(Row, name)
    labels = (implementation.library, implementation.name, implementation.kind)
    copies: list[Prepared] = []
    networks = [case.network() for _ in range(COPIES)]
    conversions = [seconds(lambda net=net: copies.append(implementation.prepare(net))) for net in networks]
    pairs = [(plain(case.network()), copy) for copy in copies]
    base, ours = pairs[0]
    yield row("conversion", *labels, statistics.median(conversions))
    yield row("parameters", *labels, parameter_bytes(ours.model) / parameter_bytes(base.model))
    steps = [(base.step(x, y), copy.step(x, y)) for base, copy in pairs]
    yield row("step", *labels, *compare_copies(steps, case.rounds))
    if implementation.library == "bayesify":
        kl = median_seconds(ours.after_backward, case.rounds)
        yield row("kl", *labels, kl / median_seconds(steps[0][1], min(case.rounds, case.predict_rounds)))
    yield row("memory", *labels, training_memory(ours, x, y) / training_memory(base, x, y))
    yield row("predict", *labels, *compare_predictions(pairs, x, ours.members or case.draws, case.predict_rounds))


def compare_predictions(
    pairs: Sequence[tuple[Prepared, Prepared]], x: Tensor, draws: int, rounds: int
) -> tuple[float, float]:
    """S draws over S plain forward passes."""
    calls = [(partial(base.predict, x, draws), partial(other.predict, x, draws)) for base, other in pairs]
    return compare_copies(calls, rounds)


def compare_side_by_side(name: str, case: Case, implementations: Sequence[Implementation]) -> Iterator[Row]:
    """Implementations of one kind in the same rounds: who is ahead must not depend on when each was measured."""
    x, y = case.batch()
    groups = [
        [plain(case.network()), *(each.prepare(case.network()) for each in implementations)] for _ in range(COPIES)
    ]
    draws = groups[0][1].members or case.draws
    steps = [[each.step(x, y) for each in group] for group in groups]
    predictions = [[partial(each.predict, x, draws) for each in group] for group in groups]
    for measure, calls, rounds in (
        ("step, side by side", steps, case.rounds),
        ("predict, side by side", predictions, case.predict_rounds),
    ):
        times = times_in_turn(calls, rounds, limit=SECONDS * len(implementations))
        for place, each in enumerate(implementations, 1):
            figures = ratios([(round_[0], round_[place]) for round_ in times])
            yield Row(name, measure, each.library, each.name, each.kind, *figures)


def compare_head(name: str, case: Case, implementation: Implementation) -> Row:
    """Fifty draws of a Bayesian last layer over one plain forward pass."""
    x, _ = case.batch()
    base, ours = plain(case.network()), implementation.prepare(case.network())
    figures = compare_calls(lambda: base.predict(x, 1), lambda: ours.predict(x, HEAD_DRAWS), case.rounds)
    return Row(name, "head", implementation.library, implementation.name, implementation.kind, *figures)


def import_seconds(module: str, rounds: int) -> float:
    """What importing a module takes in a new process that has torch already; torch's own is measured by "torch"."""
    before = (peers.DEFINE_OPERATORS if peers.operator_library else "import torch") if module != "torch" else ""
    code = f"{before}\nfrom time import perf_counter as t; start = t(); import {module}; print(t() - start)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(rounds + 1)]
    return statistics.median(float(output.split()[-1]) for output in outputs[1:])
