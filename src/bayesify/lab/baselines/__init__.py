"""Baselines that are applied to a plain network after training: temperature scaling, SWAG and Laplace."""

from bayesify.lab._torchvision import TORCHVISION  # noqa: F401  (before Lightning imports it)
from bayesify.lab.baselines.errors import BaselineError
from bayesify.lab.baselines.laplace import laplace
from bayesify.lab.baselines.swag import Swag
from bayesify.lab.baselines.temperature import best_temperature

__all__ = ["BaselineError", "Swag", "best_temperature", "laplace"]
