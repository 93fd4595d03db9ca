"""Attention: the projections of queries, keys, values and outputs are kernels, each with a posterior of its own.

Where one draw serves the batch, it is folded into the weights and the ordinary layer runs. Draws per row are applied to
what each projection reads and gives, with the ordinary attention between them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..errors import BayesifyError
from ..family import Site
from .base import BayesianLayer, With, plain_type
from .hooked import tensor_of
from .kernel import Kernel
from .linear import LinearMap

PROJECTIONS = ("q", "k", "v", "out")


class Projection(LinearMap):
    """One of an attention's projections and its bias, which may be parts of the packed `in_proj` tensors."""

    def __init__(self, layer: nn.Module, which: str) -> None:
        self.layer, self.which, self.suffix = layer, which, f"_{which}"
        self.weight, self.bias = _tensors(layer, which)
        if isinstance(layer, BayesianLayer):
            self.family, self.scope, self.posterior = layer.family, layer.scope, layer.posterior
            self.site_name = f"{layer.site_name}.{which}_proj"

    def plain_site(self) -> Site:
        out_size, in_size = self.weight.shape
        base = {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}
        kind = plain_type(self.layer).__name__
        return Site(base, in_size=in_size, out_size=out_size, is_matrix=True, reset=self._fresh, kind=kind)

    def _fresh(self) -> dict[str, Tensor]:
        other = copy.deepcopy(self.layer)
        other.out_proj.reset_parameters()  # type: ignore[union-attr, operator]
        other._reset_parameters()  # type: ignore[operator]
        return {name: t.detach() for name, t in Projection(other, self.which).plain_site().base.items()}


class BayesianMultiheadAttention(BayesianLayer, nn.MultiheadAttention):
    """`nn.MultiheadAttention` under a perturbation of each projection; `bias_k` and `bias_v` stay shared."""

    plain = nn.MultiheadAttention
    role = "attention"
    parts = ("out_proj",)

    @classmethod
    def sites_of(cls, layer: nn.Module) -> dict[str, Site]:
        return {f"_{which}": Projection(layer, which).plain_site() for which in PROJECTIONS}

    @classmethod
    def refusal(cls, layer: nn.Module) -> str | None:
        assert isinstance(layer, nn.MultiheadAttention)
        if type(layer.out_proj) not in (NonDynamicallyQuantizableLinear, nn.Linear):
            return f"its out_proj is a {type(layer.out_proj).__name__}, whose weight it reads without calling it"
        separate = [f"{which}_proj_weight" for which in "qkv"]
        names = {layer: ["in_proj_weight"] if layer._qkv_same_embed_dim else separate, layer.out_proj: ["weight"]}
        replaced = [name for module in names for name in names[module] if name not in module._parameters]
        if replaced:
            return f"its {replaced[0]} is not a parameter but computed (weight_norm or the like); remove that first"
        return None

    def kernels(self) -> list[Projection]:
        return [Projection(self, which) for which in PROJECTIONS]

    def assembled(self, parts: Sequence[tuple[Kernel, dict[str, Tensor]]]) -> dict[str, Tensor]:
        packed = ("weight", "bias") if self._qkv_same_embed_dim else ("bias",)
        *inner, (_, out) = parts
        tensors = {f"out_proj.{name}": value for name, value in out.items()}
        for name in packed:
            if any(name in part for _, part in inner):
                each = [part.get(name, getattr(kernel, name)) for kernel, part in inner]
                tensors[f"in_proj_{name}"] = torch.cat(each, -2 if name == "weight" else -1)
        if not self._qkv_same_embed_dim:
            each_weight = zip(PROJECTIONS, inner, strict=False)
            tensors |= {f"{which}_proj_weight": part["weight"] for which, (_, part) in each_weight if "weight" in part}
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
        """One draw for the whole batch runs as the ordinary layer; several are applied row by row."""
        inputs = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if all(kernel.perturbation().is_shared for kernel in self.kernels()) or self.is_unbatched(query):
            return self.plain.forward(self._folded(), *inputs)  # type: ignore[arg-type]
        if any(x.is_nested for x in (query, key, value)):
            raise BayesifyError(
                f"layer {self.site_name!r} got a nested tensor, whose rows can't have a draw each; give a padded one "
                "and key_padding_mask"
            )
        F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)  # type: ignore[attr-defined]
        if query.numel() == 0:
            return self.plain.forward(self, *inputs)
        return self._by_row(*inputs)

    def _folded(self) -> With:
        """The ordinary layer under the first row's draw."""
        tensors = self.of_first_row(self.draws_of_call())
        out = {name: tensors.pop(f"out_proj.{name}", None) for name in ("weight", "bias")}
        return With(self, out_proj=With(self.out_proj, **out), **tensors)

    def _by_row(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self._rows_first(x) for x in (query, key, value))
        rows = self.follow(q.shape[0], self.batch, self.row_dim(query))
        of = {kernel.which: kernel.on(rows) for kernel in self.kernels()}
        k, v = self._with_extra_tokens(of["k"](k), of["v"](v))
        only_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if only_causal else self._mask(attn_mask, key_padding_mask, k)
        y, weights = self._attend(of["q"](q), k, v, mask, only_causal, need_weights)
        y = of["out"](y)
        y = y if self.batch_first else y.transpose(0, 1).contiguous()
        return y, weights.mean(1) if weights is not None and average_attn_weights else weights

    def _rows_first(self, x: Tensor) -> Tensor:
        """(rows, tokens, features); one row for all becomes one for each."""
        x = x.transpose(0, self.row_dim(x))
        return x.expand(self.batch, -1, -1) if x.shape[0] == 1 else x

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
        each = [_additive(mask, k.dtype) for mask in each]
        each = [F.pad(mask, (0, k.shape[1] - mask.shape[-1])) for mask in each]
        return sum(each[1:], each[0]) if each else None

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


def _tensors(layer: nn.Module, which: str) -> tuple[Tensor, Tensor | None]:
    """A projection's weight and bias."""
    assert isinstance(layer, nn.MultiheadAttention)
    if which == "out":
        return tensor_of(layer.out_proj, "weight"), tensor_of(layer.out_proj, "bias")
    part = slice((at := PROJECTIONS.index(which)) * layer.embed_dim, (at + 1) * layer.embed_dim)
    packed, bias = tensor_of(layer, "in_proj_weight"), tensor_of(layer, "in_proj_bias")
    weight = packed[part] if layer._qkv_same_embed_dim else tensor_of(layer, f"{which}_proj_weight")
    return weight, None if bias is None else bias[part]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added to scores; True in one of truth values keeps out."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
