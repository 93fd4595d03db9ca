"""The experiments by name."""

from bayesify.lab.reproduction.experiment import Experiment
from bayesify.lab.reproduction.experiments.adapter_faces import ADAPTER_FACES
from bayesify.lab.reproduction.experiments.adapter_ood import ADAPTER_OOD
from bayesify.lab.reproduction.experiments.adapter_quality import ADAPTER_QUALITY
from bayesify.lab.reproduction.experiments.emp_patches import EMP_PATCHES
from bayesify.lab.reproduction.experiments.emp_uci import EMP_UCI
from bayesify.lab.reproduction.experiments.ibnn_depth import IBNN_DEPTH
from bayesify.lab.reproduction.experiments.ibnn_noise import IBNN_NOISE
from bayesify.lab.reproduction.experiments.ibnn_width import IBNN_WIDTH
from bayesify.lab.reproduction.experiments.rank1_ablation import RANK1_ABLATION
from bayesify.lab.reproduction.experiments.rank1_records import RANK1_RECORDS
from bayesify.lab.reproduction.experiments.rank1_scratch import RANK1_SCRATCH

_EVERY = (
    *(RANK1_SCRATCH, RANK1_ABLATION, RANK1_RECORDS),
    *(IBNN_DEPTH, IBNN_WIDTH, IBNN_NOISE),
    *(EMP_PATCHES, EMP_UCI),
    *(ADAPTER_QUALITY, ADAPTER_OOD, ADAPTER_FACES),
)
EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in _EVERY}
"""Every experiment by its name, paper by paper; a new one is a file here, and its line."""
