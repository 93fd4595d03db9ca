"""Times, memory and sizes of one method on one case, each beside the plain network's."""

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

from bayesify.memory import forget_scratch

from . import peers
from .cases import Case
from .goals import goal
from .methods import Method, Trial, plain

HEAD_DRAWS, PAIRS = 50, 3
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
    median: float | None = None

    def plain(self) -> dict[str, object]:
        """With its goal, for a file."""
        return asdict(self) | {"goal": goal(self.case, self.measure, self.library, self.method)}


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best(call: Call, rounds: int) -> float:
    """The shortest of so many calls after one that warms up."""
    return min([seconds(call) for _ in range(rounds + 1)][1:])


def ratio(plain: Call, other: Call, rounds: int) -> tuple[float, float]:
    """Other over plain, called in turn; the first round warms up."""
    return ratio_of_several([(plain, other)], rounds)


def ratio_of_several(pairs: Sequence[tuple[Call, Call]], rounds: int) -> tuple[float, float]:
    """The same for pairs of networks that do the same: where one lies in memory is worth several percent."""
    return of_pairs([(one, other) for one, other in in_turn(pairs, rounds)])


def in_turn(groups: Sequence[Sequence[Call]], rounds: int) -> list[list[float]]:
    """The seconds of each of a group, group after group, in at least so many rounds; the first turn warms up."""
    turns = -(-rounds // len(groups)) + 1
    return [[seconds(call) for call in group] for _ in range(turns) for group in groups][len(groups) :]


def of_pairs(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The best of the others over the best of the plain, and the median of the pairs' ratios.

    >>> of_pairs([(1.0, 2.0), (2.0, 2.0), (4.0, 6.0)])
    (2.0, 1.5)
    """
    ones, others = zip(*pairs, strict=True)
    return min(others) / min(ones), statistics.median(other / one for one, other in pairs)


def peak(changes: Sequence[int]) -> int:
    """The most that is held, of successive allocations and frees, above what was held before.

    >>> peak([100, 50, -100, 40, -90])
    150
    """
    return max(accumulate(changes, initial=0))


def training_memory(trial: Trial, x: Tensor, y: Tensor) -> int:
    """The most bytes of tensors during a training step: those that stay, and what its allocations add.

    Gradients go first: the profiler does not see a tensor freed that was made before it started. So does
    scratch memory, to be seen where it is made again.
    """
    step = trial.step(x, y)
    step()
    step.optimizer.zero_grad()
    forget_scratch()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(storages(step.held()).values()) + peak(changes)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each memory that tensors live in; some share one."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def size(model: nn.Module) -> int:
    """How much memory its parameters take. blitz has two names for each, which are one."""
    return sum(storages(model.parameters()).values())


def compare(name: str, case: Case, method: Method) -> Iterator[Row]:
    """All figures of one method on one case."""
    x, y = case.batch()
    row = partial(Row, name)
    place = (method.library, method.name, method.kind)
    networks = [case.network() for _ in range(PAIRS)]
    trials: list[Trial] = []
    converting = [seconds(lambda net=net: trials.append(method.prepare(net))) for net in networks]
    pairs = [(plain(case.network()), trial) for trial in trials]
    base, trial = pairs[0]
    yield row("conversion", *place, min(converting))
    yield row("parameters", *place, size(trial.model) / size(base.model))
    steps = [(base.step(x, y), trial.step(x, y)) for base, trial in pairs]
    yield row("step", *place, *ratio_of_several(steps, case.rounds))
    if method.library == "bayesify":
        yield row("kl", *place, best(trial.after_backward, case.rounds) / best(steps[0][1], case.fewer_rounds))
    yield row("memory", *place, training_memory(trial, x, y) / training_memory(base, x, y))
    yield row("predict", *place, *predicting(pairs, x, trial.members or case.draws, case.fewer_rounds))


def predicting(pairs: Sequence[tuple[Trial, Trial]], x: Tensor, draws: int, rounds: int) -> tuple[float, float]:
    """S draws over S plain forward passes."""
    return ratio_of_several(
        [(partial(base.predict, x, draws), partial(trial.predict, x, draws)) for base, trial in pairs], rounds
    )


def contest(name: str, case: Case, methods: Sequence[Method]) -> Iterator[Row]:
    """Methods of one kind in turn with each other: who is ahead must not depend on when each was measured."""
    x, y = case.batch()
    groups = [[plain(case.network()), *(method.prepare(case.network()) for method in methods)] for _ in range(PAIRS)]
    draws = groups[0][1].members or case.draws
    steps = [[trial.step(x, y) for trial in group] for group in groups]
    predictions = [[partial(trial.predict, x, draws) for trial in group] for group in groups]
    for measure, calls, rounds in (
        ("step, in turn", steps, case.contest_rounds or case.rounds),
        ("predict, in turn", predictions, case.contest_rounds or case.fewer_rounds),
    ):
        times = in_turn(calls, rounds)
        for place, method in enumerate(methods, 1):
            figures = of_pairs([(each[0], each[place]) for each in times])
            yield Row(name, measure, method.library, method.name, method.kind, *figures)


def compare_head(name: str, case: Case, method: Method) -> Row:
    """Fifty draws of a Bayesian last layer over one plain forward pass."""
    x, _ = case.batch()
    base, trial = plain(case.network()), method.prepare(case.network())
    times = ratio(lambda: base.predict(x, 1), lambda: trial.predict(x, HEAD_DRAWS), case.rounds)
    return Row(name, "head", method.library, method.name, method.kind, *times)


def import_seconds(module: str, rounds: int) -> float:
    """What importing a module takes in a new process that has torch already; torch's own is measured by "torch"."""
    before = (peers.DEFINE_OPERATORS if peers.kept else "import torch") if module != "torch" else ""
    code = f"{before}\nfrom time import perf_counter as t; start = t(); import {module}; print(t() - start)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(rounds + 1)]
    return min(float(output.split()[-1]) for output in outputs[1:])
