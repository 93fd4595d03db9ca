"""Which noise the draws of a prediction, or a row's samples in training, get: noise that cancels between them or not.

The average over S independent draws is off by 1/√S of their spread, most of which is linear in the noise. Balanced
draws cancel that part. Each of them alone has exactly the posterior's distribution; together they are designed:

- Draw i uses component i modulo K, so all components get the same number of draws (give or take one).
- Normal noise is a closed chain of differences, (z_t - z_{t-1}) / √2, over TURNS draws of a component. Standard normal
  each, they add up to 0 over the chain, and to the noise of a single draw over any part of it.
- Cauchy noise is mirrored: x, then -x in the next draw of the component. (More does not help where tails dominate.)
- Uniform noise of a period M is u + m/M modulo 1 in M consecutive draws: an element of ECMP uses each of its M = K
  copies once, a unit with dropout rate 1/M is dropped once.

The noise of a draw depends on its seed, its index and the layer alone, whatever number of draws is asked for. Whole
blocks of draws are independent of each other, so their averages tell how precise a prediction is (`Blocks`).

The S samples of a row in a training step are balanced in the same sense, so that their mean gradient varies less:

- Normal noise adds up to 0: z and -z for two samples, √(S/(S-1)) · (z_s - mean z) for more.
- Cauchy noise is mirrored: x, -x, then the next pair.
- Uniform noise is u + s/S modulo 1: no two samples drop the same unit while S times the rate is at most 1.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from bayesify.errors import BayesifyError
from bayesify.methods.base import Draws, Method, Noise

Design = Literal["balanced", "independent"]
TURNS = 5
"""How many draws of a component balance each other. With 2 (mirrored noise) the error of the mean is 1.3 to 2 times as
large at 20 draws, and of a regression's variance too; with 10, parts of a chain that is not closed weigh more."""

LONGEST_PERIOD = 20
"""Rarer masks do not come around in a usual number of draws."""

MOST_GROUPS = 8
MAX_GROUPED_NUMBERS = 1 << 20
"""Groups of draws have sums of their own unless there are more groups, or larger outputs, which would need memory."""


@dataclass(frozen=True)
class DrawDesign:
    """How the draws of a seed get their noise.

    Args:
        seed: The seed of the draws.
        cycle: After how many draws the components of all layers come again.
        kind: "balanced" or "independent".
    """

    seed: int
    cycle: int = 1
    kind: Design = "balanced"

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise BayesifyError(f"seed={self.seed!r}: expected an integer; by.draw(model, None) is the mean network")
        if self.kind not in get_args(Design):
            raise BayesifyError(f"design={self.kind!r}: expected 'balanced' or 'independent'")

    def draws(self, indices: range, position: Tensor, name: str) -> Draws:
        """The draws of some indices for a layer of this name, whose positions choose their components."""
        noise = DesignedNoise(self, indices, name, position.device)
        return Draws(position, reproducible=True, noise=noise)


def component_cycle(methods: Iterable[Method]) -> int:
    """After how many draws all layers are back at the components of the first draw.

    >>> import bayesify as by
    >>> component_cycle([by.Rank1(4), by.IBNN(6), by.ECMP(5)])
    12
    """
    return math.lcm(*(method.components for method in methods if method.ties_components))


class DesignedNoise(Noise):
    """The noise of some draws in one layer; asked several times, it goes on with further noise."""

    def __init__(self, design: DrawDesign, indices: range, name: str, device: torch.device) -> None:
        self.design, self.indices, self.name, self.device = design, indices, name, device
        self._generators: dict[str, torch.Generator] = {}

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal noise (G, *shape)."""
        if self.design.kind == "independent":
            return torch.stack(self._made(torch.randn, shape, [str(index) for index in self.indices]))
        keys = []
        for index in self.indices:
            cycles, component = divmod(index, self.design.cycle)
            chain, turn = divmod(cycles, TURNS)
            keys += [f"{chain}/{component}/{turn}", f"{chain}/{component}/{(turn - 1) % TURNS}"]
        z = self._made(torch.randn, shape, keys)
        return torch.stack([now - before for now, before in zip(z[::2], z[1::2], strict=True)]).mul_(math.sqrt(0.5))

    def cauchy(self, shape: tuple[int, ...]) -> Tensor:
        """Standard Cauchy noise (G, *shape)."""
        if self.design.kind == "independent":
            return torch.tan(math.pi * (self.uniform(shape) - 0.5))
        turns = [divmod(index // self.design.cycle, 2) for index in self.indices]
        keys = [f"{pair}/{index % self.design.cycle}" for index, (pair, _) in zip(self.indices, turns, strict=True)]
        x = torch.tan(math.pi * (torch.stack(self._made(torch.rand, shape, keys)) - 0.5))
        return torch.stack([-each if turn else each for each, (_, turn) in zip(x, turns, strict=True)])

    def uniform(self, shape: tuple[int, ...], period: int = 1) -> Tensor:
        """Noise (G, *shape), uniform on [0, 1)."""
        if self.design.kind == "independent":
            return torch.stack(self._made(torch.rand, shape, [str(index) for index in self.indices]))
        u = self._made(torch.rand, shape, [f"{index // period}/{period}" for index in self.indices])
        steps = [each + index % period / period for each, index in zip(u, self.indices, strict=True)]
        return torch.stack(steps).frac_()

    def _made(self, make: Callable[..., Tensor], shape: tuple[int, ...], keys: list[str]) -> list[Tensor]:
        """Noise for each key, the same for the same key; a key goes on where it was when it was last asked for."""
        made: dict[str, Tensor] = {}
        for key in dict.fromkeys(keys):
            generator = self._generators.get(key)
            if generator is None and self.device.type != "meta":  # which has shapes but no values, and no generator
                generator = torch.Generator(self.device).manual_seed(noise_seed(self.design.seed, key, self.name))
                self._generators[key] = generator
            made[key] = make(shape, dtype=torch.float32, device=self.device, generator=generator)
        return [made[key] for key in keys]


# The samples of a row in training.


@dataclass(frozen=True)
class SampleNoise(Noise):
    """Noise (G, *shape) whose elements are, in this order, those of each row, of each of its samples, and others."""

    draws: int
    rows: int
    samples: int
    device: torch.device
    generator: torch.Generator | None = None

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal noise (G, *shape)."""
        if self.samples == 2:
            z = self._made(torch.randn, shape, 1)
            return torch.cat([z, -z], 1).reshape(self.draws, *shape)
        z = self._made(torch.randn, shape, self.samples)
        centred = (z - z.mean(1, keepdim=True)) * math.sqrt(self.samples / (self.samples - 1))
        return centred.reshape(self.draws, *shape)

    def cauchy(self, shape: tuple[int, ...]) -> Tensor:
        """Standard Cauchy noise (G, *shape)."""
        x = torch.tan(math.pi * (self._made(torch.rand, shape, (self.samples + 1) // 2) - 0.5))
        return torch.stack([x, -x], 2).flatten(1, 2)[:, : self.samples].reshape(self.draws, *shape)

    def uniform(self, shape: tuple[int, ...], period: int = 1) -> Tensor:
        """Noise (G, *shape), uniform on [0, 1)."""
        steps = torch.arange(self.samples, device=self.device).reshape(-1, 1) / self.samples
        return (self._made(torch.rand, shape, 1) + steps).frac().reshape(self.draws, *shape)

    def _made(self, make: Callable[..., Tensor], shape: tuple[int, ...], count: int) -> Tensor:
        """Independent noise (rows, count, …)."""
        rest = self.draws * math.prod(shape) // (self.rows * self.samples)
        own = {} if self.generator is None else {"generator": self.generator}  # which compiled code can't be given
        return make((self.rows, count, rest), dtype=torch.float32, device=self.device, **own)


def balanced(draws: Draws, samples: int, rows: int | None = None) -> Draws:
    """Draws for some samples of each row, side by side, whose noise cancels; `rows` if there is not a draw for each.

    >>> draws = balanced(Draws(torch.arange(6) // 3), samples=3)
    >>> bool(draws.normal((4,)).unflatten(0, (2, 3)).sum(1).abs().max() < 1e-6)
    True
    """
    generator = draws.generators[0] if draws.generators else None
    rows = draws.size // samples if rows is None else rows
    noise = SampleNoise(draws.size, rows, samples, draws.position.device, generator)
    return replace(draws, samples=samples, noise=noise)


def normal_like(tensor: Tensor, rows: int, samples: int) -> Tensor:
    """Standard normal noise for a tensor that begins with the samples of each row: independent if there is one."""
    if samples == 1:
        return torch.randn_like(tensor)
    return SampleNoise(len(tensor), rows, samples, tensor.device).normal(tuple(tensor.shape[1:])).to(tensor.dtype)


def dropout_period(p: float) -> int:
    """In how many balanced draws a unit is dropped about once, or kept once if the rate is above one half.

    >>> [dropout_period(p) for p in (0.0, 0.1, 0.2, 0.5, 0.95)]
    [1, 10, 5, 2, 20]
    """
    rarer = min(p, 1 - p)
    return round(1 / max(rarer, 1 / LONGEST_PERIOD)) if rarer else 1


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`, but only of devices that are in use.

    It would keep the stack of each call for the others and, once they are used, give them this seed in place of theirs.
    """
    in_use = torch.cuda.is_initialized() or torch.xpu.is_initialized() or torch.backends.mps.is_available()
    (torch.manual_seed if in_use else torch.default_generator.manual_seed)(seed)


def noise_seed(seed: int, index: int | str, name: str) -> int:
    """The seed for a layer's noise in one draw."""
    digest = hashlib.blake2s(f"{seed}/{index}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# How precise the average over draws is.


@dataclass(frozen=True)
class Blocks:
    """Which draws of a prediction are independent of each other.

    Blocks of `length` consecutive draws are. So are, within a block, draws whose indices differ modulo `groups`, as
    they have components and noise of their own. Without noise there are `points` different draws, else that is 0.
    """

    length: int = 1
    groups: int = 1
    points: int = 0


def blocks_of(methods: Iterable[Method], cycle: int, kind: Design) -> Blocks:
    """The blocks of draws whose components come again after a cycle: until everything has cancelled that can.

    If the periods of layers have a common multiple only far beyond the longest, a block has the length of that. Then
    masks at its end cancel with some of the next block, and errors are a little smaller than blocks say.

    >>> import bayesify as by
    >>> blocks_of([by.Rank1(4)], 4, "balanced")
    Blocks(length=20, groups=4, points=0)
    >>> blocks_of([by.IBNN(2), by.MCDropout(0.1)], 2, "balanced")
    Blocks(length=10, groups=1, points=0)
    """
    methods = list(methods)
    groups = max(each for each in range(1, MOST_GROUPS + 1) if cycle % each == 0)
    is_point = all(not method.noisy and method.ties_components for method in methods)
    if kind == "independent" or is_point:
        return Blocks(cycle, groups, cycle if is_point else 0)
    turns = {"normal": TURNS, "cauchy": 2, "uniform": 1}
    chain = cycle * math.lcm(*[turns[method.noise_kind] for method in methods if method.noisy])
    periods = [method.noise_period for method in methods]
    length, longest = math.lcm(chain, *periods), max(chain, *periods)
    if length > 2 * longest:
        length = -(-longest // chain) * chain
    return Blocks(length, groups if max(periods) == 1 else 1)  # a mask goes on through all components


class BlockSums:
    """Running sums over blocks of draws, which are independent of each other; draws in a block may not be.

    `mean` and `squares` (G, B, …) are the moments of the means of G groups of draws in complete blocks, `open` the sums
    of the groups in the block that is not complete.
    """

    mean: Tensor
    squares: Tensor
    open: Tensor

    def __init__(self, blocks: Blocks) -> None:
        self.length, self.groups, self.points = blocks.length, blocks.groups, blocks.points
        self.count = self.left = 0  # complete blocks, and draws in the one that is not

    def add(self, values: Tensor) -> None:
        """Add some draws (M, B, …)."""
        if self.count + self.left == 0 and values[0].numel() > MAX_GROUPED_NUMBERS:
            self.groups = 1
        if self.left:
            missing = self.length - self.left
            self._add_open(values[:missing])
            if self.left < self.length:
                return
            self._add_blocks(self.open.unsqueeze(0) * (self.groups / self.length))
            self.left, values = 0, values[missing:]
        complete = len(values) // self.length * self.length
        if complete:
            self._add_blocks(values[:complete].unflatten(0, (-1, self.length // self.groups, self.groups)).mean(1))
        if complete < len(values):
            self._add_open(values[complete:])

    def _add_open(self, values: Tensor) -> None:
        if not self.left:
            self.open = values.new_zeros((self.groups, *values.shape[1:]))
        for first in range(min(self.groups, len(values))):
            self.open[(self.left + first) % self.groups] += values[first :: self.groups].sum(0)
        self.left += len(values)

    def _add_blocks(self, means: Tensor) -> None:
        earlier = (self.mean, self.squares) if self.count else None
        self.count += len(means)
        self.mean, self.squares = moments(means, earlier, self.count)

    def rows(self, index: Tensor, dim: int) -> Self:
        """The sums of some of the rows, which are in dimension `dim` of a draw."""
        some = copy.copy(self)
        vars(some).update({k: v.index_select(dim + 1, index) for k, v in vars(self).items() if isinstance(v, Tensor)})
        return some

    def variances(self, count: int, mean: Tensor, squares: Tensor) -> list[tuple[Tensor, int]]:
        """Estimates of the variance of the mean over `count` draws, with their degrees of freedom.

        The first takes the draws of a group for independent: Σ_g s_g² / G / S, too large where they cancel. The second
        needs two blocks: with the variance v of a mean over a block's L draws, from G groups with n - 1 degrees each,
        it is v / n; the draws after the last complete block count as independent ones. If some groups have more draws
        than others, both include what that changes. Where draws are points, and each has come equally often, there is
        no error; of a single draw, nothing is known.
        """
        n, length, groups = self.count, self.length, self.groups
        if self.points and count % self.points == 0:
            return [(torch.zeros_like(mean), 1)]
        if count <= groups:
            return [independent_variance(squares, count)]
        sizes: Tensor | int = count // groups
        if extra := count % groups:
            sizes = (torch.arange(groups, device=mean.device) < extra).reshape(-1, *[1] * mean.dim()) + sizes
        means = self.mean if n else torch.zeros_like(self.open)
        if self.left:
            means = (means * (n * length // groups) + self.open) / sizes
        within = (squares - (sizes * (means - mean).square()).sum(0)).clamp_min(0) / (count - groups)
        unequal = (mean - means.mean(0)).square() if extra else 0.0
        found = [(within / count + unequal, count - groups)]
        if n > 1 and length > groups:  # else both are the same
            of_block = self.squares.sum(0) / (groups**2 * (n - 1))
            variance = (n * length**2 * of_block + self.left * within) / count**2
            found.append((variance + unequal, groups * (n - 1)))
        return found


def moments(values: Tensor, earlier: tuple[Tensor, Tensor] | None, count: int) -> tuple[Tensor, Tensor]:
    """The mean and sum of squared deviations of `count` values: these (M, …) merged with the moments of earlier ones.

    >>> first = moments(torch.tensor([1.0, 3.0]), None, 2)
    >>> moments(torch.tensor([8.0]), first, 3)  # of 1, 3 and 8
    (tensor(4.), tensor(26.))
    """
    mean = values.mean(0)
    squares = (values - mean).square().sum(0)
    if earlier is None:
        return mean, squares
    step, share = mean - earlier[0], len(values) / count
    return earlier[0] + step * share, earlier[1] + squares + step.square() * (len(values) * (1 - share))


def independent_variance(squares: Tensor, count: int) -> tuple[Tensor, int]:
    """The variance of a mean over independent draws, from their squared deviations, and its degrees of freedom."""
    return (squares / (count * (count - 1)), count - 1) if count > 1 else (torch.full_like(squares, math.inf), 1)
