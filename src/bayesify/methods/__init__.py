"""The methods, one file each; `METHODS` has them by name."""

from bayesify.methods.base import Method
from bayesify.methods.batch_ensemble import BatchEnsemble
from bayesify.methods.drop_connect import DropConnect
from bayesify.methods.ecmp import ECMP
from bayesify.methods.emp import EMP
from bayesify.methods.ensemble import Ensemble
from bayesify.methods.ibnn import IBNN
from bayesify.methods.low_rank_ensemble import LowRankEnsemble
from bayesify.methods.mc_dropout import MCDropout
from bayesify.methods.mean_field import MeanField
from bayesify.methods.rank1 import Rank1

# fmt: off
__all__ = [
    "ECMP", "EMP", "IBNN", "METHODS", "BatchEnsemble", "DropConnect", "Ensemble", "LowRankEnsemble", "MCDropout",
    "MeanField", "Rank1",
]
METHODS: dict[str, type[Method]] = {method.__name__: method for method in (
    Rank1, IBNN, EMP, ECMP, MeanField, LowRankEnsemble, BatchEnsemble, MCDropout, DropConnect, Ensemble,
)}
# fmt: on
