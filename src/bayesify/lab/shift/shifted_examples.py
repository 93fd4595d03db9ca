"""`shifted`: a data set under shift, corrupted as it is read."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.lab.data.arrays import Arrays
from bayesify.lab.data.columns import Columns
from bayesify.lab.data.errors import suggest
from bayesify.lab.data.examples import Examples, SomeExamples
from bayesify.lab.data.images import Images
from bayesify.lab.data.inputs import Inputs
from bayesify.lab.shift.checks import SEVERITIES, ShiftError, require_severity, require_share
from bayesify.lab.shift.corruptions import CORRUPTIONS, corrupt
from bayesify.lab.shift.noise import mixing, salt_and_pepper
from bayesify.lab.shift.random_numbers import Draws
from bayesify.methods.draw_design import noise_seed

SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)

KINDS: dict[str, tuple[float, ...]] = {
    "mixing": SHARES,
    "salt_and_pepper": SHARES,
    **dict.fromkeys(CORRUPTIONS, SEVERITIES),
}
"""Every kind of shift, with the intensities at which it is evaluated."""


class ShiftedExamples(Examples):
    """Examples whose inputs are corrupted when they are read, each row with its own seed."""

    def __init__(self, base: Examples, kind: str, intensity: float, seed: int, inputs: Inputs | None) -> None:
        self.base, self.kind, self.intensity, self.seed, self.inputs = base, kind, intensity, seed, inputs
        self.targets = base.targets

    def raw(self, rows: Tensor) -> Tensor:
        x = self.base.raw(rows)
        draws = Draws([noise_seed(self.seed, row, self.kind) for row in rows.tolist()], x.device)
        if self.kind == "mixing":
            return _mix(x, self.intensity, draws, self.inputs)
        unit = x.float() / 255 if x.dtype == torch.uint8 else x
        if self.kind == "salt_and_pepper":
            noisy = salt_and_pepper(unit, self.intensity, draws)
        else:
            noisy = corrupt(unit, self.kind, int(self.intensity), generator=draws)
        return torch.round(noisy * 255).to(torch.uint8) if x.dtype == torch.uint8 else noisy

    def take(self, rows: Tensor) -> Examples:
        return SomeExamples(self, rows)

    def with_targets(self, targets: Tensor) -> Examples:
        return ShiftedExamples(self.base.with_targets(targets), self.kind, self.intensity, self.seed, self.inputs)


def shifted(
    examples: Examples, kind: str, intensity: float, seed: int = 0, *, inputs: Inputs | None = None
) -> Examples:
    """Examples under one kind of shift.

    Rows are corrupted when they are read, each with a seed made from `seed`, the kind and the row's number, so that
    they are the same in batches of any size and order. All intensities of a kind use the same noise.

    Args:
        examples: The rows to shift.
        kind: One of `KINDS`: "mixing", "salt_and_pepper", or a corruption.
        intensity: From 0 to 1 for noise, the severity from 1 to 5 for corruptions.
        seed: The seed of the noise.
        inputs: If given, `mixing` acts on prepared inputs (iBNN), and leaves the categories of a table unchanged;
            otherwise it acts on raw numbers.

    Returns:
        Examples with the same targets.

    Raises:
        ShiftError: If the kind or the intensity is not allowed, or the inputs can't be corrupted.

    >>> from bayesify.lab.data import load
    >>> test = load("digits").test
    >>> foggy = shifted(test, "fog", 3)
    >>> foggy.raw(torch.arange(4)).equal(torch.cat([foggy.raw(torch.tensor([row])) for row in range(4)]))
    True

    """
    if kind not in KINDS:
        raise ShiftError(f"no shift is called {kind!r}: {suggest(kind, KINDS)}")
    level = require_severity(intensity) if kind in CORRUPTIONS else require_share(intensity, kind)
    found = ShiftedExamples(examples, kind, level, seed, inputs)
    found.raw(torch.arange(min(len(examples), 1)))  # raises now if the inputs can't be corrupted
    return found


def _mix(x: Tensor, gamma: float, draws: Draws, inputs: Inputs | None) -> Tensor:
    """Raw inputs whose prepared values are mixed with standard noise."""
    x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
    if isinstance(inputs, Columns):  # whose raw numbers are standardised; categories come after them
        numbers = len(inputs.numeric)
        return torch.cat([mixing(x[:, :numbers], gamma, draws), x[:, numbers:]], 1)
    if isinstance(inputs, (Images, Arrays)):
        shape = (-1, 1, 1) if isinstance(inputs, Images) else (-1,)
        mean, std = (x.new_tensor(values).view(shape) for values in (inputs.mean, inputs.std))
        return mixing(x, gamma, draws, mean=mean, std=std)
    return mixing(x, gamma, draws)
