"""Noise, pixel by pixel: Gaussian, shot and impulse."""

from __future__ import annotations

from torch import Tensor

from bayesify.lab.shift.noise import salt_and_pepper
from bayesify.lab.shift.random_numbers import Draws


def gaussian_noise(x: Tensor, draws: Draws, std: float) -> Tensor:
    """x + std·ε, ε ~ N(0, 1): sensor noise in low light."""
    return x + std * draws.normal(*x.shape[1:])


def shot_noise(x: Tensor, draws: Draws, photons: float) -> Tensor:
    """Poisson(photons · x) / photons: photon noise, where white has this many photons."""
    return draws.poisson(photons * x) / photons


def impulse_noise(x: Tensor, draws: Draws, share: float) -> Tensor:
    """A share of all elements set to black or white: bit errors."""
    return salt_and_pepper(x, share, draws)
