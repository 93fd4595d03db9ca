"""What a layer of an unknown type computes, found by running a copy of it on a few numbers."""

import copy
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from bayesify.layers.base import BayesianLayer, Posterior
from bayesify.layers.foreign.third_party import Traits, generated_type
from bayesify.layers.rows import Rows
from bayesify.methods.base import Perturbation

ROWS = 2
TOLERANCE = 1e-3
"""Relative to the largest output; the trial's factors change outputs by half."""
ROUNDING = 1e-5
"""Relative to the largest output, where the same numbers are computed twice."""
MAGNITUDES = (1.0, 0.05, 20.0)
"""Of weights and factors, as a layer may clamp what it computes."""


@torch.no_grad()
def traits_of(layer: nn.Module, known: type[BayesianLayer] | None) -> Traits | str:
    """The traits of a layer, or why it can't be Bayesian; `known` is the supported layer that it inherits from."""
    kind = type(layer)
    if known is not None and known.role in ("recurrent", "attention", "dropout"):
        return f"{kind.__name__} is a subclass of {known.plain.__name__} that computes something else"
    if any(True for child in layer.children() for _ in child.parameters()):
        names = ", ".join(name for name, p in layer._parameters.items() if p is not None)
        return f"{names}: parameters of a module that contains other layers, so shared by all draws"
    needed = [p for p in inspect.signature(kind.forward).parameters.values() if p.default is p.empty and p.kind < 2]
    if len(needed) != 2:
        return f"{kind.__name__}.forward takes {len(needed) - 1} inputs, but rows can be followed through one only"
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)  # alone: the states of others are not given back
        try:
            module = _copy(layer)
        except Exception as error:  # whatever a third-party module raises when it is copied
            short = str(error).split("\n")[0][:80]
            return f"{kind.__name__} could not be copied for a trial ({short})"
        return _Trial(module, known).traits()


def _copy(layer: nn.Module) -> nn.Module:
    """A copy on the CPU in float32, with values for which every parameter matters."""
    on_meta = any(p.is_meta for p in layer.parameters())
    module = copy.deepcopy(layer)
    module = (module.to_empty(device="cpu") if on_meta else module.cpu()).float().eval()
    for tensor in module.buffers() if on_meta else ():
        tensor.fill_(1)
    for p in module.parameters():
        p.uniform_(0.5, 1.5)
    return module


class _Trial:
    """A copy of a layer, and what it computes for a few numbers."""

    def __init__(self, module: nn.Module, known: type[BayesianLayer] | None) -> None:
        self.module, self.known = module, known
        own = {name: p for name, p in module._parameters.items() if p is not None}
        self.weight, self.bias = "weight" if "weight" in own else next(iter(own)), "bias" if "bias" in own else None
        self.parameter = own[self.weight]

    def traits(self) -> Traits | str:
        kind, known = type(self.module).__name__, self.known
        x, features_last = next((each for each in self._inputs() if self._has_rows(each[0])), (None, True))
        if x is None:
            return f"{kind} accepted no input of a trial, or its rows depend on each other"
        traits = Traits(known.role if known else "custom", self.weight, self.bias, None, features_last)
        if not self._depends_on_weight(x):
            return f"{kind}: its output does not depend on its {self.weight}"
        if known is not None and issubclass(known, _BatchNorm):
            fits = self._agrees(traits, x) and self._agrees(traits, x, "weight", "bias")
            return traits if fits else f"{kind} is a batch norm that computes something else before or inside of it"
        if self._mixes_rows_in_training(x):
            return f"{kind}: in training a row's output depends on the other rows"
        if known is None:
            traits = self._of_unknown(traits, x)
        elif known.role in ("linear", "conv"):
            scales = self._agrees(replace(traits, scales=True), x, "in_scale", "out_scale")
            traits = replace(traits, scales=scales)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return replace(traits, vmaps=self._agrees(replace(traits, scales=False, vmaps=True), x, "weight"))

    def output(self, x: Tensor) -> Tensor:
        return cast(Tensor, type(self.module).forward(self.module, x.clone()))

    def _inputs(self) -> Iterator[tuple[Tensor, bool]]:
        """Inputs of the shapes that a layer with such a weight may take, and whether their features are last."""
        module, shape = self.module, tuple(self.parameter.shape)
        if isinstance(module, nn.Embedding):
            yield torch.randint(module.num_embeddings, (ROWS, 3)), True
        if isinstance(module, _ConvNd):
            each = zip(module.kernel_size, module.dilation, module.stride, strict=True)
            yield torch.randn(ROWS, module.in_channels, *(d * (k - 1) + 1 + s for k, d, s in each)), False
        for size in dict.fromkeys(reversed(shape or (3,))):
            if self.known is None or self.known.features_last:
                yield from ((torch.randn(ROWS, *dims), True) for dims in ((3, size), (size,), (3, 4, size)))
            yield from ((torch.randn(ROWS, size, *[4] * dims), False) for dims in (2, 1, 3, 0))
        yield from ((torch.randn(ROWS, *shape[first:]), True) for first in range(len(shape)))

    def _has_rows(self, x: Tensor) -> bool:
        """Whether the layer takes an input, and its rows are independent of each other."""
        try:
            y, apart = self.output(x), torch.cat([self.output(row) for row in x.split(1)])
        except Exception:  # the layer takes no such input
            return False
        is_batch = isinstance(y, Tensor) and y.dim() and y.shape[0] == ROWS and bool(y.isfinite().all())
        return bool(is_batch and _close(apart, y, ROUNDING))

    def _depends_on_weight(self, x: Tensor) -> bool:
        other = _Trial(copy.deepcopy(self.module), self.known)
        other.parameter.uniform_(0.5, 1.5)
        return not _close(self.output(x), other.output(x))

    def _mixes_rows_in_training(self, x: Tensor) -> bool:
        """Whether rows depend on each other in training; undetectable, and so False, if it is random then."""
        trained = _Trial(copy.deepcopy(self.module).train(), self.known)
        try:
            first, second = trained.output(x), trained.output(x)
            apart = torch.cat([trained.output(row) for row in x.split(1)])
            return _close(first, second, ROUNDING) and not _close(first, apart, ROUNDING)
        except Exception:  # such as a norm that refuses a single row
            return True

    def _of_unknown(self, traits: Traits, x: Tensor) -> Traits:
        """Those of a linear layer, if factors on its matrix, (out, in) or (in, out), scale inputs and outputs."""
        for axis in (1, 0) if self.parameter.dim() == 2 else ():
            linear = replace(traits, role="linear", in_axis=axis, features_last=True, scales=True)
            if self._agrees(linear, x, "in_scale", "out_scale"):
                return linear
        is_norm = _close(self.output(30 * x), self.output(10 * x))  # its output does not change when its input grows
        return replace(traits, role="norm") if is_norm else traits

    def _agrees(self, traits: Traits, x: Tensor, *drawn: str) -> bool:
        """Whether the Bayesian layer with a draw for each row computes what its own forward does for each row alone."""
        return all(self._agrees_at(magnitude, traits, x, *drawn) for magnitude in MAGNITUDES)

    def _agrees_at(self, magnitude: float, traits: Traits, x: Tensor, *drawn: str) -> bool:
        layer: Any = copy.deepcopy(self.module)
        layer.__class__ = generated_type(type(self.module), self.known, traits)
        layer.posterior = Posterior({})
        site = layer.site_of(layer)
        weight = site.base["weight"]
        weight.copy_(magnitude * weight * _signed(*weight.shape)[0].sign())
        shapes = {"in_scale": (site.in_size,), "out_scale": (site.out_size,)}
        shapes |= {name: tuple(tensor.shape) for name, tensor in site.base.items()}
        values: Any = {name: magnitude * _signed(*shapes[name]) for name in drawn if name in shapes}
        p = Perturbation(ROWS, **values)
        try:
            alone = [layer.own(layer.one_draw(site, p.only(i)), row.clone()) for i, row in enumerate(x.split(1))]
            return _close(layer.by_row(x.clone(), site.base, p, Rows(ROWS)), torch.cat(alone))
        except Exception:  # what raises in the trial would raise in the network
            return False


def _signed(*shape: int | None) -> Tensor:
    """Numbers for each row, of both signs, as an activation may let positive ones through."""
    noise = torch.randn(ROWS, *shape)  # type: ignore[arg-type]
    return (0.5 + noise.abs() % 1) * noise.sign()


def _close(first: Tensor, second: Tensor, tolerance: float = TOLERANCE) -> bool:
    if first.shape != second.shape:
        return False
    return float((first - second).abs().max()) <= tolerance * float(second.abs().max())
