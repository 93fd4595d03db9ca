"""The blocks that networks are built of, as a table.

A block takes a signal of some kinds and returns a module and the next signal. It has no wrong options: what does not
fit, such as a kernel larger than its input, is made to fit. So every description is a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import foreign
import torch
from torch import nn

from fuzz import layers

WORDS = 7
"""The size of the vocabulary."""


@dataclass(frozen=True)
class Signal:
    """What flows between blocks: vectors (rows, D), sequences (rows, T, D) or (T, rows, D), maps (rows, C, …), ids."""

    kind: str
    shape: tuple[int, ...]
    batch_dim: int = 0

    @property
    def features(self) -> int:
        return self.shape[0] if self.kind == "maps" else self.shape[-1]

    @property
    def row_dim(self) -> int:
        return self.batch_dim if self.kind in ("sequence", "ids") else 0

    def resized(self, features: int) -> Signal:
        shape = (features, *self.shape[1:]) if self.kind == "maps" else (*self.shape[:-1], features)
        return replace(self, shape=shape)


Builder = Callable[..., tuple[nn.Module, Signal]]


@dataclass(frozen=True)
class Block:
    """A kind of block: the signals it takes, its options, each with its choices, the simplest first."""

    build: Builder
    kinds: tuple[str, ...]
    options: dict[str, Sequence[Any]]
    trained: bool
    mixes_rows: bool = False
    reads_weights: bool = False
    keeps_results: bool = False
    mixes_in_training: bool = False
    jumps: bool = False
    """Whether its output jumps where its input moves a little, so that rounding can be seen."""


BLOCKS: dict[str, Block] = {}


def block(*kinds: str, trained: bool = True, traits: Sequence[str] = (), **options: Any) -> Any:
    """Put a function into the table of blocks."""

    def enter(build: Builder) -> Builder:
        BLOCKS[build.__name__] = Block(build, kinds, options, trained, **dict.fromkeys(traits, True))
        return build

    return enter


SIZES, FLAGS = (3, 4, 1, 6), (True, False)
ALL = ("vector", "sequence", "maps")


# Layers.


@block("vector", "sequence", size=SIZES, bias=FLAGS)
def linear(signal: Signal, size: int, bias: bool) -> tuple[nn.Module, Signal]:
    return nn.Linear(signal.features, size, bias=bias), signal.resized(size)


@block("maps", size=SIZES, kernel=(1, 3, 2), stride=(1, 2), padding=(0, 1), grouped=(False, True), bias=FLAGS)
def conv(
    signal: Signal, size: int, kernel: int, stride: int, padding: int, grouped: bool, bias: bool
) -> tuple[nn.Module, Signal]:
    kernel = min(kernel, *signal.shape[1:])
    groups = signal.features if grouped else 1
    size = size * groups if grouped else size
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(signal.shape) - 2]
    layer = kind(signal.features, size, kernel, stride, min(padding, kernel - 1), groups=groups, bias=bias)
    return layer, _measured(layer, signal)


@block("maps", size=SIZES, kernel=(2, 1), stride=(1, 2), bias=FLAGS)
def transposed_conv(signal: Signal, size: int, kernel: int, stride: int, bias: bool) -> tuple[nn.Module, Signal]:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[len(signal.shape) - 2]
    layer = kind(signal.features, size, kernel, stride, bias=bias)
    return layer, _measured(layer, signal)


@block("ids", size=SIZES, padding=(None, 0), scaled=(False, True))
def embedding(signal: Signal, size: int, padding: int | None, scaled: bool) -> tuple[nn.Module, Signal]:
    kind = foreign.ScaledEmbedding if scaled else nn.Embedding
    return kind(WORDS, size, padding_idx=padding), Signal("sequence", (*signal.shape, size), signal.batch_dim)


@block("ids", size=SIZES)
def tied_embedding(signal: Signal, size: int) -> tuple[nn.Module, Signal]:
    return layers.TiedEmbedding(WORDS, size), Signal("sequence", (*signal.shape, WORDS), signal.batch_dim)


@block("vector", "maps", affine=FLAGS)
def batch_norm(signal: Signal, affine: bool) -> tuple[nn.Module, Signal]:
    dims = len(signal.shape) - (signal.kind == "maps")
    kind = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[max(dims, 1) - 1]
    return kind(signal.features, affine=affine), signal


@block("vector", "sequence", kind=("layer", "llama", "fused_rms", "act"))
def layer_norm(signal: Signal, kind: str) -> tuple[nn.Module, Signal]:
    if signal.features < 3:  # of two numbers it leaves but which is larger, the same for most rows
        return nn.Identity(), signal
    kinds = {"layer": nn.LayerNorm, "llama": foreign.LlamaNorm, "fused_rms": foreign.FusedRmsNorm}
    return kinds.get(kind, foreign.LayerNormAct)(signal.features), signal


@block("maps", kind=("group", "instance"), affine=FLAGS)
def map_norm(signal: Signal, kind: str, affine: bool) -> tuple[nn.Module, Signal]:
    if math.prod(signal.shape) < 3:  # as of layer norms; of single values torch itself refuses them
        return nn.Identity(), signal
    if kind == "group" or math.prod(signal.shape[1:]) == 1:
        return nn.GroupNorm(1, signal.features, affine=affine), signal
    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    return kinds[len(signal.shape) - 2](signal.features, affine=affine), signal


@block("sequence", kind=("LSTM", "GRU", "RNN"), size=(3, 1), depth=(1, 2), both_ways=(False, True))
def recurrent(signal: Signal, kind: str, size: int, depth: int, both_ways: bool) -> tuple[nn.Module, Signal]:
    first = signal.batch_dim == 0
    layer = getattr(nn, kind)(signal.features, size, depth, batch_first=first, bidirectional=both_ways)
    return layers.Recurrent(layer), signal.resized(size * (1 + both_ways))


@block("sequence", kind=("LSTMCell", "GRUCell", "RNNCell"), size=(3, 1))
def cell(signal: Signal, kind: str, size: int) -> tuple[nn.Module, Signal]:
    return layers.Cell(getattr(nn, kind)(signal.features, size), signal.batch_dim), signal.resized(size)


@block("sequence", heads=(1, 2), bias=FLAGS)
def attention(signal: Signal, heads: int, bias: bool) -> tuple[nn.Module, Signal]:
    heads = math.gcd(heads, signal.features)
    layer = nn.MultiheadAttention(signal.features, heads, bias=bias, batch_first=signal.batch_dim == 0)
    return layers.SelfAttention(layer), signal


@block("sequence", heads=(1, 2), norm_first=(False, True), dropout=(0.0, 0.3))
def transformer(signal: Signal, heads: int, norm_first: bool, dropout: float) -> tuple[nn.Module, Signal]:
    heads, first = math.gcd(heads, signal.features), signal.batch_dim == 0
    layer = nn.TransformerEncoderLayer(signal.features, heads, 5, 0.0, norm_first=norm_first, batch_first=first)
    layer.dropout1.p = dropout  # on its attention weights it stays 0: kept dropout refuses it there
    return layer, signal


@block("vector", "sequence", kind=("LeakyLinear", "PositiveLinear", "ReluLinear", "Conv1D", "CastLinear"), size=SIZES)
def third_party(signal: Signal, kind: str, size: int) -> tuple[nn.Module, Signal]:
    if kind == "Conv1D":
        return foreign.Conv1D(size, signal.features), signal.resized(size)
    return getattr(layers if hasattr(layers, kind) else foreign, kind)(signal.features, size), signal.resized(size)


@block("maps", kind=("ReluConv2d", "StdConv"), size=SIZES)
def third_party_conv(signal: Signal, kind: str, size: int) -> tuple[nn.Module, Signal]:
    if len(signal.shape) != 3:
        return nn.Identity(), signal
    kind = "ReluConv2d" if min(signal.shape[1:]) < 2 or signal.features == 1 else kind
    layer = getattr(layers if hasattr(layers, kind) else foreign, kind)(signal.features, size, 1)
    return layer, _measured(layer, signal)


# How layers are connected.


def _inner(signal: Signal, kind: str) -> nn.Module:
    """Layers that keep the signal's shape."""
    if signal.kind == "maps":
        layer = conv(signal, signal.features, 1, 1, 0, False, True)[0]
        return nn.Sequential(nn.GroupNorm(1, signal.features), layer) if math.prod(signal.shape) > 2 else layer
    if kind == "norm" and signal.features > 2:
        return nn.Sequential(nn.LayerNorm(signal.features), nn.Linear(signal.features, signal.features))
    return nn.Sequential(nn.Linear(signal.features, signal.features), nn.Tanh())


@block(*ALL, kind=("linear", "norm"))
def residual(signal: Signal, kind: str) -> tuple[nn.Module, Signal]:
    return layers.Residual(_inner(signal, kind)), signal


@block(*ALL, kind=("linear", "norm"))
def branches(signal: Signal, kind: str) -> tuple[nn.Module, Signal]:
    return layers.Branches(_inner(signal, kind), _inner(signal, kind)), signal


@block(*ALL, kind=("linear", "norm"))
def shared(signal: Signal, kind: str) -> tuple[nn.Module, Signal]:
    return layers.Twice(_inner(signal, kind)), signal


@block("vector", "sequence")
def tied(signal: Signal) -> tuple[nn.Module, Signal]:
    return layers.Tied(signal.features), signal


@block("sequence", one_row=FLAGS)
def positions(signal: Signal, one_row: bool) -> tuple[nn.Module, Signal]:
    return layers.Positions(signal.shape[0], signal.features, signal.batch_dim, one_row), signal


@block("sequence", size=SIZES)
def folded_tokens(signal: Signal, size: int) -> tuple[nn.Module, Signal]:
    return layers.Folded(nn.Linear(signal.features, size)), signal.resized(size)


@block("maps", size=SIZES)
def folded_windows(signal: Signal, size: int) -> tuple[nn.Module, Signal]:
    """Every channel is a map of its own for the same convolution."""
    shape = (1, *signal.shape[1:])
    inner = conv(Signal("maps", shape), size, 1, 1, 0, False, True)[0]
    steps = [layers.Reshape((signal.shape[0], *shape)), layers.Folded(inner)]
    return nn.Sequential(*steps, nn.Flatten(1, 2)), signal.resized(signal.features * size)


# Without weights.


@block(*ALL, kind=("Tanh", "ReLU", "GELU", "Softplus"), trained=False)
def activation(signal: Signal, kind: str) -> tuple[nn.Module, Signal]:
    return getattr(nn, kind)(), signal


@block(*ALL, p=(0.5, 0.2), channels=(False, True), trained=False)
def dropout(signal: Signal, p: float, channels: bool) -> tuple[nn.Module, Signal]:
    if channels and signal.kind == "maps":
        return (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)[len(signal.shape) - 2](p), signal
    return nn.Dropout(p), signal


@block(*ALL, factor=(1e-8, 1e-3, 30.0), trained=False)
def scale(signal: Signal, factor: float) -> tuple[nn.Module, Signal]:
    return layers.Scale(factor), signal


@block(*ALL, trained=False)
def counts(signal: Signal) -> tuple[nn.Module, Signal]:
    return layers.Counts(), signal


@block("maps", kind=("max", "average"), trained=False)
def map_pool(signal: Signal, kind: str) -> tuple[nn.Module, Signal]:
    dims, kernel = len(signal.shape) - 1, min(2, *signal.shape[1:])
    pool = getattr(nn, f"{'Max' if kind == 'max' else 'Avg'}Pool{dims}d")(kernel)
    return pool, _measured(pool, signal)


@block("maps", "sequence", how=("mean", "max", "last"), trained=False)
def pool(signal: Signal, how: str) -> tuple[nn.Module, Signal]:
    if signal.kind == "maps":
        return nn.Flatten(), Signal("vector", (math.prod(signal.shape),), signal.batch_dim)
    return layers.Pool(1 - signal.batch_dim, how), Signal("vector", (signal.features,), signal.batch_dim)


@block("vector", trained=False)
def as_maps(signal: Signal) -> tuple[nn.Module, Signal]:
    shape = (2, signal.features // 2, 1) if signal.features % 2 == 0 else (1, signal.features, 1)
    return layers.Reshape(shape), Signal("maps", shape, signal.batch_dim)


@block("vector", "maps", trained=False)
def as_sequence(signal: Signal) -> tuple[nn.Module, Signal]:
    """Channels or single features become tokens."""
    shape = (signal.shape[0], math.prod(signal.shape[1:]))
    order = (1, 0, 2) if signal.batch_dim else None
    return layers.Reshape(shape, order), Signal("sequence", shape, signal.batch_dim)


# What is computed in one mode only.


MODES = ("training", "evaluation")


@block(*ALL, mode=MODES, kind=("linear", "norm"))
def in_one_mode(signal: Signal, mode: str, kind: str) -> tuple[nn.Module, Signal]:
    return layers.InOneMode(_inner(signal, kind), mode), signal


@block("vector", "sequence", how=("next row", "views"), traits=["mixes_in_training"])
def mixes_in_training(signal: Signal, how: str) -> tuple[nn.Module, Signal]:
    return layers.MixesInTraining(signal.features, how, signal.row_dim), signal


@block("vector", "sequence", mode=MODES, traits=["reads_weights"])
def reads_in_one_mode(signal: Signal, mode: str) -> tuple[nn.Module, Signal]:
    return layers.ReadsInOneMode(signal.features, mode), signal


@block(*ALL, kind=("fixed", "random"), trained=False)
def noise(signal: Signal, kind: str) -> tuple[nn.Module, Signal]:
    return layers.Noise(kind), signal


# Networks that are easy to get wrong.


@block("vector", how=("rows", "mask", "dense"), traits=["jumps"])
def experts(signal: Signal, how: str) -> tuple[nn.Module, Signal]:
    return layers.Experts(signal.features, how), signal


@block("vector", traits=["jumps"])
def unique(signal: Signal) -> tuple[nn.Module, Signal]:
    return layers.Unique(signal.features), signal


@block("vector", traits=["jumps"])
def halts(signal: Signal) -> tuple[nn.Module, Signal]:
    return layers.Halts(signal.features), signal


@block("vector", "sequence")
def through_numpy(signal: Signal) -> tuple[nn.Module, Signal]:
    return layers.ThroughNumpy(signal.features), signal


@block("vector", "sequence", where=("attribute", "buffer", "dict", "object"), traits=["reads_weights", "keeps_results"])
def cached(signal: Signal, where: str) -> tuple[nn.Module, Signal]:
    return layers.Cached(signal.features, where), signal


@block("vector", "sequence", classes=(3, 5), keeps=FLAGS, traits=["keeps_results"])
def class_embeddings(signal: Signal, classes: int, keeps: bool) -> tuple[nn.Module, Signal]:
    return layers.ClassEmbeddings(signal.features, classes, keeps), signal.resized(classes)


@block("vector", "sequence", traits=["reads_weights"])
def reads_weight(signal: Signal) -> tuple[nn.Module, Signal]:
    return layers.ReadsWeight(signal.features), signal


@block(*ALL, trained=False)
def flag(signal: Signal) -> tuple[nn.Module, Signal]:
    return layers.Flag(mixes=False), signal


@block(*ALL, trained=False, traits=["mixes_rows"])
def mixing_flag(signal: Signal) -> tuple[nn.Module, Signal]:
    return layers.Flag(mixes=True), signal


@block(*ALL, how=("mean", "roll", "above"), trained=False, traits=["mixes_rows"])
def mixes_rows(signal: Signal, how: str) -> tuple[nn.Module, Signal]:
    return layers.MixesRows(how, signal.row_dim), signal


def _measured(layer: nn.Module, signal: Signal) -> Signal:
    """The signal after a layer on maps, from one call."""
    return replace(signal, shape=tuple(layer(torch.zeros(2, *signal.shape)).shape[1:]))
