"""Embeddings: a linear layer of one-hot rows, drawn per occurrence and never as a table per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..family import Elementwise, Perturbation, Site
from .base import BayesianLayer, affine_site
from .rows import Rows


class BayesianEmbedding(BayesianLayer, nn.Embedding):
    """`nn.Embedding` under a perturbation; the padding entry is never perturbed."""

    plain = nn.Embedding
    role = "embedding"
    features_last = True
    least_dims = 1

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        assert isinstance(layer, nn.Embedding)
        return affine_site(layer, in_size=layer.num_embeddings, out_size=layer.embedding_dim)

    @classmethod
    def refusal(cls, layer: nn.Module) -> str | None:
        if layer.sparse:
            return "an Embedding with sparse=True has gradients that a posterior can't share; use sparse=False"
        if layer.max_norm is not None:
            return "an Embedding with max_norm changes its weight when called; use max_norm=None"
        return None

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 0

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.embedding(x, weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, False)

    def fold(self, weight: Tensor, in_scale: Tensor | None, out_scale: Tensor | None) -> Tensor:
        if in_scale is not None:
            weight = weight * in_scale.unsqueeze(-1)
        return weight if out_scale is None else weight * out_scale.unsqueeze(-2)

    def folded(self, perturbation: Perturbation, draw: int = 0) -> dict[str, Tensor]:
        """As every layer's, but for the padding entry."""
        return self._padded(super().folded(perturbation, draw))

    def folded_each(self, perturbation: Perturbation) -> dict[str, Tensor]:
        return self._padded(super().folded_each(perturbation))

    def _padded(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.padding_idx is not None and "weight" in values:
            entry = torch.arange(self.num_embeddings, device=self.weight.device) == self.padding_idx
            values["weight"] = torch.where(entry.unsqueeze(1), self.weight.detach(), values["weight"])
        return values

    def settled(self, p: Perturbation) -> Perturbation:
        """A weight for each row is drawn where it is looked up."""
        if p.size > 1 and isinstance(p.weight, Elementwise):
            return replace(super().settled(replace(p, weight=None)), weight=p.weight)
        return super().settled(p)

    def squared(self, h: Tensor) -> Tensor:
        return h

    def term(self, h: Tensor, p: Perturbation, rows: Rows, base: Mapping[str, Tensor]) -> Tensor:
        """The looked-up vectors, each by its row's draw."""
        y = self._looked_up(h, p, rows)
        if p.in_scale is not None:
            assert isinstance(p.in_scale, Tensor)
            of_tokens = rows.spread(p.in_scale).gather(1, h.reshape(h.shape[0], -1)).reshape(h.shape)
            y = y * of_tokens.unsqueeze(-1).to(y.dtype)
        if p.out_scale is not None:
            y = y * self.aligned(rows.spread(p.out_scale), y)
        if self.padding_idx is None:
            return y
        unchanged = self.weight[self.padding_idx].detach() if base else y.new_zeros(())
        return torch.where((h == self.padding_idx).unsqueeze(-1), unchanged, y)

    def _looked_up(self, ids: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        if isinstance(p.weight, Elementwise):
            return self._drawn_where_needed(ids, p.weight, rows)
        if p.weight is None or p.weight.shape[0] == 1:
            return self.run(ids, self.weight if p.weight is None else p.weight[0].to(self.weight.dtype))
        owner = rows.owner(ids.shape[0], ids.device)
        draw = owner % p.size if p.choice is None else p.choice[owner]
        place = ids + (draw * self.num_embeddings).reshape(-1, *[1] * (ids.dim() - 1))
        return F.embedding(place, p.weight.flatten(0, 1).to(self.weight.dtype))

    def _drawn_where_needed(self, ids: Tensor, weight: Elementwise, rows: Rows) -> Tensor:
        shape = (rows.repeat, rows.batch, -1) if rows.tiled else (rows.batch, rows.repeat, -1)
        by_row = ids.reshape(shape)
        by_row = by_row.transpose(0, 1) if rows.tiled else by_row
        drawn = weight.at(by_row.flatten(1), 2).to(self.weight.dtype)
        drawn = drawn.reshape(*by_row.shape, self.embedding_dim)
        drawn = drawn.transpose(0, 1) if rows.tiled else drawn
        return drawn.reshape(*ids.shape, self.embedding_dim)
