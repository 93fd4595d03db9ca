"""Draws × batches → a prediction, streamed; and draws as frozen networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .adaptive import Adaptive, row_dim, settle
from .batches import batches, first_rows, input_of, row_count, run
from .draw_counts import are_points, components, looks_of, number_of_draws, turn
from .errors import BayesifyError
from .likelihood import Categorical, Likelihood
from .memory import Memory, lent_memory
from .prediction import Prediction
from .replay import Doubtful, Tape
from .skeleton import Skeleton
from .stacked import outputs_at_once

LEAST_PREFIX = 0.1
"""With less of the network before the first drawn tensor, computing it once measured no faster."""
WORTH_RECORDING = 0.5
"""Once so many rows are settled, what no draw touches is computed again for the others: in all, at most once more."""
FEW_ROWS = 4
"""Up to so many rows, all draws are made in one call of the network: the calls would cost more than the arithmetic."""
FEW_SCALED_ROWS = 1024
"""Up to so many vectors times draws too, where draws are factors of linear layers: they share one matrix product."""
AT_A_TIME = 1 << 22
"""Outputs of several draws are counted together up to so many numbers: it takes several times their memory."""
TOGETHER = 1 << 14
"""Outputs wait for those of further draws until they are so many numbers: to count few takes as long."""
Call = Callable[[nn.Module, Any], Tensor]


@dataclass
class _Verdicts:
    """What was found out about a network of some structure, once: whether a short way says the same as the long one."""

    structure: tuple[Any, ...]
    replays: bool | None = None
    repeats: bool | None = None
    at_once: dict[bool, bool] = field(default_factory=dict)
    """Of draws as copies of the batch, and of other draws."""


_VERDICTS: WeakKeyDictionary[nn.Module, _Verdicts] = WeakKeyDictionary()


def predict(
    model: nn.Module,
    data: Any,
    samples: int | Adaptive | None = None,
    *,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    batch_size: int | None = None,
    draws: bool | None = None,
    call: Call | None = None,
) -> Any:
    """The posterior predictive of a tensor, or of a loader's batches, from S draws of the whole network.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.Rank1(4))
    >>> p = by.predict(model, torch.randn(10, 4), samples=8)
    >>> p.probs.shape, p.epistemic.shape
    (torch.Size([10, 3]), torch.Size([10]))

    Draw s of a seed is the same function whatever the batches; it uses component s modulo K. `samples=None` is each
    component once if components are points, else a multiple of K of at least 20; `samples=by.Adaptive()` stops for each
    input once it is settled. Outputs mean what `likelihood` says (Categorical unless given). `draws=True` keeps every
    draw's output. Batches may be tensors, (input, target) pairs, whose input is used, or dicts of keyword arguments;
    `call(network, batch)` may say how to get an output otherwise, and is given the batch as it is.
    The model, its mode and the global random state stay as they are, and several threads may predict at once.
    """
    likelihood = likelihood or Categorical()
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise BayesifyError(f"seed={seed!r}: expected a whole number; by.draw(model, None) is the mean network")
    if isinstance(samples, Adaptive) and draws:
        raise BayesifyError(
            "draws=True with samples=Adaptive(…): inputs have different numbers of draws, so none is kept"
        )
    looks = looks_of(model, samples) if isinstance(samples, Adaptive) else (number_of_draws(model, samples),)
    parts = []
    with torch.inference_mode(False), torch.no_grad(), lent_memory() as memory:
        sampler = _Sampler(model, seed, looks[-1], call, Memory(reused=False) if call else memory)
        for batch in batches(data, batch_size, sampler.batch_dim):
            given = batch if call else input_of(batch)
            if isinstance(samples, Adaptive):
                parts.append(sampler.settled(given, likelihood, samples, looks))
            else:
                parts.append(sampler.counted(given, likelihood, likelihood.keeps_draws if draws is None else draws))
    if not parts:
        raise BayesifyError("nothing to predict: the data has no batch")
    return type(parts[0]).join(parts, sampler.row_dim)


def draw(model: nn.Module, seed: int | None = 0, *, index: int = 0) -> nn.Module:
    """One draw (or with `seed=None` the mean) as an ordinary frozen network, to be called many times.

    >>> import bayesify as by
    >>> model = by.convert(nn.Linear(4, 3), by.IBNN(4))
    >>> by.draw(model, seed=1)
    Linear(in_features=4, out_features=3, bias=True)

    It shares no tensor with the model, so neither changes the other.
    """
    skeleton = Skeleton(model)
    skeleton.write(seed, index)
    return skeleton.alone()


def members(model: nn.Module) -> list[nn.Module]:
    """The mean of each of the K components as an ordinary network.

    >>> import bayesify as by
    >>> len(by.members(by.convert(nn.Linear(4, 3), by.BatchEnsemble(6))))
    6
    """
    skeletons = [Skeleton(model) for _ in range(components(model))]
    for k, skeleton in enumerate(skeletons):
        skeleton.write_member(k)
    return [skeleton.alone() for skeleton in skeletons]


class _Sampler:
    """S draws of one network, each the same for every batch."""

    def __init__(self, model: nn.Module, seed: int, count: int, call: Call | None, memory: Memory) -> None:
        self.seed, self.count, self.call = seed, count, call or run
        self.different = min(count, turn(model)) if are_points(model) and not call else count
        self.memory, self.skeleton = memory, Skeleton(model, count, lent=memory)
        self.batch_dim = next(iter(self.skeleton.layers.values())).scope.batch_dim
        self.row_dim = 0
        self.has_short_ways = not call and not self.skeleton.has_dropout and count > 1
        structure = (*self.skeleton.layers, *map(type, self.skeleton.network.modules()))
        self.verdicts = _VERDICTS.get(model) or _Verdicts(structure)
        if self.verdicts.structure != structure:
            self.verdicts = _Verdicts(structure)
        _VERDICTS[model] = self.verdicts

    def counted(self, batch: Any, likelihood: Likelihood, keep: bool) -> Prediction:
        """What all draws say together of a batch."""
        tally = likelihood.tally(keep)
        again = self.repeats(batch)
        stacks = _joined(self._stacks(batch, range(self.different if again else self.count)))
        for outputs in _over_again(stacks, self.different, self.count, in_order=keep) if again else stacks:
            for some in outputs.split(max(1, AT_A_TIME // max(outputs[0].numel(), 1))):
                likelihood.add(tally, some)
        return tally.result(self.row_dim)

    def settled(self, batch: Any, likelihood: Likelihood, rule: Adaptive, looks: tuple[int, ...]) -> Prediction:
        """What as many draws as each row needs say together."""
        fewest = WORTH_RECORDING if self.replays(batch) else 0.0
        return settle(self.outputs, batch, likelihood, rule, looks, batch_dim=self.batch_dim, fewest=fewest)

    def outputs(self, batch: Any, draws: range) -> Iterable[Tensor]:
        """A batch's output under each of a range of draws."""
        for stack in self._stacks(batch, draws):
            yield from stack

    def _stacks(self, batch: Any, draws: range) -> Iterable[Tensor]:
        """A batch's outputs under a range of draws, in stacks of some."""
        for stack in self._replayed(batch, draws) if self.replays(batch) else self._run(batch, draws):
            self.row_dim = row_dim(stack[0], self.batch_dim)
            yield stack.clone() if self.memory.holds(stack) else stack

    def replays(self, batch: Any) -> bool:
        """Whether what no draw touches is computed once."""
        if not self.has_short_ways or self.skeleton.prefix < LEAST_PREFIX:
            return False
        if self.verdicts.replays is None:
            self.verdicts.replays = self._replays_truly(first_rows(batch, 2, self.batch_dim))
        return self.verdicts.replays

    def repeats(self, batch: Any) -> bool:
        """Whether there are more draws than different ones, and a network that is not random itself."""
        if self.different == self.count:
            return False
        if self.verdicts.repeats is None:
            few, tape = first_rows(batch, 2, self.batch_dim), Tape([])
            network = self.skeleton.write(self.seed)
            try:
                first, again = (tape.record(lambda: self.call(network, few)) for _ in range(2))
                self.verdicts.repeats = tape.doubt is None and _same(first, again)
            except Exception:  # two rows alone may be an input that the network does not take
                self.verdicts.repeats = False
        return self.verdicts.repeats

    def _run(self, batch: Any, draws: range) -> Iterable[Tensor]:
        outputs = self._at_once(batch, draws)
        if outputs is not None:
            yield outputs
            return
        for index in draws:
            yield self.call(self.skeleton.write(self.seed, index), batch).unsqueeze(0)

    def _at_once(self, batch: Any, draws: range) -> Tensor | None:
        """All draws of few rows in one call of the network, where that is known to say the same; else None."""
        rows = row_count(batch, self.batch_dim)
        vectors = isinstance(batch, Tensor) and batch.dim() == 2 and batch.is_floating_point()
        scaled = vectors and self.batch_dim == 0 and self.skeleton.has_only_factors
        few = rows <= FEW_ROWS or (scaled and rows * len(draws) <= FEW_SCALED_ROWS)
        few = few and self.skeleton.in_one_block(draws)
        verdict = self.verdicts.at_once.get(scaled)
        if not self.has_short_ways or not few or len(draws) == 1 or verdict is False:
            return None
        network = self.skeleton.write(self.seed, draws[0])
        stacks = self.skeleton.stacked(self.seed, draws)
        try:
            if scaled:
                copies = self.call(self.skeleton.write_values(stacks), batch.repeat(len(draws), 1))
                outputs = copies.unflatten(0, (len(draws), rows))
            else:
                outputs = outputs_at_once(network, self.call, batch, list(self.skeleton.targets), stacks)
            if verdict is None:
                tape, first = self._record(batch, draws[0])
                others = [self.call(self.skeleton.write(self.seed, index), batch) for index in draws[1:]]
                verdict = tape.doubt is None and _same(outputs, torch.stack([first, *others]))
        except Exception:  # not everything runs under vmap
            verdict = False
        self.verdicts.at_once[scaled] = verdict
        return outputs if verdict else None

    def _replayed(self, batch: Any, draws: range) -> Iterable[Tensor]:
        tape, first = self._record(batch, draws[0])
        yield first.unsqueeze(0)
        for index in draws[1:]:
            try:
                yield tape.replay(self.skeleton.drawn(self.seed, index)).unsqueeze(0)
            except Doubtful:
                yield from self._run(batch, range(index, index + 1))

    def _record(self, batch: Any, index: int = 0) -> tuple[Tape, Tensor]:
        network = self.skeleton.write(self.seed, index)
        tape = Tape(list(self.skeleton.targets.values()))
        return tape, tape.record(lambda: self.call(network, batch))

    def _replays_truly(self, few: Any) -> bool:
        """Try it on two rows: what is replayed must be what the network would have said."""
        try:
            tape, _ = self._record(few)
            values = self.skeleton.drawn(self.seed, 1)
            replayed = tape.replay(values)
            expected = self.call(self.skeleton.write_values(values), few)
        except Exception:  # two rows alone may be an input that the network does not take
            return False
        return tape.saved > 0 and _same(replayed, expected)


def _joined(stacks: Iterable[Tensor]) -> Iterable[Tensor]:
    """Small stacks as fewer larger ones."""
    waiting: list[Tensor] = []
    for stack in stacks:
        waiting.append(stack)
        if sum(each.numel() for each in waiting) >= TOGETHER:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)


def _over_again(stacks: Iterable[Tensor], different: int, count: int, *, in_order: bool) -> Iterable[Tensor]:
    """So many draws, of which those in the stacks are the only different ones; out of order none need be kept."""
    first = 0
    for stack in [torch.cat(list(stacks))] if in_order else stacks:
        yield from (stack[: max(count - start, 0)] for start in range(first, count, different))
        first += len(stack)


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-4, atol=1e-5, equal_nan=True)
