"""`BinEmbedding`: embeddings of the bins that the values of a series fall into."""

import torch
from torch import Tensor, nn

from bayesify.lab.models.errors import ModelError, require_positive


class BinEmbedding(nn.Module):
    """A vector for each variable and bin of its values, summed over the variables at each time.

    Inputs are standardised series (batch, time, 2 × variables) as `lab.data.Series` prepares them: values, and whether
    each was measured at that time. Values fall into `bins` that are equally probable under a standard Normal. Measured
    values, carried-forward values and values never measured so far have separate vectors.

    >>> BinEmbedding(2 * 37, bins=5, size=16).embedding
    Embedding(407, 16)
    """

    edges: Tensor
    offsets: Tensor

    def __init__(self, in_features: int, bins: int, size: int) -> None:
        super().__init__()
        require_positive(bins=bins, embedding=size)
        if in_features % 2:
            raise ModelError(
                f"bins={bins} needs two features per variable, as in series with gaps; got {in_features} features"
            )
        self.variables, self.bins = in_features // 2, bins
        codes = 2 * bins + 1
        self.embedding = nn.Embedding(self.variables * codes, size)
        # The sum over the variables starts small compared with the standardised values.
        nn.init.normal_(self.embedding.weight, std=0.02)
        edges = torch.special.ndtri(torch.arange(1, bins) / bins)
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("offsets", codes * torch.arange(self.variables), persistent=False)

    def indices(self, x: Tensor) -> Tensor:
        """The index of each variable's vector: (batch, time, variables)."""
        values, measured = x[..., : self.variables].contiguous(), x[..., self.variables :] > 0
        known = measured.to(values.dtype).cumsum(-2) > 0
        code = 1 + torch.bucketize(values, self.edges) + self.bins * ~measured
        return torch.where(known, code, 0) + self.offsets

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(self.indices(x))
        return vectors.sum(-2)
