"""Which noise the draws of a prediction, or a row's samples in training, get: noise that cancels between them or not.

The average over S independent draws is off by 1/√S of their spread, most of which is linear in the noise. Balanced
draws cancel that part. Each of them alone has exactly the posterior's distribution; together they are designed:

- Draw i uses component i modulo K, so all components get the same number of draws (give or take one).
- Normal noise is a closed chain of differences, (z_t - z_{t-1}) / √2, over TURNS draws of a component. Standard normal
  each, they add up to 0 over the chain, and to the noise of a single draw over any part of it.
- Cauchy noise is mirrored: x, then -x in the next draw of the component. (More does not help where tails dominate.)
- Uniform noise of a period M is u + m/M modulo 1 in M consecutive draws: an element of ECMP uses each of its M = K
  copies once, a unit with dropout rate 1/M is dropped once.

The noise of a draw depends on its seed, its index and the layer alone, whatever number of draws is asked for.

The S samples of a row in a training step are balanced in the same sense, so that their mean gradient varies less:

- Normal noise adds up to 0: z and -z for two samples, √(S/(S-1)) · (z_s - mean z) for more.
- Cauchy noise is mirrored: x, -x, then the next pair.
- Uniform noise is u + s/S modulo 1: no two samples drop the same unit while S times the rate is at most 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

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


def noise_seed(seed: int, index: int | str, name: str) -> int:
    """The seed for a layer's noise in one draw."""
    digest = hashlib.blake2s(f"{seed}/{index}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
