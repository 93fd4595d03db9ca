"""The components in weight space, on their principal axes (iBNN, figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.lab.analyses.analysis import AnalysisError, Chart
from bayesify.lab.analyses.style import INK, colour
from bayesify.layers import bayesian_layers
from bayesify.layers.base import unwrapped
from bayesify.layers.norm import STATISTICS
from bayesify.prediction.samples import components, methods_of

Values = list[Tensor]


@dataclass(frozen=True)
class ComponentWeights(Chart):
    """Weights on the first two principal axes of the K components: (K, 2), and (K · draws, 2) for draws around them.

    `component` is the component of each draw, or -1 if layers choose independently (EMP, ECMP). `shared` is the base
    weight that all components scale, or None if it is component 0. `explained` are the axes' shares of the variance.
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
        add_numbers(axes, self.components, range(len(self.components)))
        if self.shared is not None:
            axes.plot(*self.shared, "*", ms=13, color="#d62728", mec=INK, mew=0.5, label="shared weights")


def component_weights(model: nn.Module, *, draws: int = 10, seed: int = 0) -> ComponentWeights:
    """The components' mean weights, and draws around them, on the components' first two principal axes.

    Weights are those of the plain network under each component, W ∘ (r sᵀ) for factors. Draws are projected onto the
    plane, so noise orthogonal to it is not visible.

    Args:
        model: A converted network with at least two components.
        draws: The number of draws per component.
        seed: The seed of the draws.

    Returns:
        The coordinates on the principal axes.

    Raises:
        AnalysisError: If the model has fewer than two components, or they are all equal.

    >>> import bayesify as by
    >>> model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.IBNN(8))
    >>> found = component_weights(model, draws=3)
    >>> found.components.shape, found.draws.shape, found.explained.shape
    ((8, 2), (24, 2), (7,))
    """
    count = require_components(model, 2)
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 0:
        raise AnalysisError(f"draws={draws!r}: expected an integer >= 0")
    space = WeightSpace(model)
    means = [space.member(k) for k in range(count)]
    plane = principal_plane(inner_products(space, means))
    others = (space.draw(seed, index) for index in range(count * draws))
    cross = torch.stack([_products(space, other, means) for other in (space.shared(), *others)])
    shared, *drawn = plane.project(cross).numpy()
    tied = all(layer.method.ties_components for layer in space.drawn.layers.values())
    return ComponentWeights(
        plane.points.numpy(),
        np.array(drawn).reshape(-1, 2),
        np.arange(count * draws) % count if tied else np.full(count * draws, -1),
        None if np.allclose(shared, plane.points[0], rtol=1e-4, atol=1e-9) else shared,
        plane.explained.numpy(),
    )


class WeightSpace:
    """The tensors of the plain network that draws change, under any component or draw.

    Values are lists of tensors in the order of `names`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.drawn = DrawnNetwork(model)
        self.names = list(self.drawn.draws(0, range(1)))
        self.members = self.drawn.members()
        self.drawn.write_draw(None)  # dropout layers become identities

    @property
    def is_weight(self) -> list[bool]:
        """Which tensors are weights and not batch statistics."""
        return [name.rpartition(".")[2] not in STATISTICS for name in self.names]

    def member(self, component: int) -> Values:
        """The mean of a component."""
        return self._values(self.members[component])

    def draw(self, seed: int, index: int) -> Values:
        """A draw; if components are tied over layers, of component index modulo K."""
        return self._values(self.drawn.draws(seed, range(index, index + 1)))

    def shared(self) -> Values:
        """The base tensors."""
        return self._values({})

    def write(self, values: Values) -> nn.Module:
        """The plain network with these values."""
        return self.drawn.write({name: value.unsqueeze(0) for name, value in zip(self.names, values, strict=True)})

    def _values(self, tensors: dict[str, Tensor]) -> Values:
        return [tensors[name][0] if name in tensors else self._base(name) for name in self.names]

    def _base(self, name: str) -> Tensor:
        """The model's own tensor, which some draws leave as it is."""
        layer = max((each for each in self.drawn.layers if name.startswith(f"{each}." if each else "")), key=len)
        tensor: Tensor = attrgetter(name.removeprefix(f"{layer}." if layer else ""))(self.drawn.layers[layer])
        return tensor.detach()


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
        """Project other points, given their inner products with the n points, all centred."""
        return cross @ self.directions


def principal_plane(gram: Tensor) -> Plane:
    """The plane from the inner products (n, n) of centred points, without axes of the size of the weights.

    Each axis points towards its farthest point. With two points there is one axis, and the other is 0.
    """
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:-1].clamp_min(0), vectors.flip(1)[:, :-1]
    if not float(values.sum()) > 0:
        raise AnalysisError("all components have the same weights, so they span no plane; train the model")
    vectors = vectors * torch.gather(vectors, 0, vectors.abs().argmax(0, keepdim=True)).sign()
    lengths = torch.where(values > 1e-12 * values[0], values, torch.zeros(())).sqrt()
    axes = torch.zeros(len(gram), 2, dtype=gram.dtype)
    directions = axes.clone()
    for j in range(min(2, len(values))):
        axes[:, j] = vectors[:, j] * lengths[j]
        directions[:, j] = vectors[:, j] / lengths[j] if lengths[j] > 0 else 0
    explained = torch.nn.functional.pad(values / values.sum(), (0, max(0, 2 - len(values))))
    return Plane(axes, directions, explained)


def require_components(model: nn.Module, least: int) -> int:
    """The number of a model's components; raises if they are too few."""
    count = components(methods_of(model))
    if count < least:
        methods = sorted({str(layer.method) for layer in bayesian_layers(unwrapped(model)).values()})
        raise AnalysisError(
            f"{', '.join(methods)}: {count} component{'s' * (count > 1)}; expected at least {least}: use a "
            "method with components, such as Rank1(4), IBNN(8) or Ensemble(4)"
        )
    return count


def add_numbers(axes: Axes, points: np.ndarray, numbers: Sequence[int]) -> None:
    """Write each component's number on its point."""
    for k, (x, y) in zip(numbers, points, strict=True):
        axes.annotate(str(k), (x, y), ha="center", va="center", fontsize=7, color="white", fontweight="bold")
