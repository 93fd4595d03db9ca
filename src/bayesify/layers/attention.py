"""Attention: the projections of queries, keys, values and outputs each have a posterior of their own.

Where one draw serves the batch, it is folded into the weights and the ordinary layer runs. Draws per row are applied to
what each projection reads and gives, with the ordinary attention between them.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bayesify.errors import BayesifyError
from bayesify.layers.base import BayesianLayer, Tensors, affine_site, computed_tensor, own_tensors, stand_in
from bayesify.layers.linear import LINEAR, draws_of_call
from bayesify.methods.base import Site

PROJECTIONS = ("q", "k", "v", "out")


class BayesianMultiheadAttention(BayesianLayer, nn.MultiheadAttention):
    """`nn.MultiheadAttention` under a perturbation of each projection; `bias_k` and `bias_v` stay shared."""

    plain = nn.MultiheadAttention
    role = "attention"
    operation = LINEAR
    parts = ("out_proj",)

    @classmethod
    def sites_of(cls, layer: nn.Module) -> dict[str, Site]:
        tensors = {f"_{which}": partial(_tensors, which) for which in PROJECTIONS}
        return {suffix: affine_site(layer, tensors[suffix], suffix, is_matrix=True) for suffix in tensors}

    @classmethod
    def refusal(cls, layer: nn.Module) -> str | None:
        assert isinstance(layer, nn.MultiheadAttention)
        if type(layer.out_proj) not in (NonDynamicallyQuantizableLinear, nn.Linear):
            return f"its out_proj is a {type(layer.out_proj).__name__}, whose weight it reads without calling it"
        separate = [f"{which}_proj_weight" for which in "qkv"]
        names = ["in_proj_weight"] if layer._qkv_same_embed_dim else separate
        return computed_tensor(layer, names) or computed_tensor(layer.out_proj, ["weight"])

    def assemble(self, values: Mapping[str, Tensors]) -> Tensors:
        """The packed tensors are made of the projections'; those that no draw changes are the layer's own."""
        parts = {suffix.removeprefix("_"): part for suffix, part in values.items()}
        tensors = {f"out_proj.{name}": value for name, value in parts.pop("out").items()}
        if not self._qkv_same_embed_dim:
            tensors |= {f"{which}_proj_weight": part["weight"] for which, part in parts.items() if "weight" in part}
        for name, dims in (("weight", 2), ("bias", 1)) if self._qkv_same_embed_dim else (("bias", 1),):
            if any(name in part for part in parts.values()):
                each = [part[name] if name in part else _tensors(which, self)[name] for which, part in parts.items()]
                leading = torch.broadcast_shapes(*(t.shape[:-dims] for t in each))
                tensors[f"in_proj_{name}"] = torch.cat([t.expand(*leading, *t.shape[-dims:]) for t in each], -dims)
        return tensors

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 2

    def row_dim(self, x: Tensor) -> int:
        return 0 if self.batch_first else 1

    def as_tensor(self, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        """Its three inputs side by side, for each row."""
        if self.is_unbatched(query):
            return query
        each = [x.transpose(0, self.row_dim(x)).flatten(1) for x in (query, key, value)]
        return torch.cat(each, 1).unsqueeze(2).transpose(0, self.row_dim(query))

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        weights = draws_of_call(self, unbatched=self.is_unbatched(query))
        if isinstance(weights, dict):
            out = {name: weights.pop(f"out_proj.{name}", None) for name in ("weight", "bias")}
            out_proj = stand_in(self.out_proj, type(self.out_proj), **out)
            return self.plain.forward(stand_in(self, self.plain, out_proj=out_proj, **weights), *inputs)
        if any(x.is_nested for x in (query, key, value)):
            raise BayesifyError(
                f"layer {self.site_name!r} got a nested tensor, whose rows can't have a draw each; use a padded one "
                "and key_padding_mask"
            )
        # What the plain layer checks first, too; torch has no public name for it.
        F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)  # type: ignore[attr-defined]
        if query.numel() == 0:
            return self.plain.forward(self, *inputs)
        (q, rows), (k, _), (v, _) = (self.rows_of(x, self.row_dim(x)) for x in (query, key, value))
        maps = weights(rows)
        k, v = self._with_extra_tokens(maps["_k"](k), maps["_v"](v))
        only_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if only_causal else self._mask(attn_mask, key_padding_mask, k)
        y, attention = self._attend(maps["_q"](q), k, v, mask, only_causal, need_weights)
        y = maps["_out"](y)
        y = y if self.batch_first else y.transpose(0, 1).contiguous()
        return y, attention.mean(1) if attention is not None and average_attn_weights else attention

    def _with_extra_tokens(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with the learned token and the zero token that the layer may add."""
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1)], 1)
        return (F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))) if self.add_zero_attn else (k, v)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, k: Tensor) -> Tensor | None:
        """Both masks as one (rows, heads, queries, keys) to be added, where dimensions may be 1 for all."""
        each = []
        if attn_mask is not None:
            each.append(attn_mask.reshape(-1, self.num_heads if attn_mask.dim() == 3 else 1, *attn_mask.shape[-2:]))
        if key_padding_mask is not None:
            each.append(key_padding_mask[:, None, None])
        total: Tensor | None = None
        for mask in each:
            if mask.dtype == torch.bool:  # True keeps out
                mask = torch.zeros_like(mask, dtype=k.dtype).masked_fill_(mask, float("-inf"))
            padded = F.pad(mask.to(k.dtype), (0, k.shape[1] - mask.shape[-1]))
            total = padded if total is None else total + padded
        return total

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """softmax(q kᵀ / √d + mask) v in each head, and the weights where they are needed."""
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q * self.head_dim**-0.5 @ k.mT
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        return y.transpose(1, 2).flatten(2), weights


def _tensors(which: str, layer: nn.Module) -> Tensors:
    """A projection's weight and, if there is one, its bias, which may be rows of the packed `in_proj` tensors."""
    assert isinstance(layer, nn.MultiheadAttention)
    if which == "out":
        return own_tensors(layer.out_proj)
    packed, start = layer._qkv_same_embed_dim, PROJECTIONS.index(which) * layer.embed_dim
    found = own_tensors(layer, ("in_proj_weight" if packed else f"{which}_proj_weight", "in_proj_bias"))
    parts = {"weight", "bias"} if packed else {"bias"}
    return {name: t[start : start + layer.embed_dim] if name in parts else t for name, t in found.items()}
