"""The experiments by name."""

from bayesify.lab.reproduction.experiment import Experiment
from bayesify.lab.reproduction.experiments.emp_uci import EMP_UCI

EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in (EMP_UCI,)}
"""Every experiment by its name; a new one is a file here, and its line."""
