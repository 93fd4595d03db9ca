"""Norm layers: the usual normalisation, then an affine map that may differ by row."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from bayesify.errors import BayesifyError
from bayesify.layers.base import BayesianLayer, Operation, affine_site, layer_type
from bayesify.layers.rows import Rows
from bayesify.methods.base import Perturbation, Role, Site

STATISTICS = ("running_mean", "running_var")


class Normalisation(Operation):
    """h ∘ weight + bias, where h is the normalised input.

    All draws of a batch norm have the same statistics, unless a method gives each member its own.
    """

    role: ClassVar[Role] = "norm"

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        names = STATISTICS if isinstance(layer, _BatchNorm) and layer.running_mean is not None else ()
        return affine_site(layer, statistics={name: getattr(layer, name) for name in names})

    def is_unbatched(self, x: Tensor) -> bool:
        if isinstance(self, nn.LayerNorm):
            return x.dim() == len(self.normalized_shape)
        return isinstance(self, _InstanceNorm) and x.dim() == self._get_no_batch_dim()

    def by_row(self, x: Tensor, base: Mapping[str, Tensor], p: Perturbation, rows: Rows) -> Tensor:
        y = self.run(x) if p.statistics is None else self._by_statistics(x, p.statistics, p.component, rows)
        drawn = {"weight": p.weight, "bias": p.bias}
        weight, bias = (base[n].unsqueeze(0) if t is None and n in base else t for n, t in drawn.items())
        y = y if weight is None else y * rows.spread(weight, y, self.features_last)
        return y if bias is None else y + rows.spread(bias, y, self.features_last)

    def _by_statistics(
        self, x: Tensor, statistics: Mapping[str, Tensor], component: Tensor | None, rows: Rows
    ) -> Tensor:
        """A batch norm's input normalised by the statistics of each member, which training updates."""
        layer: Any = self
        layer._check_input_dim(x)
        if not layer.training:
            mean, var = (rows.spread(statistics[name], x, False) for name in STATISTICS)
            return (x - mean) * torch.rsqrt(var + layer.eps)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if isinstance(layer, nn.SyncBatchNorm) and distributed:
            raise BayesifyError(
                f"layer {layer.site_name!r}: members with their own statistics can't be synchronised over processes; "
                "use BatchNorm for Ensemble, or leave the layer out"
            )
        updated = {name: value.clone() for name, value in statistics.items()}
        y = self._by_member(x, updated["running_mean"], updated["running_var"], rows)
        assert component is not None
        with torch.no_grad():
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
            for name, values in updated.items():  # those of component 0 are the layer's own buffers
                first, others = getattr(layer, name), getattr(layer.posterior, name)
                stack = torch.cat([first.unsqueeze(0), others]).index_copy(0, component, values)
                first.copy_(stack[0])
                others.copy_(stack[1:])
        return y

    def _by_member(self, x: Tensor, mean: Tensor, var: Tensor, rows: Rows) -> Tensor:
        """Normalise each member's rows by their own statistics, and update its running statistics (G, C)."""
        members = len(mean)
        order = (rows.owner(x.device) % members).argsort(stable=True)
        sizes = [rows.repeat * len(range(member, rows.batch, members)) for member in range(members)]
        parts = zip(x.index_select(0, order).split(sizes), mean, var, strict=True)
        return torch.cat([self._member(*part) for part in parts]).index_select(0, order.argsort())

    def _member(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Normalise one member's rows; by its running statistics if a channel has one value, and so no variance."""
        calls: Tensor | None = self.num_batches_tracked  # type: ignore[attr-defined]
        calls = None if calls is None else calls.clone()  # one call of the layer counts once
        statistics = {"running_mean": mean, "running_var": var, "num_batches_tracked": calls}
        return self.run(x, training=x.numel() > x.shape[1], **statistics)


BayesianLayerNorm = layer_type(nn.LayerNorm, Normalisation, BayesianLayer, features_last=True)
BayesianGroupNorm = layer_type(nn.GroupNorm, Normalisation, BayesianLayer)
BayesianInstanceNorm1d = layer_type(nn.InstanceNorm1d, Normalisation, BayesianLayer)
BayesianInstanceNorm2d = layer_type(nn.InstanceNorm2d, Normalisation, BayesianLayer)
BayesianInstanceNorm3d = layer_type(nn.InstanceNorm3d, Normalisation, BayesianLayer)
BayesianBatchNorm1d = layer_type(nn.BatchNorm1d, Normalisation, BayesianLayer)
BayesianBatchNorm2d = layer_type(nn.BatchNorm2d, Normalisation, BayesianLayer)
BayesianBatchNorm3d = layer_type(nn.BatchNorm3d, Normalisation, BayesianLayer)
BayesianSyncBatchNorm = layer_type(nn.SyncBatchNorm, Normalisation, BayesianLayer)
