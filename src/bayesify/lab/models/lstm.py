"""An LSTM (Hochreiter and Schmidhuber 1997) with one output per series."""

from typing import Literal

import torch
from torch import Tensor, nn

from bayesify.lab.models.bin_embedding import BinEmbedding
from bayesify.lab.models.errors import ModelError, require_one_of, require_positive


class LSTM(nn.Module):
    """An LSTM over series (batch, time, features), its last state or its mean output, and a linear head.

    The last state of a bidirectional LSTM is the forward one at the end and the backward one at the start. All series
    of a batch have the same length. With `bins`, it reads series with gaps, and in addition to their values a
    `BinEmbedding` of size `embedding`.

    >>> LSTM(37, 2, hidden=64, bidirectional=True).fc
    Linear(in_features=128, out_features=2, bias=True)
    """

    def __init__(
        self,
        in_features: int,
        classes: int = 2,
        *,
        hidden: int = 64,
        layers: int = 1,
        bidirectional: bool = False,
        pool: Literal["last", "mean"] = "last",
        dropout: float = 0.0,
        bins: int | None = None,
        embedding: int = 16,
    ) -> None:
        super().__init__()
        require_positive(in_features=in_features, classes=classes, hidden=hidden, layers=layers)
        require_one_of("pool", pool, ["last", "mean"])
        if dropout and layers == 1:
            raise ModelError(f"dropout={dropout} acts between layers, but there is only one; set layers=2 or more")
        self.bins = None if bins is None else BinEmbedding(in_features, bins, embedding)
        size = in_features if bins is None else in_features + embedding
        self.lstm = nn.LSTM(size, hidden, layers, batch_first=True, dropout=dropout, bidirectional=bool(bidirectional))
        self.mean = pool == "mean"
        self.fc = nn.Linear(hidden * (1 + bool(bidirectional)), classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.bins is not None:
            x = torch.cat([x, self.bins(x)], -1)
        outputs, (states, _) = self.lstm(x)
        directions = 2 if self.lstm.bidirectional else 1
        pooled = outputs.mean(1) if self.mean else torch.cat(states[-directions:].unbind(), dim=1)
        logits: Tensor = self.fc(pooled)
        return logits
