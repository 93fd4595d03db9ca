"""Turn any PyTorch network into a parameter-efficient Bayesian one, and know when not to trust it."""

from importlib.metadata import PackageNotFoundError, version

from .memory import no_collection as _no_collection

with _no_collection():  # it would go through all objects of torch, which takes longer than all that is imported here
    from .adaptive import Adaptive
    from .check import check, recalibrate
    from .checkpoint import load, save
    from .convert import convert, revert
    from .errors import BayesifyError, CheckpointError, ConversionError, RowError
    from .export import export
    from .families import (
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
    from .likelihood import Bernoulli, Categorical, Gaussian
    from .objective import add_kl_grad_, anneal, elbo, kl, parameter_groups
    from .ood import uncertainty_loss, uniform_noise
    from .predict import draw, members, predict
    from .prediction import Prediction
    from .summary import summary

try:
    __version__ = version("bayesify")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "ECMP",
    "EMP",
    "IBNN",
    "Adaptive",
    "BatchEnsemble",
    "BayesifyError",
    "Bernoulli",
    "Categorical",
    "CheckpointError",
    "ConversionError",
    "DropConnect",
    "Ensemble",
    "Gaussian",
    "LowRankEnsemble",
    "MCDropout",
    "MeanField",
    "Prediction",
    "Rank1",
    "RowError",
    "add_kl_grad_",
    "anneal",
    "check",
    "convert",
    "draw",
    "elbo",
    "export",
    "kl",
    "load",
    "members",
    "parameter_groups",
    "predict",
    "recalibrate",
    "revert",
    "save",
    "summary",
    "uncertainty_loss",
    "uniform_noise",
]
