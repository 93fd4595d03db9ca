"""What is added to a plain network after its training: temperature scaling, SWAG, Laplace."""

from bayesify.lab.baselines.errors import BaselineError
from bayesify.lab.baselines.laplace import laplace
from bayesify.lab.baselines.swag import Swag
from bayesify.lab.baselines.temperature import best_temperature

__all__ = ["BaselineError", "Swag", "best_temperature", "laplace"]
