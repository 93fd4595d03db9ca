"""The ten methods, one file each; `FAMILIES` finds them by name."""

from ..family import Family
from .batch_ensemble import BatchEnsemble
from .dropout import DropConnect, MCDropout
from .ensemble import Ensemble
from .ibnn import IBNN
from .low_rank_ensemble import LowRankEnsemble
from .mean_field import MeanField
from .patching import ECMP, EMP
from .rank1 import Rank1

FAMILIES: dict[str, type[Family]] = {
    family.__name__: family
    for family in (
        Rank1,
        IBNN,
        EMP,
        ECMP,
        MeanField,
        LowRankEnsemble,
        BatchEnsemble,
        MCDropout,
        DropConnect,
        Ensemble,
    )
}

__all__ = [
    "ECMP",
    "EMP",
    "FAMILIES",
    "IBNN",
    "BatchEnsemble",
    "DropConnect",
    "Ensemble",
    "LowRankEnsemble",
    "MCDropout",
    "MeanField",
    "Rank1",
]
