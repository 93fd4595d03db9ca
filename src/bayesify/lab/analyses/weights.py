"""Where the components are in the space of weights (iBNN, figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from bayesify.draw_counts import components, families_of
from bayesify.lab.analyses.analysis import AnalysisError, Chart
from bayesify.lab.analyses.style import INK, colour
from bayesify.layers import bayesian_layers
from bayesify.layers.norm import STATISTICS
from bayesify.selection import unwrapped
from bayesify.skeleton import Skeleton

Values = list[Tensor]


@dataclass(frozen=True)
class ComponentWeights(Chart):
    """Weights on the first two principal axes of the K components: (K, 2), and (K · draws, 2) for draws around them.

    `component` says whose draw each is, or -1 where layers choose on their own (EMP, ECMP). `shared` is the base weight
    that all components scale, or None where it is component 0. `explained` are the axes' shares of the variance.
    """

    components: np.ndarray
    draws: np.ndarray
    component: np.ndarray
    shared: np.ndarray | None
    explained: np.ndarray

    @property
    def axis_names(self) -> tuple[str, str]:
        first, second = (f"{100 * share:.0f}%" for share in self.explained[:2])
        return f"first principal axis ({first} of variance)", f"second principal axis ({second})"

    def columns(self) -> dict[str, np.ndarray]:
        parts = [("component", self.components, np.arange(len(self.components))), ("draw", self.draws, self.component)]
        if self.shared is not None:
            parts.append(("shared", self.shared[None], np.array([-1])))
        return {
            "point": np.concatenate([[name] * len(points) for name, points, _ in parts]),
            "component": np.concatenate([owner for _, _, owner in parts]),
            "first": np.concatenate([points[:, 0] for _, points, _ in parts]),
            "second": np.concatenate([points[:, 1] for _, points, _ in parts]),
        }

    def draw(self, axes: Axes) -> None:
        colours = [colour(int(k)) if k >= 0 else colour(7) for k in self.component]
        if len(self.draws):
            axes.scatter(self.draws[:, 0], self.draws[:, 1], s=8, c=colours, alpha=0.35, lw=0, label="draws")
        owners = [colour(k) for k in range(len(self.components))]
        axes.scatter(self.components[:, 0], self.components[:, 1], s=55, c=owners, label="components")
        numbered(axes, self.components, range(len(self.components)))
        if self.shared is not None:
            axes.plot(*self.shared, "*", ms=13, color="#d62728", mec=INK, mew=0.5, label="shared weights")


def component_weights(model: nn.Module, *, draws: int = 10, seed: int = 0) -> ComponentWeights:
    """The principal axes of the components' mean weights, with so many draws around each component laid on them.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.IBNN(8))
    >>> found = component_weights(model, draws=3)
    >>> found.components.shape, found.draws.shape, found.explained.shape
    ((8, 2), (24, 2), (7,))

    Weights are those a component gives the ordinary network, W ∘ (r sᵀ) for factors. Draws are projected on the plane,
    so what of their noise is at right angles to it is not seen.
    """
    count = need_components(model, 2)
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 0:
        raise AnalysisError(f"draws={draws!r}: expected a whole number >= 0 for each component")
    space = WeightSpace(model)
    means = [space.member(k) for k in range(count)]
    plane = principal_plane(inner_products(space, means))
    others = (space.draw(seed, index) for index in range(count * draws))
    cross = torch.stack([_products(space, other, means) for other in (space.shared(), *others)])
    shared, *drawn = plane.project(cross).numpy()
    tied = all(layer.family.tied for layer in space.skeleton.layers.values())
    return ComponentWeights(
        plane.points.numpy(),
        np.array(drawn).reshape(-1, 2),
        np.arange(count * draws) % count if tied else np.full(count * draws, -1),
        None if np.allclose(shared, plane.points[0], rtol=1e-4, atol=1e-9) else shared,
        plane.explained.numpy(),
    )


class WeightSpace:
    """The tensors that draws change in the ordinary network, under any component or draw.

    Values are lists of tensors in the order of `names`, which are pairs of layer and tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.skeleton = Skeleton(model)
        self.skeleton.write(0)  # now every tensor that may be written has its place
        self.skeleton.write(None)

    @property
    def names(self) -> list[tuple[str, str]]:
        """Of every tensor, its layer and its own."""
        return list(self.skeleton.targets)

    @property
    def is_weight(self) -> list[bool]:
        """Which tensors are weights and not batch statistics."""
        return [tensor not in STATISTICS for _, tensor in self.names]

    def member(self, component: int) -> Values:
        """The mean of a component."""
        self.skeleton.write_member(component)
        return [target.clone() for target in self.skeleton.targets.values()]

    def draw(self, seed: int, index: int) -> Values:
        """A draw; where a row keeps one component, that of index modulo K."""
        self.skeleton.write(seed, index)
        return [target.clone() for target in self.skeleton.targets.values()]

    def shared(self) -> Values:
        """The base tensors."""
        return [getattr(self.skeleton.layers[layer], tensor).detach() for layer, tensor in self.names]


def inner_products(space: WeightSpace, points: Sequence[Values]) -> Tensor:
    """⟨w_i - w̄, w_j - w̄⟩ of n points: (n, n)."""
    return torch.stack([_products(space, point, points) for point in points])


def _products(space: WeightSpace, point: Values, points: Sequence[Values]) -> Tensor:
    """⟨w - w̄, w_k - w̄⟩ for each of n points, tensor by tensor: (n,)."""
    total = torch.zeros(len(points), dtype=torch.float64)
    for i, counts in enumerate(space.is_weight):
        if counts:
            stack = torch.stack([each[i].double().flatten() for each in points])
            centre = stack.mean(0)
            total += ((stack - centre) @ (point[i].double().flatten() - centre)).cpu()
    return total


@dataclass(frozen=True)
class Plane:
    """The plane of the first two principal axes of n points, of which axis j is Σ_k directions[k, j] · point k."""

    points: Tensor
    directions: Tensor
    explained: Tensor

    def project(self, cross: Tensor) -> Tensor:
        """Other points, given their inner products with the n, all taken from the n's mean."""
        return cross @ self.directions


def principal_plane(gram: Tensor) -> Plane:
    """The plane from the inner products (n, n) of centred points: no axis is ever as large as the weights are.

    Each axis points to where its farthest point is. With two points there is one axis, and the other is 0.
    """
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:-1].clamp_min(0), vectors.flip(1)[:, :-1]
    if not float(values.sum()) > 0:
        raise AnalysisError("all components have the same weights, so there is no axis between them; train the model")
    vectors = vectors * torch.gather(vectors, 0, vectors.abs().argmax(0, keepdim=True)).sign()
    lengths = torch.where(values > 1e-12 * values[0], values, torch.zeros(())).sqrt()
    axes = torch.zeros(len(gram), 2, dtype=gram.dtype)
    directions = axes.clone()
    for j in range(min(2, len(values))):
        axes[:, j] = vectors[:, j] * lengths[j]
        directions[:, j] = vectors[:, j] / lengths[j] if lengths[j] > 0 else 0
    explained = torch.nn.functional.pad(values / values.sum(), (0, max(0, 2 - len(values))))
    return Plane(axes, directions, explained)


def need_components(model: nn.Module, least: int) -> int:
    """The number of a model's components, or an error where they are too few."""
    count = components(families_of(model))
    if count < least:
        families = sorted({str(layer.family) for layer in bayesian_layers(unwrapped(model)).values()})
        raise AnalysisError(
            f"{', '.join(families)}: {count} component{'s' * (count > 1)}, where at least {least} are needed; use a "
            "family with components, such as Rank1(4), IBNN(8) or Ensemble(4)"
        )
    return count


def numbered(axes: Axes, points: np.ndarray, numbers: Sequence[int]) -> None:
    """Each component's number on its point."""
    for k, (x, y) in zip(numbers, points, strict=True):
        axes.annotate(str(k), (x, y), ha="center", va="center", fontsize=7, color="white", fontweight="bold")
