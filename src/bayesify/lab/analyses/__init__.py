"""The analyses of the papers: each returns plain arrays, which `to_csv` writes and `figure` draws."""

from bayesify.lab.analyses.ablation import Ablation, ablation
from bayesify.lab.analyses.analysis import Analysis, AnalysisError, Chart
from bayesify.lab.analyses.components import ComponentCurves, checkpoint_curves, component_curves, component_metrics
from bayesify.lab.analyses.curves import Bands, FittedCurve, fit_curve, toy_curve
from bayesify.lab.analyses.extremes import Extremes, extremes
from bayesify.lab.analyses.induced import InducedPriors, induced_priors, student_factor
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
    "ComponentCurves",
    "ComponentWeights",
    "Extremes",
    "FittedCurve",
    "InducedPriors",
    "KernelMoments",
    "LossLine",
    "LossPlane",
    "PriorFunctions",
    "SampleSizes",
    "Verification",
    "ablation",
    "checkpoint_curves",
    "component_curves",
    "component_metrics",
    "component_weights",
    "extremes",
    "fit_curve",
    "induced_priors",
    "kernel_moments",
    "loss_line",
    "loss_plane",
    "mean_features",
    "panels",
    "prior_functions",
    "sample_sizes",
    "sign_network",
    "student_factor",
    "toy_curve",
    "verification",
]
