"""How a perturbation is applied, one file per layer type; `LAYERS` finds the Bayesian type of a plain one."""

from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .attention import BayesianMultiheadAttention
from .base import BayesianLayer, bayesian_layers, named_modules
from .conv import (
    BayesianConv1d,
    BayesianConv2d,
    BayesianConv3d,
    BayesianConvTranspose1d,
    BayesianConvTranspose2d,
    BayesianConvTranspose3d,
)
from .custom import Traits, derived_type
from .dropout import BayesianDropout, BayesianDropout1d, BayesianDropout2d, BayesianDropout3d
from .embedding import BayesianEmbedding
from .kernel import Kernel
from .linear import BayesianLinear
from .norm import (
    BayesianBatchNorm1d,
    BayesianBatchNorm2d,
    BayesianBatchNorm3d,
    BayesianGroupNorm,
    BayesianInstanceNorm1d,
    BayesianInstanceNorm2d,
    BayesianInstanceNorm3d,
    BayesianLayerNorm,
    BayesianSyncBatchNorm,
)
from .posterior import Posterior
from .recurrent import (
    BayesianGRU,
    BayesianGRUCell,
    BayesianLSTM,
    BayesianLSTMCell,
    BayesianRNN,
    BayesianRNNCell,
)
from .trial import clash, inherits_all, tried

LAYERS: dict[type[nn.Module], type[BayesianLayer]] = {
    layer.plain: layer
    for layer in (
        BayesianLinear,
        BayesianConv1d,
        BayesianConv2d,
        BayesianConv3d,
        BayesianConvTranspose1d,
        BayesianConvTranspose2d,
        BayesianConvTranspose3d,
        BayesianBatchNorm1d,
        BayesianBatchNorm2d,
        BayesianBatchNorm3d,
        BayesianSyncBatchNorm,
        BayesianLayerNorm,
        BayesianGroupNorm,
        BayesianInstanceNorm1d,
        BayesianInstanceNorm2d,
        BayesianInstanceNorm3d,
        BayesianEmbedding,
        BayesianLSTM,
        BayesianGRU,
        BayesianRNN,
        BayesianLSTMCell,
        BayesianGRUCell,
        BayesianRNNCell,
        BayesianMultiheadAttention,
        BayesianDropout,
        BayesianDropout1d,
        BayesianDropout2d,
        BayesianDropout3d,
    )
}

REFUSED: dict[type[nn.Module], str] = {
    nn.Bilinear: "Bilinear has two inputs, so it has no input factor and no rows of one input to follow",
    nn.EmbeddingBag: "EmbeddingBag sums before a perturbation can be applied; use Embedding and a sum",
    NonDynamicallyQuantizableLinear: "MultiheadAttention reads its weight without calling it",
}

_trials: WeakKeyDictionary[nn.Module, Traits | str] = WeakKeyDictionary()


def known_type(kind: type[nn.Module]) -> type[BayesianLayer] | None:
    """The Bayesian type of the supported layer that a type is or inherits from."""
    return next((LAYERS[part] for part in kind.__mro__ if part in LAYERS), None)


def bayesian_type(layer: nn.Module) -> type[BayesianLayer] | str:
    """The type that a plain layer becomes, or why it can't be Bayesian.

    >>> class Doubled(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(2 * x)
    >>> bayesian_type(Doubled(3, 2)).__name__
    'BayesianDoubled'
    """
    kind = type(layer)
    known = known_type(kind)
    if kind in LAYERS:
        return LAYERS[kind]
    if not any(p is not None for p in layer._parameters.values()):
        return f"{kind.__name__} is not a supported layer type: it has no parameters"
    reason = clash(layer)
    if reason is not None:
        return reason
    if known is not None and inherits_all(kind, known.plain):
        return derived_type(kind, known, None)
    if layer not in _trials:
        _trials[layer] = tried(layer, known)
    found = _trials[layer]
    return found if isinstance(found, str) else derived_type(kind, known, found)


__all__ = [
    "LAYERS",
    "REFUSED",
    "BayesianDropout",
    "BayesianLayer",
    "Kernel",
    "Posterior",
    "bayesian_layers",
    "bayesian_type",
    "known_type",
    "named_modules",
]
