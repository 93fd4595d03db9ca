"""How the draws of one network are called on a batch: in the shortest way that is known to say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .adaptive import Adaptive, row_dim, settle
from .batches import first_rows, repeated, row_count, run
from .draw_counts import are_points, families_of, looks_of, turn
from .family import Family
from .kept import Kept, keep_copy, kept_copy, watch_over
from .layout import gains_by_channels_last
from .likelihood import Likelihood
from .memory import Memory
from .portions import evenly, joined, over_again
from .prediction import Prediction
from .replay import Doubtful, Tape
from .selection import unwrapped
from .skeleton import Skeleton
from .stacked import outputs_at_once
from .verdicts import Verdicts, same, structure, verdicts_of

LEAST_PREFIX = 0.1
"""With less of the network before the first drawn tensor, computing it once measured no faster."""
WORTH_RECORDING = 0.5
"""Once so many rows are settled, what no draw touches is computed again for the others: in all, at most once more."""
FEW_ROWS = 4
"""Up to so many rows, all draws are made in one call of the network: the calls would cost more than the arithmetic."""
FEW_SCALED_ROWS = 2048
"""Where draws are factors of linear layers, they share matrix products of up to so many vectors times draws."""
AT_A_TIME = 1 << 22
"""Outputs of several draws are counted together up to so many numbers: it takes several times their memory."""
EXTREME = 1e3
"""Whether a network mixes rows is tried with rows so many times as large."""
Call = Callable[[nn.Module, Any], Tensor]


class Sampler:
    """S draws of one network, each the same for every batch; `looks` are the numbers of draws at which to stop."""

    def __init__(
        self, model: nn.Module, samples: int | Adaptive | None, *, seed: int, call: Call | None, memory: Memory
    ) -> None:
        self.model, self.seed, self.call, self.memory = model, seed, call or run, memory
        self.kept = None if call else kept_copy(model)
        self.families = families = self.kept.families if self.kept else families_of(model)
        self.looks = looks_of(families, samples)
        self.count = self.looks[-1]
        self.verdicts = self.kept.verdicts if self.kept else _verdicts(model, families)
        served = call or self.kept or self.verdicts.channels_last  # or else the copy made now may serve again
        self.watch = None if served else watch_over(model)
        self.factored = not call and self.verdicts.factors is not False  # a call of one's own may look at weights
        if self.kept:
            self.skeleton = self.kept.skeleton
            self.skeleton.prepare(self.count, memory)
        else:
            self.skeleton = self._fresh_skeleton()
        self.different = min(self.count, turn(families)) if are_points(families) and not call else self.count
        self.batch_dim = next(iter(self.skeleton.layers.values())).scope.batch_dim
        self.row_dim = 0
        self.has_short_ways = not call and not self.skeleton.has_dropout and self.count > 1

    def _fresh_skeleton(self) -> Skeleton:
        return Skeleton(self.model, self.count, lent=self.memory, factored=self.factored)

    def keep_copy(self) -> None:
        """Let the copy of the network serve the next prediction, where it may."""
        if self.kept and self.kept.skeleton is self.skeleton:
            keep_copy(self.model, self.kept)
        elif self.watch:
            keep_copy(self.model, Kept(self.skeleton, self.families, self.verdicts, self.watch))

    def counted(self, batch: Any, likelihood: Likelihood, keep: bool) -> Prediction:
        """What all draws say together of a batch."""
        self._see_whether_factors_tell_thesame(batch)
        tally = likelihood.tally(keep)
        again = self.repeats(batch)
        self.skeleton.draws = self.different if again else self.count
        stacks = self._stacks(batch, range(self.skeleton.draws))
        for outputs in joined(over_again(stacks, self.different, self.count, in_order=keep) if again else stacks):
            for some in outputs.split(max(1, AT_A_TIME // max(outputs[0].numel(), 1))):
                likelihood.add(tally, some)
        return tally.result(self.row_dim)

    def settled(self, batch: Any, likelihood: Likelihood, rule: Adaptive) -> Prediction:
        """What as many draws as each row needs say together."""
        self._see_whether_factors_tell_thesame(batch)
        fewest = WORTH_RECORDING if self.replays(batch) else 0.0
        return settle(self.outputs, batch, likelihood, rule, self.looks, batch_dim=self.batch_dim, fewest=fewest)

    def _see_whether_factors_tell_thesame(self, batch: Any) -> None:
        """A network may read the weight of a layer by a way that does not find the factors beside it."""
        if not self.skeleton.factored or self.verdicts.factors:
            return
        if self.verdicts.factors is None:
            self.verdicts.factors = self._factors_tell_the_same(batch)
        if not self.verdicts.factors:  # maybe found so by another thread meanwhile
            self.factored = False
            self.skeleton = self._fresh_skeleton()

    def _factors_tell_the_same(self, batch: Any) -> bool:
        few = first_rows(batch, 2, self.batch_dim)
        folded = Skeleton(self.model, lent=Memory(reused=False))
        try:
            return same(*(self.call(each.write(self.seed), few) for each in (self.skeleton, folded)))
        except Exception:  # two rows alone may be an input that the network does not take
            return False

    def outputs(self, batch: Any, draws: range) -> Iterable[Tensor]:
        """A batch's output under each of a range of draws."""
        for stack in self._stacks(batch, draws):
            yield from stack

    def _stacks(self, batch: Any, draws: range) -> Iterable[Tensor]:
        """A batch's outputs under a range of draws, in stacks of some."""
        for stack in self._replayed(batch, draws) if self.replays(batch) else self._run(batch, draws):
            self.row_dim = row_dim(stack[0], self.batch_dim)
            yield stack.clone() if self.memory.holds(stack) or self.skeleton.holds(stack) else stack

    def replays(self, batch: Any) -> bool:
        """Whether what no draw touches is computed once."""
        if not self.has_short_ways:
            return False
        if self.verdicts.replays is None:
            gains, few = self.skeleton.prefix >= LEAST_PREFIX, first_rows(batch, 2, self.batch_dim)
            self.verdicts.replays = gains and self._replays_truly(few)
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
                self.verdicts.repeats = tape.doubt is None and same(first, again)
            except Exception:  # two rows alone may be an input that the network does not take
                self.verdicts.repeats = False
        return self.verdicts.repeats

    def runs_channels_last(self, batch: Any) -> bool:
        """Whether convolutions are faster with channels last, and the network says the same."""
        if not self.has_short_ways:
            return False
        if self.verdicts.channels_last is None:
            gains, few = gains_by_channels_last(self.skeleton.network), first_rows(batch, 2, self.batch_dim)
            self.verdicts.channels_last = gains and self._same_channels_last(few)
        return self.verdicts.channels_last

    def _run(self, batch: Any, draws: range) -> Iterable[Tensor]:
        for some in self._portions(batch, draws):
            outputs = self._at_once(batch, some)
            if outputs is not None:
                yield outputs
            else:
                yield from (self._called(batch, index).unsqueeze(0) for index in some)

    def _portions(self, batch: Any, draws: range) -> list[range]:
        """The draws up to each look, split as evenly as can be into those that may be made in one call."""
        most, first, last = max(1, self._most_at_once(batch)), draws[0], draws[-1] + 1
        looks = [look for look in self.looks if first < look < last]
        return [part for each in pairwise((first, *looks, last)) for part in evenly(range(*each), most)]

    def _most_at_once(self, batch: Any) -> int:
        if row_count(batch, self.batch_dim) <= FEW_ROWS:
            return self.count
        return FEW_SCALED_ROWS * batch.shape[-1] // max(batch.numel(), 1) if self._meets_factors(batch) else 1

    def _meets_factors(self, batch: Any) -> bool:
        """Whether copies of a batch, one after the other, can each meet the factors of a draw."""
        tensor = isinstance(batch, Tensor) and batch.dim() >= 2 and batch.is_floating_point()
        return tensor and self.batch_dim == 0 and self.skeleton.has_only_factors

    def _called(self, batch: Any, index: int) -> Tensor:
        channels_last = self.runs_channels_last(batch)
        if self.skeleton.has_channels_last and not channels_last:  # another thread has found that they may not be
            self.skeleton = self._fresh_skeleton()
        network = self.skeleton.write(self.seed, index)
        if not channels_last:
            return self.call(network, batch)
        self.skeleton.put_channels_last()
        try:
            return self.call(network, batch).contiguous()
        except Exception:  # this batch may have come to a view that only the usual layout has
            self.skeleton = self._fresh_skeleton()
            output = self.call(self.skeleton.write(self.seed, index), batch)
            self.verdicts.channels_last = False
            return output

    def _at_once(self, batch: Any, draws: range) -> Tensor | None:
        """All draws of few rows in one call of the network, where that is known to say the same; else None."""
        scaled = self._meets_factors(batch)
        way = tuple(size == 1 for size in batch.shape[1:]) if scaled else None
        verdict = self.verdicts.at_once.get(way)
        able = self.has_short_ways and len(draws) > 1 and self.skeleton.in_one_block(draws)
        if not able or verdict is False:
            return None
        try:
            if scaled:
                network = self.skeleton.write_several(self.seed, draws)
                outputs = self.call(network, repeated(batch, len(draws), False)).unflatten(0, (len(draws), -1))
            else:
                network = self.skeleton.write(self.seed, draws[0])
                stacks = self.skeleton.stacked(self.seed, draws)
                outputs = outputs_at_once(network, self.call, batch, list(self.skeleton.targets), stacks)
            if verdict is None and scaled and not self._keeps_copies_apart(batch, draws, outputs[0]):
                verdict = False
            if verdict is None:
                tape, first = self._record(batch, draws[0])
                others = [self.call(self.skeleton.write(self.seed, index), batch) for index in draws[1:]]
                verdict = tape.doubt is None and same(outputs, torch.stack([first, *others]))
        except Exception:  # not everything runs under vmap
            verdict = False
        self.verdicts.at_once[way] = verdict
        return outputs if verdict else None

    def _keeps_copies_apart(self, batch: Tensor, draws: range, first: Tensor) -> bool:
        """Whether the first draw's rows stay as they are beside extreme ones of all other draws."""
        others = repeated(EXTREME * (batch + 1), len(draws) - 1, False)
        outputs = self.call(self.skeleton.write_several(self.seed, draws), torch.cat([batch, others]))
        return same(outputs[: len(batch)], first)

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

    def _same_channels_last(self, few: Any) -> bool:
        trial = Skeleton(self.model, lent=Memory(reused=False), factored=self.factored)
        network = trial.write(self.seed)
        try:
            usual = self.call(network, few)
            trial.put_channels_last()
            return same(usual, self.call(network, few))
        except Exception:  # such as a view that only the usual layout has
            return False

    def _replays_truly(self, few: Any) -> bool:
        """Try it on two rows: what is replayed must be what the network would have said."""
        try:
            tape, _ = self._record(few)
            values = self.skeleton.drawn(self.seed, 1)
            replayed = tape.replay(values)
            expected = self.call(self.skeleton.write_values(values), few)
        except Exception:  # two rows alone may be an input that the network does not take
            return False
        return tape.saved > 0 and same(replayed, expected)


def _verdicts(model: nn.Module, families: Sequence[Family]) -> Verdicts:
    return verdicts_of(model, (*families, *structure(unwrapped(model))))
