"""A Bayesian layer: an ordinary layer that applies the perturbation its family draws."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from ..family import Perturbation, Role, Site
from .hooked import tensor_of
from .kernel import Kernel
from .rows import Rows
from .turns import applied_by_turns, goes_by_turns


class BayesianLayer(Kernel, nn.Module):
    """Mixed into one static subclass per layer type; `convert` swaps a layer's class for it.

    A layer is its own one kernel, unless it says otherwise by `sites_of` and `kernels`.
    """

    plain: ClassVar[type[nn.Module]]
    role: ClassVar[Role]
    parts: ClassVar[tuple[str, ...]] = ()
    """The submodules whose tensors it draws as its own, for it reads them without calling those."""

    @classmethod
    def site_of(cls, layer: nn.Module) -> Site:
        """What a family sees of a plain or Bayesian layer of this type."""
        raise NotImplementedError

    @classmethod
    def sites_of(cls, layer: nn.Module) -> dict[str, Site]:
        """What a family sees of each of its kernels, by the suffix of their tensors' names."""
        return {"": cls.site_of(layer)}

    @classmethod
    def refusal(cls, layer: nn.Module) -> str | None:
        """Why no family can apply to a layer of this type, or None."""
        return None

    def kernels(self) -> Sequence[Kernel]:
        """Its weights with a posterior of their own."""
        return [self]

    def assembled(self, parts: Sequence[tuple[Kernel, dict[str, Tensor]]]) -> dict[str, Tensor]:
        """The layer's tensors by name, from each of its kernels with values for its tensors."""
        return {kernel.tensor_name(name): value for kernel, part in parts for name, value in part.items()}

    def draws_of_call(self) -> list[tuple[Kernel, Perturbation]]:
        """Its kernels with their perturbations of this call of the model."""
        return [(kernel, kernel.perturbation()) for kernel in self.kernels()]

    def of_first_row(self, drawn: Sequence[tuple[Kernel, Perturbation]]) -> dict[str, Tensor]:
        """The layer's tensors under the draw of the batch's first row."""
        return self.assembled([(kernel, kernel.folded(p, p.draw_of(0))) for kernel, p in drawn])

    def sites(self) -> list[Site]:
        """What the family sees of its kernels."""
        return [kernel.site() for kernel in self.kernels()]

    def plain_site(self) -> Site:
        return self.site_of(self)

    def base(self) -> dict[str, Tensor]:
        given = [(name, tensor_of(self, name)) for name in ("weight", "bias")]
        return {name: tensor for name, tensor in given if tensor is not None}

    def forward(self, input: Tensor) -> Tensor:
        """One draw for the whole batch folds into the weight; several are applied row by row."""
        perturbation = self.perturbation()
        if perturbation.is_shared and not self._updates(perturbation):
            return self.run(input, **self.folded(perturbation))
        return self._by_rows(input, perturbation)

    def _by_rows(self, input: Tensor, perturbation: Perturbation) -> Tensor:
        if input.numel() == 0:
            return self.run(input, **self.base())
        if self.is_unbatched(input):
            return self.run(input, **self.folded(perturbation, perturbation.draw_of(0)))
        batch_dim = self.row_dim(input)
        x = input.transpose(0, batch_dim) if batch_dim else input
        if x.shape[0] == 1:  # one row for all, such as position ids: from here on each row has its own
            x = x.expand(self.batch, *x.shape[1:])
        rows = self.follow(x.shape[0], self.batch, batch_dim)
        if goes_by_turns(perturbation):
            y = applied_by_turns(self, x, perturbation, rows)
        else:
            y = self.perturbed(x, perturbation, rows, self.base())
        return y.transpose(0, batch_dim) if batch_dim else y

    @property
    def batch(self) -> int:
        """The number of rows of this call of the model."""
        assert self.scope.position is not None
        return self.scope.position.shape[0]

    def follow(self, seen: int, batch: int, row_dim: int) -> Rows:
        """Which of the batch's rows are those of an input that has so many, in that dimension."""
        return Rows.follow(self.site_name, seen, batch, 0 if row_dim else self.scope.batch_dim)

    def row_dim(self, x: Tensor) -> int:
        """The dimension of an input's rows."""
        return self.scope.batch_dim if self.features_last and x.dim() > self.least_dims else 0

    def as_tensor(self, input: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The input as one tensor with rows."""
        tensor: Tensor = input
        return tensor

    def extra_repr(self) -> str:
        """The ordinary description and the method."""
        inner = super().extra_repr()
        return f"{inner}, {self.family}" if inner else str(self.family)

    def _updates(self, perturbation: Perturbation) -> bool:
        """Whether the call changes statistics that belong to the draws."""
        return perturbation.statistics is not None and self.training


class With:
    """A module seen with some attributes replaced."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def affine_site(layer: nn.Module, names: Sequence[str | None] = ("weight", "bias"), **sizes: Any) -> Site:
    """A site with the layer's weight and, if there is one, its bias; `names` are their names in the layer."""
    base = _named(layer, names)
    return Site(base, reset=lambda: _fresh(layer, names), kind=plain_type(layer).__name__, **sizes)


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """The ordinary type of a plain or Bayesian layer."""
    return layer.plain if isinstance(layer, BayesianLayer) else type(layer)


def _named(layer: nn.Module, names: Sequence[str | None]) -> dict[str, Tensor]:
    """The tensors of the layer that are its weight and its bias."""
    pairs = zip(("weight", "bias"), names, strict=True)
    return {name: t for name, own in pairs if own and (t := tensor_of(layer, own)) is not None}


def _fresh(layer: nn.Module, names: Sequence[str | None]) -> dict[str, Tensor]:
    """The layer's tensors as its own `reset_parameters` would set them; as they are, where it has none."""
    other = copy.deepcopy(layer, {id(t): t.detach().clone() for t in vars(layer).values() if isinstance(t, Tensor)})
    getattr(other, "reset_parameters", lambda: None)()
    return {name: t.detach() for name, t in _named(other, names).items()}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """What `model.named_modules()` gives, in a third of its time, which a prediction of a small network feels.

    >>> named_modules(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Tanh())).keys()
    dict_keys(['', '0', '0.0', '1'])
    """
    found: dict[nn.Module, str] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module not in found:
            found[module] = name
            prefix = name and name + "."
            waiting += [(prefix + key, part) for key, part in reversed(module._modules.items()) if part is not None]
    return {name: module for module, name in found.items()}


def bayesian_layers(model: nn.Module) -> dict[str, BayesianLayer]:
    """The converted layers of a model by name, each once."""
    return {name: layer for name, layer in named_modules(model).items() if isinstance(layer, BayesianLayer)}
