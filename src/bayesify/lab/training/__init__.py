"""Training: a recipe in one call, or any network with Lightning's trainer and your own loader."""

from bayesify.conversion.explain_not_finite import NotFiniteError
from bayesify.lab._torchvision import TORCHVISION  # noqa: F401  (before Lightning imports it)
from bayesify.lab.training.batches import ShuffledBatches
from bayesify.lab.training.callbacks import Checkpoint, CsvLog, Interrupted
from bayesify.lab.training.ensemble import joined
from bayesify.lab.training.lightning_module import BayesianModule
from bayesify.lab.training.schedules import SCHEDULES
from bayesify.lab.training.start import train
from bayesify.lab.training.train_recipe import bayesian_network

__all__ = [
    "SCHEDULES",
    "BayesianModule",
    "Checkpoint",
    "CsvLog",
    "Interrupted",
    "NotFiniteError",
    "ShuffledBatches",
    "bayesian_network",
    "joined",
    "train",
]
