"""Numbers as words: the bin that each value is in, embedded."""

import torch
from torch import Tensor, nn

from bayesify.lab.models.errors import ModelError, positive


class BinEmbedding(nn.Module):
    """A vector for each variable and bin of its values, summed over the variables of a time.

    Of standardised series (batch, time, 2 × variables), values and then whether each was measured at that time, as
    `lab.data.Series` has them. A value is in one of `bins` that are equally probable under a standard Normal; those
    measured now and those carried on from before have vectors of their own, and so has what was never measured yet.

    >>> BinEmbedding(2 * 37, bins=5, size=16).embedding
    Embedding(407, 16)
    """

    edges: Tensor
    offsets: Tensor

    def __init__(self, in_features: int, bins: int, size: int) -> None:
        super().__init__()
        positive(bins=bins, embedding=size)
        if in_features % 2:
            raise ModelError(
                f"bins={bins} needs values and as many marks of what was measured, not {in_features} features"
            )
        self.variables, self.bins = in_features // 2, bins
        words = 2 * bins + 1
        self.embedding = nn.Embedding(self.variables * words, size)
        # The sum over the variables starts small beside the values themselves, which are standardised.
        nn.init.normal_(self.embedding.weight, std=0.02)
        edges = torch.special.ndtri(torch.arange(1, bins) / bins)
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("offsets", words * torch.arange(self.variables), persistent=False)

    def words(self, x: Tensor) -> Tensor:
        """The number of each variable's vector: (batch, time, variables)."""
        values, measured = x[..., : self.variables].contiguous(), x[..., self.variables :] > 0
        known = measured.to(values.dtype).cumsum(-2) > 0
        word = 1 + torch.bucketize(values, self.edges) + self.bins * ~measured
        return torch.where(known, word, 0) + self.offsets

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(self.words(x))
        return vectors.sum(-2)
