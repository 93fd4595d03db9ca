"""Norm layers: the usual normalisation, then an affine map that may differ by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from bayesify.errors import BayesifyError
from bayesify.layers.base import BayesianLayer, Operation, Overlay, affine_site, layer_type
from bayesify.layers.rows import Rows
from bayesify.methods.base import Perturbation, Role, Site

STATISTICS = ("running_mean", "running_var")


class Normalisation(Operation):
    """h ∘ weight + bias, where h is the normalised input."""

    role: ClassVar[Role] = "norm"

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        """What a method sees of it: no input and no output factors; running statistics, if there are some."""
        statistics = {name: t for name in STATISTICS if (t := getattr(layer, name, None)) is not None}
        return affine_site(layer, statistics=statistics if isinstance(layer, _BatchNorm) else {})

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def normalised(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        """The input before the affine map."""
        return self.run(x)

    def by_row(self, x: Tensor, base: Mapping[str, Tensor], p: Perturbation, rows: Rows) -> Tensor:
        y = self.normalised(x, p, rows)
        weight = p.weight if p.weight is not None or "weight" not in base else base["weight"].unsqueeze(0)
        bias = p.bias if p.bias is not None or "bias" not in base else base["bias"].unsqueeze(0)
        if weight is not None:
            y = y * rows.spread(weight, y, self.features_last)
        return y if bias is None else y + rows.spread(bias, y, self.features_last)


class BayesianLayerNorm(Normalisation, BayesianLayer, nn.LayerNorm):
    """`nn.LayerNorm` under a perturbation."""

    plain = nn.LayerNorm
    features_last = True

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self.normalized_shape)

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class BayesianGroupNorm(Normalisation, BayesianLayer, nn.GroupNorm):
    """`nn.GroupNorm` under a perturbation."""

    plain = nn.GroupNorm

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class InstanceNorm:
    """What the instance norms share, beside `Normalisation`."""

    def is_unbatched(self, x: Tensor) -> bool:
        """Whether an input has no batch dimension."""
        return x.dim() == self._get_no_batch_dim()  # type: ignore[attr-defined, no-any-return]

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert isinstance(self, _InstanceNorm)
        self._check_input_dim(x)
        if self.is_unbatched(x):
            return self.run(x.unsqueeze(0), weight, bias).squeeze(0)
        from_batch = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        return F.instance_norm(x, self.running_mean, self.running_var, weight, bias, from_batch, momentum, self.eps)


BayesianInstanceNorm1d = layer_type(nn.InstanceNorm1d, InstanceNorm, Normalisation, BayesianLayer)
BayesianInstanceNorm2d = layer_type(nn.InstanceNorm2d, InstanceNorm, Normalisation, BayesianLayer)
BayesianInstanceNorm3d = layer_type(nn.InstanceNorm3d, InstanceNorm, Normalisation, BayesianLayer)


class BatchNorm:
    """What the batch norms share, beside `Normalisation`.

    All draws have the same statistics, unless a method gives each member its own.
    """

    def run(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
    ) -> Tensor:
        layer = self._checked(x)
        mean = layer.running_mean if running_mean is None else running_mean
        var = layer.running_var if running_var is None else running_var
        from_batch, momentum = layer.training or mean is None, self._momentum()
        if layer.training and not layer.track_running_stats:
            mean = var = None
        return F.batch_norm(x, mean, var, weight, bias, from_batch, momentum, layer.eps)

    def normalised(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        if p.statistics is None:
            return self.run(x)
        layer = self._checked(x)
        if not layer.training:
            mean, var = (rows.spread(p.statistics[name], x, False) for name in STATISTICS)
            return (x - mean) * torch.rsqrt(var + layer.eps)
        statistics = {name: value.clone() for name, value in p.statistics.items()}
        y = self._by_member(x, statistics["running_mean"], statistics["running_var"], rows)
        with torch.no_grad():
            for name, value in statistics.items():
                self._store(name, p.component, value)
        return y

    def _checked(self, x: Tensor) -> Any:
        layer: Any = self
        layer._check_input_dim(x)
        return layer

    def _momentum(self) -> float:
        """The fraction of the running statistics that this call replaces; counts the call."""
        layer: Any = self
        if not (layer.training and layer.track_running_stats and layer.num_batches_tracked is not None):
            return 0.0 if layer.momentum is None else float(layer.momentum)
        layer.num_batches_tracked.add_(1)
        return 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else float(layer.momentum)

    def _by_member(self, x: Tensor, mean: Tensor, var: Tensor, rows: Rows) -> Tensor:
        """Normalise each member's rows by their own statistics, and update its running statistics (G, C)."""
        members, momentum = len(mean), self._momentum()
        if rows.batch % members == 0 and rows.repeat == 1:  # members side by side as channels
            channels = x.reshape(x.shape[0] // members, members * x.shape[1], *x.shape[2:])
            return self._member(channels, mean.view(-1), var.view(-1), momentum).reshape(x.shape)
        places = [rows.of_draw(member, members, x.device) for member in range(members)]
        parts = [self._member(x.index_select(0, at), mean[i], var[i], momentum) for i, at in enumerate(places)]
        return torch.cat(parts).index_select(0, torch.cat(places).argsort())

    def _member(self, x: Tensor, mean: Tensor, var: Tensor, momentum: float) -> Tensor:
        """Normalise one member's rows; by its running statistics if a channel has one value, and so no variance."""
        has_variance = x.numel() > x.shape[1]
        return F.batch_norm(x, mean, var, None, None, has_variance, momentum, self.eps)  # type: ignore[attr-defined]

    def _store(self, name: str, component: Tensor | None, values: Tensor) -> None:
        """Store the members' statistics: those of component 0 are the layer's own buffers."""
        layer: Any = self
        assert component is not None
        first, others = getattr(layer, name), getattr(layer.posterior, name)
        stack = torch.cat([first.unsqueeze(0), others]).index_copy(0, component, values)
        first.copy_(stack[0])
        others.copy_(stack[1:])


BayesianBatchNorm1d = layer_type(nn.BatchNorm1d, BatchNorm, Normalisation, BayesianLayer)
BayesianBatchNorm2d = layer_type(nn.BatchNorm2d, BatchNorm, Normalisation, BayesianLayer)
BayesianBatchNorm3d = layer_type(nn.BatchNorm3d, BatchNorm, Normalisation, BayesianLayer)


class BayesianSyncBatchNorm(BatchNorm, Normalisation, BayesianLayer, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` under a perturbation; all processes share their statistics as usual."""

    plain = nn.SyncBatchNorm

    def run(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
    ) -> Tensor:
        statistics = {} if running_mean is None else {"running_mean": running_mean, "running_var": running_var}
        other: Any = Overlay(self, weight=weight, bias=bias, **statistics)
        return nn.SyncBatchNorm.forward(other, x)

    def normalised(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if p.statistics is not None and self.training and distributed:
            raise BayesifyError(
                f"layer {self.site_name!r}: members with their own statistics can't be synchronised over processes; "
                "use BatchNorm for Ensemble, or leave the layer out"
            )
        return super().normalised(x, p, rows)
