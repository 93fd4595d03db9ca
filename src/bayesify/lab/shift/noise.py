"""Noise of any intensity: Gaussian mixing and salt-and-pepper (iBNN, section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.lab.shift.checks import ShiftError, require_share, require_unit_images
from bayesify.lab.shift.random_numbers import Randomness, draws_for


def mixing(
    x: Tensor, gamma: float, random: Randomness, *, mean: Tensor | float = 0.0, std: Tensor | float = 1.0
) -> Tensor:
    """(1 - γ)x + γε with ε ~ N(mean, std²): from the sample, γ = 0, to pure noise, γ = 1 (iBNN, eq. 28).

    Args:
        x: A batch of floats.
        gamma: The share of noise, from 0 to 1.
        random: A generator, or `Draws` with one for each row.
        mean: The mean of the noise.
        std: The standard deviation of the noise.

    Returns:
        The mixed batch.

    Raises:
        ShiftError: If `gamma` is not from 0 to 1, or `x` has integers.

    >>> x = torch.full((2, 3, 8, 8), 0.5)
    >>> mixing(x, 0.0, torch.Generator()).equal(x), mixing(x, 0.5, torch.Generator()).std() > 0.4
    (True, tensor(True))

    The equation is about normalised inputs, so the noise is standard and nothing is clamped. Given the `mean` and `std`
    of the normalisation, shaped to broadcast, mixing raw inputs equals mixing normalised ones. Works for tables too.
    """
    gamma = require_share(gamma, "gamma")
    if not x.is_floating_point():
        raise ShiftError(
            f"inputs of type {x.dtype} can't be mixed with noise; expected floats: for images pass x / 255"
        )
    noise = draws_for(x, random).normal(*x.shape[1:]).to(x.dtype)
    return (1 - gamma) * x + gamma * (mean + std * noise)


def salt_and_pepper(x: Tensor, p: float, random: Randomness) -> Tensor:
    """Set each element of the images to 0 or 1, with equal chance, with probability p (iBNN, section 3.5).

    Args:
        x: Images (B, 1 or 3, H, W) from 0 to 1.
        p: The share of elements to replace, from 0 to 1.
        random: A generator, or `Draws` with one for each row.

    Returns:
        The noisy images.

    Raises:
        ShiftError: If `p` is not from 0 to 1, or `x` is not a batch of such images.

    >>> x = torch.full((1, 1, 100, 100), 0.5)
    >>> noisy = salt_and_pepper(x, 0.2, torch.Generator())
    >>> [round((noisy == value).float().mean().item(), 1) for value in (0.0, 0.5, 1.0)]
    [0.1, 0.8, 0.1]
    """
    p = require_share(p, "p")
    require_unit_images(x)
    u = draws_for(x, random).uniform(0, 1, *x.shape[1:])
    grains = (u < p / 2).to(x.dtype)
    return torch.where(u < p, grains, x)
