"""`TabM` (Gorishniy et al. 2025): a perceptron for tables with embeddings of numbers, made to be an ensemble."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from bayesify.lab.models.errors import ModelError, require_positive, size_list
from bayesify.methods import BatchEnsemble, Ensemble
from bayesify.methods.base import Method


class NumberEmbedding(nn.Module):
    """A vector for each number: ReLU of a piecewise linear function of it, one for each feature.

    Numbers are encoded by where they are in each of `bins` (Gorishniy et al. 2022, eq. 1), whose bounds are quantiles
    of a standard Normal, as inputs are standardised. Beyond the outer bounds, functions continue as lines.

    >>> NumberEmbedding(1, bins=2, size=4).encoded(torch.tensor([[0.0], [2.0]])).round(decimals=2)
    tensor([[[1.0000, 0.0000]],
            [[1.0000, 2.0700]]])
    """

    bounds: Tensor

    def __init__(self, in_features: int, bins: int, size: int) -> None:
        super().__init__()
        require_positive(in_features=in_features, embedding=size)
        if bins < 2:
            raise ModelError(f"bins={bins}: expected at least 2, or embedding=0 for the numbers themselves")
        outer = (torch.arange(bins + 1) + 0.5) / (bins + 1)
        self.register_buffer("bounds", torch.special.ndtri(outer), persistent=False)
        scale = bins**-0.5
        self.weight = nn.Parameter(torch.empty(in_features, bins, size).uniform_(-scale, scale))
        self.bias = nn.Parameter(torch.empty(in_features, size).uniform_(-scale, scale))

    def encoded(self, x: Tensor) -> Tensor:
        """How much of each bin is below the number: (rows, features, bins)."""
        part = (x.unsqueeze(-1) - self.bounds[:-1]) / self.bounds.diff()
        first, inner, last = part[..., :1], part[..., 1:-1], part[..., -1:]
        return torch.cat([first.clamp(max=1), inner.clamp(0, 1), last.clamp(min=0)], -1)

    def forward(self, x: Tensor) -> Tensor:
        vectors = torch.einsum("rfb,fbs->rfs", self.encoded(x), self.weight) + self.bias
        return vectors.relu().flatten(1)


class TabM(nn.Module):
    """Embeddings of numbers, blocks of linear layer, ReLU and dropout in `body`, and a linear `head`.

    By itself it is one network. It becomes TabM by `by.convert(network, tabm_methods())`, and is trained with every
    row in every member: `mixture="replicate"`. Without `embedding` (0), the first layer sees the numbers themselves.

    >>> import bayesify as by
    >>> model = by.convert(TabM(8, 1, hidden=[32, 32]), tabm_methods(members=16))
    >>> by.elbo(model, torch.randn(4, 8), torch.zeros(4, 1), n=4, likelihood=by.Gaussian(), mixture="replicate").kl > 0
    tensor(True)
    """

    def __init__(
        self,
        in_features: int,
        classes: int = 1,
        *,
        hidden: Sequence[int] = (128, 128),
        embedding: int = 8,
        bins: int = 16,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        require_positive(in_features=in_features, classes=classes)
        if len(widths := size_list("hidden", hidden)) < 2:
            raise ModelError(f"hidden must have at least two widths, such as (128, 128), not {widths}")
        self.embedding = NumberEmbedding(in_features, bins, embedding) if embedding else nn.Identity()
        sizes = [in_features * (embedding or 1), *widths]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout))]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embedding(x.flatten(1))))
        return out


def tabm_methods(members: int = 16) -> dict[str, Method]:
    """The methods that make a `TabM` an ensemble, for `by.convert`.

    Args:
        members: Their number.

    Returns:
        A head for each member; and in the body weights that all share, with scales of inputs and outputs and a bias for
        each member. Only the first layer's scales differ at the start: they are random signs.
    """
    return {
        "head": Ensemble(members, init_copies="random"),
        "body.0": BatchEnsemble(members, signs=0.5, bias="component"),
        "body.*": BatchEnsemble(members, mean_std=0.0, bias="component"),
    }
