"""The analyses of the papers: each returns plain arrays, which `to_csv` writes and `figure` draws."""

from bayesify.lab.analyses.ablation import Ablation, ablation
from bayesify.lab.analyses.analysis import Analysis, AnalysisError, Chart
from bayesify.lab.analyses.curves import Bands, FittedCurve, fit_curve, toy_curve
from bayesify.lab.analyses.extremes import Extremes, extremes
from bayesify.lab.analyses.kernels import KernelMoments, kernel_moments
from bayesify.lab.analyses.prior import PriorFunctions, prior_functions, sign_network
from bayesify.lab.analyses.sample_sizes import SampleSizes, sample_sizes
from bayesify.lab.analyses.style import panels
from bayesify.lab.analyses.surface import LossLine, LossPlane, loss_line, loss_plane
from bayesify.lab.analyses.verification import Verification, mean_features, verification
from bayesify.lab.analyses.weights import ComponentWeights, component_weights

__all__ = [
    "Ablation",
    "Analysis",
    "AnalysisError",
    "Bands",
    "Chart",
    "ComponentWeights",
    "Extremes",
    "FittedCurve",
    "KernelMoments",
    "LossLine",
    "LossPlane",
    "PriorFunctions",
    "SampleSizes",
    "Verification",
    "ablation",
    "component_weights",
    "extremes",
    "fit_curve",
    "kernel_moments",
    "loss_line",
    "loss_plane",
    "mean_features",
    "panels",
    "prior_functions",
    "sample_sizes",
    "sign_network",
    "toy_curve",
    "verification",
]
