"""A sample of the rows of training data: their features, their classes, and the ranges of their columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.batches import batches, first_tensor
from bayesify.errors import BayesifyError
from bayesify.familiarity.features import FeatureNetwork

MOST_COLUMNS = 10_000
"""Wider inputs, such as flattened images, have no ranges of columns."""


@dataclass
class Sample:
    """A sample of the rows of some data: the features of each layer, classes, and the ranges of columns of all."""

    features: list[Tensor]
    labels: Tensor | None
    low: Tensor | None
    high: Tensor | None


def sample_features(network: FeatureNetwork, data: Any, rows: int, batch_size: int | None) -> Sample:
    """The features and classes of at most `rows` rows, each equally likely."""
    generator = torch.Generator().manual_seed(0)
    keys, features, labels = torch.empty(0), [torch.empty(0)], torch.empty(0).long()
    low: Tensor | None = None
    high: Tensor | None = None
    has_labels = True
    for batch, y in _with_labels(data, batch_size, network.batch_dim):
        x = network.given(batch)
        found = [each.cpu() for each in network.of(x).values()]
        count = len(found[0])
        has_labels = has_labels and y is not None and y.shape == (count,)
        own = y.cpu() if has_labels and y is not None else torch.zeros(count).long()
        keys = torch.cat([keys, torch.rand(count, generator=generator)])
        labels = torch.cat([labels, own])
        features = [torch.cat(both) for both in zip(features, found, strict=True)] if len(features[0]) else found
        if len(keys) > 2 * rows:
            keys, labels, features = _lowest(keys, labels, features, rows)
        first = first_tensor(x)
        if first is not None and first.dim() == 2 and first.is_floating_point() and first.shape[1] <= MOST_COLUMNS:
            least, most = first.float().amin(0).cpu(), first.float().amax(0).cpu()
            low, high = (least, most) if low is None or high is None else (low.minimum(least), high.maximum(most))
    if not len(keys):
        raise BayesifyError("nothing to fit: the data has no rows")
    keys, labels, features = _lowest(keys, labels, features, rows)
    for name, each in zip(network.layers, features, strict=True):
        if not bool(each.isfinite().all()):
            raise BayesifyError(
                f"the features of layer {name!r} are NaN or infinite: look at the inputs and the weights"
            )
    return Sample(features, labels if has_labels else None, low, high)


def _lowest(keys: Tensor, labels: Tensor, features: list[Tensor], rows: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The rows with the lowest random keys, in order of the keys."""
    kept = keys.argsort()[:rows]
    return keys[kept], labels[kept], [each[kept] for each in features]


def _with_labels(data: Any, batch_size: int | None, batch_dim: int) -> Iterator[tuple[Any, Tensor | None]]:
    """Inputs and, if there are any, their classes, batch by batch."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        if len(x) != len(y):
            raise BayesifyError(f"{len(x)} inputs and {len(y)} targets: expected as many")
        if not len(x):
            raise BayesifyError("nothing to fit: the data has no rows")
        size = batch_size or len(x)
        data = zip(x.split(size), y.split(size), strict=True)
    for batch in batches(data, batch_size, batch_dim):
        y = None
        if isinstance(batch, Mapping):
            y = batch.get("labels")
        elif isinstance(batch, (tuple, list)) and len(batch) > 1:
            y = batch[1]
        is_classes = isinstance(y, Tensor) and not y.is_floating_point() and not y.is_complex()
        yield batch, y.long() if is_classes else None
