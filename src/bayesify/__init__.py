"""Turn any PyTorch network into a parameter-efficient Bayesian one, and know when not to trust it."""

from importlib.metadata import PackageNotFoundError, version

from bayesify.conversion.check import check
from bayesify.conversion.convert import convert, revert
from bayesify.conversion.last import last
from bayesify.conversion.recalibrate import recalibrate
from bayesify.conversion.summary import summary
from bayesify.errors import BayesifyError, CheckpointError, ConversionError, RowError
from bayesify.familiarity import Familiarity
from bayesify.files.checkpoint import load, save
from bayesify.files.export import export
from bayesify.integrations.hub import from_pretrained, push_to_hub
from bayesify.methods import (
    ECMP,
    EMP,
    IBNN,
    BatchEnsemble,
    DropConnect,
    Ensemble,
    LowRankEnsemble,
    MCDropout,
    MeanField,
    Rank1,
)
from bayesify.prediction.adaptive import Adaptive
from bayesify.prediction.conformal import Conformal, conformal
from bayesify.prediction.dirichlet import Dirichlet
from bayesify.prediction.gaussian import Gaussian
from bayesify.prediction.likelihood import Bernoulli, Categorical
from bayesify.prediction.poisson import Poisson
from bayesify.prediction.predict import draw, members, predict
from bayesify.prediction.results import Prediction
from bayesify.training.distill import distill
from bayesify.training.objective import add_kl_grad_, anneal, elbo, kl, parameter_groups
from bayesify.training.ood import uncertainty_loss, uniform_noise

try:
    __version__ = version("bayesify")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

# fmt: off
__all__ = [
    "ECMP", "EMP", "IBNN", "Adaptive", "BatchEnsemble", "BayesifyError", "Bernoulli", "Categorical", "CheckpointError",
    "Conformal", "ConversionError", "Dirichlet", "DropConnect", "Ensemble", "Familiarity", "Gaussian",
    "LowRankEnsemble", "MCDropout", "MeanField", "Poisson", "Prediction", "Rank1", "RowError", "add_kl_grad_",
    "anneal", "check", "conformal", "convert", "distill", "draw", "elbo", "export", "from_pretrained", "kl", "last",
    "load", "members", "parameter_groups", "predict", "push_to_hub", "recalibrate", "revert", "save", "summary",
    "uncertainty_loss", "uniform_noise",
]
# fmt: on
