"""Noise of any intensity: Gaussian mixing and salt-and-pepper (iBNN, section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.lab.shift.checks import ShiftError, share, unit_images
from bayesify.lab.shift.draws import Randomness, draws_for


def mixing(
    x: Tensor, gamma: float, random: Randomness, *, mean: Tensor | float = 0.0, std: Tensor | float = 1.0
) -> Tensor:
    """(1 - γ)x + γε with ε ~ N(mean, std²): from the sample, γ = 0, to pure noise, γ = 1 (iBNN, eq. 28).

    >>> x = torch.full((2, 3, 8, 8), 0.5)
    >>> mixing(x, 0.0, torch.Generator()).equal(x), mixing(x, 0.5, torch.Generator()).std() > 0.4
    (True, tensor(True))

    The equation has standard noise and no clamping, for it is of normalised inputs. With the `mean` and `std` that
    raw inputs are normalised with, shaped to broadcast, the result is the same as mixing normalised ones. Works for
    tables too.
    """
    gamma = share(gamma, "gamma")
    if not x.is_floating_point():
        raise ShiftError(f"inputs of type {x.dtype} can't be mixed with noise; expected floats: images use x / 255")
    noise = draws_for(x, random).normal(*x.shape[1:]).to(x.dtype)
    return (1 - gamma) * x + gamma * (mean + std * noise)


def salt_and_pepper(x: Tensor, p: float, random: Randomness) -> Tensor:
    """Each element of the images set to 0 or to 1, either as likely, with probability p (iBNN, section 3.5).

    >>> x = torch.full((1, 1, 100, 100), 0.5)
    >>> noisy = salt_and_pepper(x, 0.2, torch.Generator())
    >>> [round((noisy == value).float().mean().item(), 1) for value in (0.0, 0.5, 1.0)]
    [0.1, 0.8, 0.1]
    """
    p = share(p, "p")
    unit_images(x)
    u = draws_for(x, random).uniform(0, 1, *x.shape[1:])
    grains = (u < p / 2).to(x.dtype)
    return torch.where(u < p, grains, x)
