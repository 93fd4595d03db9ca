"""Embeddings: a linear layer of one-hot rows, of which only looked-up entries are drawn where rows have their own."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.layers.base import BayesianLayer, Operation, Tensors, affine_site
from bayesify.layers.rows import Rows
from bayesify.methods.base import Draws, Perturbation, Site


class BayesianEmbedding(Operation, BayesianLayer, nn.Embedding):
    """`nn.Embedding` under a perturbation; the padding entry is never perturbed."""

    plain = nn.Embedding
    role = "embedding"
    features_last = True
    min_dims = 1
    inputs_last = False

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

    def folded(self, base: Mapping[str, Tensor], p: Perturbation) -> Tensors:
        """As for every operation, except for the padding entry."""
        values = super().folded(base, p)
        if self.padding_idx is not None and "weight" in values:
            entry = torch.arange(self.num_embeddings, device=self.weight.device) == self.padding_idx
            values["weight"] = torch.where(entry.unsqueeze(1), self.weight.detach(), values["weight"])
        return values

    def forward(self, input: Tensor) -> Tensor:
        """Only looked-up entries are drawn if the method allows it, otherwise the weight, as in every layer."""
        per_row = self.method.draws_per == "row" and self.batch > 1 and not self.is_unbatched(input)
        is_given = self.site_name in self.scope.call(self.site_name).drawn
        if is_given or not (per_row and self.method.factorised and input.numel()):
            return super().forward(input)
        dim = self.row_dim(input)
        ids, rows = self.rows_of(input, dim)
        y = self._unperturbed_padding(self._drawn_where_needed(ids, rows), ids)
        return y.transpose(0, dim)

    def by_row(self, x: Tensor, base: Mapping[str, Tensor], p: Perturbation, rows: Rows) -> Tensor:
        """The looked-up vectors, each by its row's draw."""
        assert p.plus is None and p.variance is None  # methods that have them are factorised: see `forward`
        return self._unperturbed_padding(self._term(x, base["weight"], p, rows), x)

    def _term(self, x: Tensor, weight: Tensor, p: Perturbation, rows: Rows) -> Tensor:
        if p.weight is None or len(p.weight) == 1:
            y = self.run(x, weight if p.weight is None else p.weight.squeeze(0).to(weight.dtype))
        else:
            draw = rows.owner(x.device) % p.size
            place = x + (draw * self.num_embeddings).reshape(-1, *[1] * (x.dim() - 1))
            y = F.embedding(place, p.weight.flatten(0, 1).to(weight.dtype))
        if p.in_scale is not None:
            of_tokens = rows.select(p.in_scale).gather(1, x.reshape(x.shape[0], -1)).reshape(x.shape)
            y = y * of_tokens.unsqueeze(-1).to(y.dtype)
        return y if p.out_scale is None else y * rows.spread(p.out_scale, y, True)

    def _unperturbed_padding(self, y: Tensor, ids: Tensor) -> Tensor:
        if self.padding_idx is None:
            return y
        entry = self.weight[self.padding_idx].detach()
        return torch.where((ids == self.padding_idx).unsqueeze(-1), entry, y)

    def _drawn_where_needed(self, ids: Tensor, rows: Rows) -> Tensor:
        """One draw of the table of all looked-up entries, in which an entry that two rows look up stands twice.

        Entries that occur twice in one row are the same entry, so they share its draw.
        """
        by_row = rows.split_repeats(ids).flatten(1)  # (batch, tokens)
        site, flat = self.site_of(self), by_row.flatten()
        posterior = {
            name: tensor.index_select(tensor.dim() - 2, flat) if name.startswith("weight") else tensor
            for name, tensor in site.posterior.items()
        }
        entries = replace(site, base={"weight": site.base["weight"].index_select(0, flat)}, posterior=posterior)
        call = self.scope.call(self.site_name)
        draws = call.balance(Draws(call.position[:1].to(site.device)), len(call.position) // call.samples)
        weight = self.method.draw(entries, draws).weight
        assert weight is not None
        drawn = weight.to(self.weight.dtype).reshape(*by_row.shape, self.embedding_dim)
        first = _first_places(by_row).unsqueeze(-1).expand_as(drawn)
        return rows.merge_repeats(drawn.gather(1, first).reshape(*ids.shape, self.embedding_dim))


def _first_places(ids: Tensor) -> Tensor:
    """For each entry of (rows, tokens) the place of the first one in its row that equals it."""
    ordered, order = ids.sort(dim=1, stable=True)
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.where(ordered == ordered.roll(1, 1), 0, places).cummax(1).values
    return torch.zeros_like(order).scatter(1, order, order.gather(1, starts))
