"""The experiments by name."""

from bayesify.lab.reproduction.experiment import Experiment
from bayesify.lab.reproduction.experiments.emp_uci import EMP_UCI
from bayesify.lab.reproduction.experiments.ibnn_depth import IBNN_DEPTH

EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in (EMP_UCI, IBNN_DEPTH)}
"""Every experiment by its name; a new one is a file here, and its line."""
