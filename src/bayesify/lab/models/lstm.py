"""A long short-term memory (Hochreiter and Schmidhuber 1997) that reads a series and gives one answer."""

from typing import Literal

import torch
from torch import Tensor, nn

from bayesify.lab.models.bins import BinEmbedding
from bayesify.lab.models.errors import ModelError, one_of, positive


class LSTM(nn.Module):
    """An LSTM over series (batch, time, features), its last state or its mean output, and a linear head.

    The last state of a bidirectional one is the forward direction's at the end and the backward one's at the start.
    All series of a batch have one length; nothing is masked. With `bins`, it reads series with gaps, and beside their
    numbers the sum of an `embedding` of each variable's bin (see `BinEmbedding`).

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
        positive(in_features=in_features, classes=classes, hidden=hidden, layers=layers)
        one_of("pool", pool, ["last", "mean"])
        if dropout and layers == 1:
            raise ModelError(f"dropout={dropout} acts between layers, and there is one; set layers=2 or more")
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
