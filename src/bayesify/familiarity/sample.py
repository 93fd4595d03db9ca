"""A sample of the rows of training data: their features, their classes, and the ranges of their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesify.batches import batches, first_tensor, row_count
from bayesify.errors import BayesifyError
from bayesify.familiarity.features import FeatureNetwork

MOST_COLUMNS = 10_000
"""Wider inputs, such as flattened images, have no ranges of columns."""


class Sample:
    """A random sample of at most `rows` rows: the features of each layer and the classes; and the ranges of columns.

    Attributes:
        features: One tensor (N, D) for each layer.
        labels: The classes, if every row has one.
        low: The lowest finite value of each column of all inputs (N, D), if they have columns.
        high: The highest ones.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.features, self.labels = rows, list[Tensor](), torch.empty(0).long()
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self._has_labels = True
        self._generator, self._keys = torch.Generator().manual_seed(0), torch.empty(0)

    @property
    def classes(self) -> Tensor | None:
        """The class of each row; None if some have none."""
        return self.labels if self._has_labels else None

    def add(self, x: Any, y: Any, found: Sequence[Tensor]) -> None:
        """Add a batch: its inputs, its targets, and the features of each layer."""
        count = len(found[0])
        is_classes = isinstance(y, Tensor) and not y.is_floating_point() and y.shape == (count,)
        self._has_labels = self._has_labels and is_classes
        self.labels = torch.cat([self.labels, y.long().cpu() if self._has_labels else torch.zeros(count).long()])
        self._keys = torch.cat([self._keys, torch.rand(count, generator=self._generator)])
        old = self.features or [each.new_empty(0, each.shape[1]).cpu() for each in found]
        self.features = [torch.cat([known, new.cpu()]) for known, new in zip(old, found, strict=True)]
        if len(self._keys) > 2 * self.rows:
            self.shorten()
        self._widen_ranges(first_tensor(x))

    def shorten(self) -> None:
        """Keep the rows with the lowest random keys, in the order of these."""
        kept = self._keys.argsort()[: self.rows]
        self._keys, self.labels = self._keys[kept], self.labels[kept]
        self.features = [each[kept] for each in self.features]

    def _widen_ranges(self, x: Tensor | None) -> None:
        if x is None or x.dim() != 2 or not x.is_floating_point() or x.shape[1] > MOST_COLUMNS:
            return
        x = x.float()
        least, most = (x.where(x.isfinite(), end) for end in (torch.inf, -torch.inf))
        least, most = least.amin(0).cpu(), most.amax(0).cpu()
        self.low = least if self.low is None else self.low.minimum(least)
        self.high = most if self.high is None else self.high.maximum(most)


def sample_features(network: FeatureNetwork, data: Any, rows: int, batch_size: int | None) -> Sample:
    """The features and classes of at most `rows` rows of the data, each equally likely."""
    sample = Sample(rows)
    for batch in _batches(data, batch_size, network.batch_dim):
        given = network.given(batch)
        sample.add(given, _targets(batch), list(network.of(given).values()))
    if not sample.features:
        raise BayesifyError("nothing to fit: the data has no rows")
    sample.shorten()
    if sample.low is not None and not bool(sample.low.isfinite().all()):  # a column without a finite value
        sample.low = sample.high = None
    for name, each in zip(network.layers, sample.features, strict=True):
        if not bool(each.isfinite().all()):
            raise BayesifyError(f"the features of layer {name!r} are not finite: look at the inputs and the weights")
    return sample


def _batches(data: Any, batch_size: int | None, batch_dim: int) -> Iterable[Any]:
    """The batches of the data; a pair of tensors is one of inputs and targets."""
    if not (isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        return batches(data, batch_size, batch_dim)
    counts = [row_count(part, batch_dim) for part in data]
    if counts[0] != counts[1]:
        raise BayesifyError(f"{counts[0]} inputs and {counts[1]} targets: expected as many")
    size = batch_size or max(counts[0], 1)
    return zip(*(part.split(size, min(batch_dim, part.dim() - 1)) for part in data), strict=True) if counts[0] else ()


def _targets(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch.get("labels")
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
