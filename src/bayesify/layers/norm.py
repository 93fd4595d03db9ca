"""Norm layers: normalise as ever, then an affine map that may differ by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..errors import BayesifyError
from ..family import Perturbation, Site
from .base import BayesianLayer, With, affine_site
from .kernel import _chosen, _shared, _tensor
from .rows import Rows

STATISTICS = ("running_mean", "running_var")


class _BayesianNorm(BayesianLayer):
    role = "norm"

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        return affine_site(layer)

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def prepare(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        return self.run(x)

    def term(self, h: Tensor, p: Perturbation, rows: Rows, base: Mapping[str, Tensor]) -> Tensor:
        """h ∘ weight + bias, row by row."""
        if p.choice is not None:
            p = _chosen(p)
        weight, bias = _tensor(p.weight), p.bias
        weight = _shared(base.get("weight")) if weight is None else weight
        bias = _shared(base.get("bias")) if bias is None else bias
        if weight is not None:
            h = h * self.aligned(rows.spread(weight), h)
        return h if bias is None else h + self.aligned(rows.spread(bias), h)


class BayesianLayerNorm(_BayesianNorm, nn.LayerNorm):
    """`nn.LayerNorm` under a perturbation."""

    plain = nn.LayerNorm
    features_last = True

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self.normalized_shape)

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class BayesianGroupNorm(_BayesianNorm, nn.GroupNorm):
    """`nn.GroupNorm` under a perturbation."""

    plain = nn.GroupNorm

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class _BayesianInstanceNorm(_BayesianNorm, _InstanceNorm):
    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == self._get_no_batch_dim()  # type: ignore[no-any-return]

    def run(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        self._check_input_dim(x)
        if self.is_unbatched(x):
            return self.run(x.unsqueeze(0), weight, bias).squeeze(0)
        return F.instance_norm(
            x,
            self.running_mean,
            self.running_var,
            weight,
            bias,
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
        )


class BayesianInstanceNorm1d(_BayesianInstanceNorm, nn.InstanceNorm1d):
    """`nn.InstanceNorm1d` under a perturbation."""

    plain = nn.InstanceNorm1d


class BayesianInstanceNorm2d(_BayesianInstanceNorm, nn.InstanceNorm2d):
    """`nn.InstanceNorm2d` under a perturbation."""

    plain = nn.InstanceNorm2d


class BayesianInstanceNorm3d(_BayesianInstanceNorm, nn.InstanceNorm3d):
    """`nn.InstanceNorm3d` under a perturbation."""

    plain = nn.InstanceNorm3d


class _BayesianBatchNorm(_BayesianNorm, _BatchNorm):
    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        statistics = {name: t for name in STATISTICS if (t := getattr(layer, name)) is not None}
        return affine_site(layer, statistics=statistics)

    def run(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
    ) -> Tensor:
        self._check_input_dim(x)
        mean = self.running_mean if running_mean is None else running_mean
        var = self.running_var if running_var is None else running_var
        from_batch = self.training or mean is None
        return self._normalised(x, mean, var, weight, bias, from_batch, self._momentum())

    def prepare(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        return self.run(x) if p.statistics is None else self._by_member(x, p, rows)

    def _normalised(
        self, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, from_batch: bool, momentum: float
    ) -> Tensor:
        keeps = not self.training or self.track_running_stats
        mean, var = (mean, var) if keeps else (None, None)
        return F.batch_norm(x, mean, var, weight, bias, from_batch, momentum, self.eps)

    def _momentum(self) -> float:
        """How much of the running statistics this call replaces; counts the call."""
        if not (self.training and self.track_running_stats and self.num_batches_tracked is not None):
            return 0.0 if self.momentum is None else self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _by_member(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        """Each draw's rows by that draw's own statistics, which training updates."""
        self._check_input_dim(x)
        assert p.statistics is not None and p.component is not None
        if not self.training:
            return self._by_given_statistics(x, p, rows)
        statistics = {name: value.clone() for name, value in p.statistics.items()}
        y = self._members_apart(x, [statistics[name] for name in STATISTICS], p.size, rows)
        with torch.no_grad():
            for name, value in statistics.items():
                self._store(name, p.component, value)
        return y

    def _by_given_statistics(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        assert p.statistics is not None
        mean, var = (self.aligned(rows.spread(p.statistics[name]), x) for name in STATISTICS)
        return (x - mean) * torch.rsqrt(var + self.eps)

    def _members_apart(self, x: Tensor, statistics: list[Tensor], draws: int, rows: Rows) -> Tensor:
        momentum = self._momentum()
        if rows.batch % draws == 0 and rows.repeat == 1:  # members side by side as channels
            apart = x.reshape(x.shape[0] // draws, draws * x.shape[1], *x.shape[2:])
            mean, var = (value.view(-1) for value in statistics)
            return self._member(apart, mean, var, momentum).reshape(x.shape)
        mean, var = statistics
        parts = [self._member(part, mean[i], var[i], momentum) for i, part in enumerate(rows.apart(x, draws))]
        return rows.together(parts, draws)

    def _member(self, x: Tensor, mean: Tensor, var: Tensor, momentum: float) -> Tensor:
        """One value of a channel has no variance, so a member with a single one keeps to its running statistics."""
        has_variance = x.numel() > x.shape[1]
        return F.batch_norm(x, mean, var, None, None, has_variance, momentum, self.eps)

    def _store(self, name: str, component: Tensor, values: Tensor) -> None:
        """Put back the members' statistics: component 0 is the layer's own buffer."""
        first, others = getattr(self, name), getattr(self.posterior, name)
        stack = torch.cat([first.unsqueeze(0), others]).index_copy(0, component, values)
        first.copy_(stack[0])
        others.copy_(stack[1:])


class BayesianBatchNorm1d(_BayesianBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` under a perturbation."""

    plain = nn.BatchNorm1d


class BayesianBatchNorm2d(_BayesianBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` under a perturbation."""

    plain = nn.BatchNorm2d


class BayesianBatchNorm3d(_BayesianBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` under a perturbation."""

    plain = nn.BatchNorm3d


class BayesianSyncBatchNorm(_BayesianBatchNorm, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` under a perturbation; the statistics of all processes are one as ever."""

    plain = nn.SyncBatchNorm

    def run(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
    ) -> Tensor:
        other = With(self, weight=weight, bias=bias)
        if running_mean is not None:
            other.__dict__.update(running_mean=running_mean, running_var=running_var)
        y: Tensor = nn.SyncBatchNorm.forward(other, x)  # type: ignore[arg-type]
        return y

    def _by_member(self, x: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        if self.training and torch.distributed.is_available() and torch.distributed.is_initialized():
            raise BayesifyError(
                f"layer {self.site_name!r}: members with their own statistics can't be synchronised over processes; "
                "use BatchNorm for Ensemble, or leave the layer out"
            )
        return super()._by_member(x, p, rows)


def refuse_batch_statistics(modules: Mapping[str, nn.Module]) -> None:
    """A batch norm without running statistics has no function of one row."""
    for name, module in modules.items():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise BayesifyError(
                f"layer {name!r} is a batch norm without running statistics, so what it says of a row depends on the "
                "other rows of the batch; use track_running_stats=True and by.recalibrate(model, loader)"
            )
