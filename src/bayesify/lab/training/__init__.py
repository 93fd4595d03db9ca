"""Training: from a recipe in one call, or with Lightning and a loader of one's own."""

from bayesify.lab.training.batches import ShuffledBatches
from bayesify.lab.training.callbacks import Checkpoint, CsvLog, Interrupted
from bayesify.lab.training.ensemble import joined
from bayesify.lab.training.finite import NotFiniteError
from bayesify.lab.training.fit import bayesian_network, train
from bayesify.lab.training.module import BayesianModule
from bayesify.lab.training.schedules import SCHEDULES

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
