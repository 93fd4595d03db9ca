"""How a perturbation is applied, one file per layer type; `LAYERS` finds the Bayesian type of a plain one."""

from torch import nn

from .attention import BayesianMultiheadAttention
from .base import BayesianLayer, bayesian_layers
from .conv import (
    BayesianConv1d,
    BayesianConv2d,
    BayesianConv3d,
    BayesianConvTranspose1d,
    BayesianConvTranspose2d,
    BayesianConvTranspose3d,
)
from .dropout import BayesianDropout, BayesianDropout1d, BayesianDropout2d, BayesianDropout3d
from .embedding import BayesianEmbedding
from .kernel import Kernel, Posterior
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
from .recurrent import (
    BayesianGRU,
    BayesianGRUCell,
    BayesianLSTM,
    BayesianLSTMCell,
    BayesianRNN,
    BayesianRNNCell,
)

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
}

__all__ = ["LAYERS", "REFUSED", "BayesianDropout", "BayesianLayer", "Kernel", "Posterior", "bayesian_layers"]
